"""Triton twin of reference_sketch.top_blocks.

Owns: the blocks of most mass, in one launch of fixed shape. Must not know: how mass is estimated (softmax
over blocks and mean over heads are torch's), what is resident (select.py minds that, on the host).
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.triton_common import Tiles

TILES = Tiles(
    m=32, n=128, warps=4, stages=1
)  # blocks that a program ranks, blocks it compares them to at once


@triton.jit(
    do_not_specialize=["width", "heads", "count"], do_not_specialize_on_alignment=["forced_ptr", "valid_ptr"]
)
def top_blocks_kernel(
    mass_ptr, forced_ptr, valid_ptr, ids_ptr, width, heads, count,
    MASKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One program ranks TILE_M blocks of one row and head: a block's rank is how many go before it.

    Grid (rows * heads, width / TILE_M). mass [rows, heads, width] fp32; forced and valid [rows, width] as
    bytes (valid is read if MASKED); ids [rows, heads, count] int64, count <= width. Nothing is sorted and no
    program waits for another. Ranks are a total order, blocks that are not valid last, so every entry of ids
    is written once. The work is width**2 comparisons, spread over the whole GPU.
    """
    index = tl.program_id(0).to(tl.int64)
    flags = index // heads * width
    i = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    own = wanted(mass_ptr + index * width, forced_ptr + flags, valid_ptr + flags, i, width, MASKED)
    before = tl.zeros([TILE_M, TILE_N], tl.int32)
    for begin in range(0, width, TILE_N):
        j = begin + tl.arange(0, TILE_N)
        other = wanted(mass_ptr + index * width, forced_ptr + flags, valid_ptr + flags, j, width, MASKED)
        tie = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])  # of equals the earlier
        before += ((other[None, :] > own[:, None]) | tie).to(tl.int32)
    rank = tl.sum(before, 1)
    ids = tl.where(own < 0.0, -1, i).to(tl.int64)
    tl.store(ids_ptr + index * count + rank, ids, mask=(i < width) & (rank < count))


@triton.jit
def wanted(mass_ptr, forced_ptr, valid_ptr, at, width, MASKED: tl.constexpr):
    """fp32: 2 for a forced block, above every mass; -1 for one that is not valid. What is past the end is the
    least there is and later than all, so nothing comes after it."""
    inside = at < width
    mass = tl.load(mass_ptr + at, mask=inside, other=0.0)
    mass = tl.where(mass > 0.0, mass, 0.0)  # NaN too: it would have no rank
    mass = tl.where(tl.load(forced_ptr + at, mask=inside, other=0) != 0, 2.0, mass)
    if MASKED:
        mass = tl.where(tl.load(valid_ptr + at, mask=inside, other=0) != 0, mass, -1.0)
    return mass


def top_blocks(mass: Tensor, count: int, forced: Tensor, valid: Tensor | None = None) -> Tensor:
    """See reference_sketch.top_blocks; of equals the earlier comes first. Refuses other dtypes."""
    rows, heads, width = mass.shape
    if mass.dtype != torch.float32 or forced.dtype != torch.bool:
        raise ValueError(f"mass must be float32 and forced bool, got {mass.dtype} and {forced.dtype}")
    ids = torch.empty(rows, heads, min(count, width), dtype=torch.int64, device=mass.device)
    if ids.numel():
        flags = [x.contiguous().view(torch.uint8) for x in (forced, forced if valid is None else valid)]
        top_blocks_kernel[(rows * heads, triton.cdiv(width, TILES.m))](
            mass.contiguous(), *flags, ids, width, heads, ids.shape[2], valid is not None, TILES.m, TILES.n,
            **TILES.options,
        )  # fmt: skip
    return ids
