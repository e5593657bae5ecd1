"""What must be set before any test module is imported."""

import os

import torch

# Without a GPU the Triton kernels run in Triton's interpreter. It reads this once, when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
