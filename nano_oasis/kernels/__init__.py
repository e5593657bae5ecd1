"""Attention over a paged KV cache: torch twins, their Triton counterparts, and the choice between them.

Importing this package imports torch but never Triton; `dispatch.py` does that once, when a GPU is used.
"""

from nano_oasis.kernels.batch import AttentionBatch, make_batch
from nano_oasis.kernels.dispatch import Kernels, select_kernels

__all__ = ["AttentionBatch", "Kernels", "make_batch", "select_kernels"]
