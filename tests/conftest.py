"""What must be set before any test module is imported, and what the kernels' tests share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: one thread for each of several test processes
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter. It reads this once, when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as bit patterns and would multiply those (its issue 11584)."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widen(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, widen(a), widen(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints, by family."""
    from make_checkpoints import make_hf

    paths = {family: tmp_path_factory.mktemp(family) for family in ("llama", "gemma3")}
    for family, path in paths.items():
        make_hf(family, path)
    return paths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer: what an LLM can be made of."""
    from make_checkpoints import make_hf
    from make_tokenizers import write_bpe_folder

    path = tmp_path_factory.mktemp("tiny")
    make_hf("llama", path, vocab_size=640)
    write_bpe_folder(path)
    return path


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Stops the coordinators of oasis_engines; for modules that use these."""
    from oasis_engines import COORDINATORS

    yield
    while COORDINATORS:
        COORDINATORS.pop().stop()
