"""What the Triton kernels share: input checks, tile shapes, one step of the online softmax, rounding.

Owns: the limits of the Triton path and its launch settings. Must not know: which kernel calls.
Only the other triton_* files import this one; importing it imports Triton.
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.reference import check_shapes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """Launch settings of one attention kernel, for one head size and dtype."""

    m: int  # rows of a program: queries times the heads that share a KV head
    n: int  # keys per loop step
    warps: int
    stages: int  # loop steps whose loads are in flight

    @property
    def options(self) -> dict[str, Any]:
        # Fused multiply-add is asked for by name because Triton's default for it is changing.
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def check_inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> None:
    """Refuse by name what the kernels do not handle. q is any [T, heads, D]; caches are [N, B, Hkv, D]."""
    check_shapes(q, k_cache, v_cache, window)
    check_block(k_cache.shape[1], k_cache.shape[3])
    if k_cache.dtype not in DTYPES or q.dtype not in DTYPES:
        raise ValueError(f"GPU dtypes are float32, float16 and bfloat16, got {q.dtype} and {k_cache.dtype}")
    if not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise ValueError("k_cache and v_cache must be contiguous")


def check_block(block_size: int, dim: int) -> None:
    """Raises ValueError for blocks that do not fit one tile of a kernel."""
    if block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two on a GPU, got {block_size}; use 16 or 32")
    if dim > MAX_DIM:
        raise ValueError(f"head sizes above {MAX_DIM} are not supported on a GPU, got {dim}")


@triton.jit
def round_half_even(x):
    """fp32, |x| < 2**22, to the nearest integer, ties to even: 1.5 * 2**23 leaves no room for a fraction.

    Triton's language has no such function, and its libdevice ones differ from GPU to GPU.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def online_softmax(scores, row_max, row_sum):
    """One tile of the running softmax in base 2 (Milakov and Gimelshein, arXiv 1805.02867).

    scores [M, N] fp32, -inf where hidden; row_max, row_sum [M] fp32 -> weights [M, N] relative to the new
    maximum, decay [M] for what was summed before, new row_max, new row_sum. A row that has seen nothing
    keeps maximum -inf and sum 0, without a NaN from -inf - -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(row_max - anchor)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, 1)


@triton.jit
def finish_softmax(acc, row_max, row_sum):
    """acc [M, D], row_max, row_sum [M] -> output [M, D], natural-log lse [M]; nothing seen: 0, -inf."""
    norm = tl.where(row_sum == 0.0, 1.0, row_sum)
    return acc / norm[:, None], (row_max + tl.log2(norm)) * 0.6931471805599453
