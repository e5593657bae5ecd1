"""Triton twins of reference_blocks.quantise and dequantise.

Owns: int8 codes and their scales on a GPU. Must not know: which blocks, what is done about values that
int8 cannot hold (their scale says so).
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.reference_blocks import LARGEST_VALUE, SMALLEST_SCALE
from nano_oasis.kernels.triton_common import DTYPES, Tiles, check_block, round_half_even

TILES = Tiles(m=1, n=1, warps=4, stages=1)


@triton.jit
def quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, limit,
    PER_CHANNEL: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """One program: one block of one KV head. Grid (blocks, HEADS).

    x, codes [n, BLOCK_SIZE, HEADS, DIM]; scale [n, HEADS, DIM] if PER_CHANNEL, else [n, BLOCK_SIZE, HEADS],
    the bits of bfloat16 as int16: what rounds up is integer arithmetic. limit: the largest magnitude
    allowed. The divisions round as torch's do, so the codes are the same.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, BLOCK_SIZE), tl.arange(0, DIM_PAD)
    inside = (d < DIM)[None, :]
    at = (((block * BLOCK_SIZE + t) * HEADS + head) * DIM)[:, None] + d[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_SIZE, DIM_PAD]
    over: tl.constexpr = 0 if PER_CHANNEL else 1  # the axis that shares a scale
    size = tl.abs(x)
    # By what holds, not by what does not: no comparison holds for NaN.
    spoiled = tl.max(tl.where(size <= limit, 0, 1), over, keep_dims=True)
    largest = tl.max(tl.where(size <= limit, size, 0.0), over, keep_dims=True)
    scale = tl.maximum(tl.div_rn(largest, 127.0), SMALLEST)
    upper = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    codes = round_half_even(tl.div_rn(x, (upper << 16).to(tl.float32, bitcast=True)))
    tl.store(codes_ptr + at, tl.where(spoiled != 0, 0.0, codes).to(tl.int8), mask=inside)
    bits = tl.where(spoiled != 0, 0x7FC0, upper).to(tl.int16)
    if PER_CHANNEL:  # [1, DIM_PAD]
        tl.store(scale_ptr + ((block * HEADS + head) * DIM + d)[None, :], bits, mask=inside)
    else:  # [BLOCK_SIZE, 1]
        tl.store(scale_ptr + ((block * BLOCK_SIZE + t) * HEADS + head)[:, None], bits)


@triton.jit
def dequantise_kernel(
    codes_ptr, scale_ptr, out_ptr,
    PER_CHANNEL: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One program: one block of one KV head, as quantise_kernel. scale bf16; out of any float dtype."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, BLOCK_SIZE), tl.arange(0, DIM_PAD)
    inside = (d < DIM)[None, :]
    at = (((block * BLOCK_SIZE + t) * HEADS + head) * DIM)[:, None] + d[None, :]
    codes = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.float32)  # [BLOCK_SIZE, DIM_PAD]
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + ((block * HEADS + head) * DIM + d)[None, :], mask=inside, other=0.0)
    else:
        scale = tl.load(scale_ptr + ((block * BLOCK_SIZE + t) * HEADS + head)[:, None])
    tl.store(out_ptr + at, (codes * scale.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)


def quantise(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """See reference_blocks.quantise. Raises ValueError for what the kernel does not handle."""
    if axis not in (-3, -1):
        raise ValueError(f"axis must be -3 (a scale per channel) or -1 (per token), got {axis}")
    if x.dtype not in DTYPES:
        raise ValueError(f"GPU dtypes are float32, float16 and bfloat16, got {x.dtype}")
    block_size, heads, dim = x.shape[-3:]
    check_block(block_size, dim)
    x = x.contiguous()
    shape = list(x.shape)
    shape[axis] = 1
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    if x.numel():
        limit = LARGEST_VALUE * torch.finfo(x.dtype).max
        quantise_kernel[(x.numel() // (block_size * heads * dim), heads)](
            x, codes, scale.view(torch.int16), limit,
            axis == -3, heads, dim, triton.next_power_of_2(dim), block_size, SMALLEST_SCALE, **TILES.options,
        )  # fmt: skip
    return codes, scale


def dequantise(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """See reference_blocks.dequantise; out must be contiguous."""
    n, block_size, heads, dim = codes.shape
    check_block(block_size, dim)
    per_channel = tuple(scale.shape) == (n, 1, heads, dim)
    if not per_channel and tuple(scale.shape) != (n, block_size, heads, 1):
        raise ValueError(f"a scale of {list(scale.shape)} does not fit codes of {list(codes.shape)}")
    if out.shape != codes.shape or not out.is_contiguous() or out.dtype not in DTYPES:
        raise ValueError(
            f"out must be {list(codes.shape)}, contiguous, float32, float16 or bfloat16; got "
            f"{list(out.shape)} {out.dtype}"
        )
    if codes.numel():
        dequantise_kernel[(n, heads)](
            codes.contiguous(), scale.contiguous(), out,
            per_channel, heads, dim, triton.next_power_of_2(dim), block_size, **TILES.options,
        )  # fmt: skip
