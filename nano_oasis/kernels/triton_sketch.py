"""Triton twins of reference_sketch.fourbit_build, fourbit_logits and fourbit_mass.

Owns: four-bit sketches on a GPU: made from sealed keys, scored in place through a table of blocks. Must
not know: requests, where sketches live, what is chosen by the scores.
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.reference_sketch import SMALLEST_QUERY, check_channels, group_means
from nano_oasis.kernels.triton_common import DTYPES, Tiles, check_block, round_half_even

TILE_C = 32  # channels per loop step: the least that the matrix units take of 8 bits


@triton.jit
def fourbit_build_kernel(
    k_ptr, codes_ptr, base_ptr, step_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One program: one block of one KV head. Grid (blocks, HEADS).

    keys [n, BLOCK_SIZE, HEADS, DIM], any of the three dtypes; codes [n, HEADS, DIM / 2, BLOCK_SIZE] uint8;
    base, step [n, HEADS, BLOCK_SIZE] fp16. The divisions round as torch's do, so the codes are the same.
    """
    HALF: tl.constexpr = DIM // 2
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, c = tl.arange(0, BLOCK_SIZE), tl.arange(0, HALF_PAD)
    inside = (c < HALF)[None, :]
    at = (((block * BLOCK_SIZE + t) * HEADS + head) * DIM)[:, None] + c[None, :]
    low = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_SIZE, HALF_PAD]
    high = tl.load(k_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    least = tl.min(tl.where(inside, tl.minimum(low, high), float("inf")), 1)
    most = tl.max(tl.where(inside, tl.maximum(low, high), float("-inf")), 1)
    base = least.to(tl.float16)  # [BLOCK_SIZE]
    step = tl.div_rn(most - base.to(tl.float32), 15.0).to(tl.float16)
    bases, steps = base.to(tl.float32)[:, None], step.to(tl.float32)[:, None]
    codes = nearest_code(low, bases, steps) | (nearest_code(high, bases, steps) << 4)
    cell = block * HEADS + head
    where = (cell * HALF + c)[None, :] * BLOCK_SIZE + t[:, None]
    tl.store(codes_ptr + where, codes.to(tl.uint8), mask=inside)
    tl.store(base_ptr + cell * BLOCK_SIZE + t, base)
    tl.store(step_ptr + cell * BLOCK_SIZE + t, step)


@triton.jit
def nearest_code(x, base, step):
    """int32 in 0..15. A step of 0 divides to NaN or infinity, which becomes 0."""
    code = tl.div_rn(x - base, step)
    code = tl.where(tl.abs(code) < float("inf"), code, 0.0)
    return round_half_even(tl.minimum(tl.maximum(code, 0.0), 15.0)).to(tl.int32)


# The plain integers and the step's metadata are not specialised on: one compilation serves every step.
@triton.jit(
    do_not_specialize=["width", "first_head"],
    do_not_specialize_on_alignment=["q_ptr", "table_ptr", "counts_ptr"],
)
def fourbit_logits_kernel(
    q_ptr, codes_ptr, base_ptr, step_ptr, table_ptr, counts_ptr, out_ptr, width, first_head,
    SLAB_HEADS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_C: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """One program: TILE_N tokens (whole blocks) of one row, for the G heads that share one KV head.

    Grid (rows, blocks of the table / blocks of a tile, KV_HEADS), fixed whatever the counts. q [rows,
    HEADS, DIM] fp32, scaled; codes [N, SLAB_HEADS, DIM / 2, BLOCK_SIZE] uint8; base, step [N, SLAB_HEADS,
    BLOCK_SIZE] fp16; table [rows, width] and counts [rows], int64; out [rows, HEADS, width]
    fp32. The KV heads are SLAB_HEADS' from first_head on. A query is rounded to 8 bits, so the products are
    exact integers, and the same as on the CPU.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    TILE_BLOCKS: tl.constexpr = TILE_N // BLOCK_SIZE
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    start = tl.program_id(1) * TILE_BLOCKS
    count = tl.minimum(tl.load(counts_ptr + row), width)
    g = tl.arange(0, TILE_M)  # the G heads, padded to what a matrix instruction takes
    query = row * HEADS + kv_head * GROUP + g
    blocks = start + tl.arange(0, TILE_BLOCKS)
    out = out_ptr + query[:, None] * width + blocks[None, :]
    out_mask = (g < GROUP)[:, None] & (blocks < width)[None, :]

    n = tl.arange(0, TILE_N)
    real = start + n // BLOCK_SIZE < count  # the other entries may name blocks that do not exist
    block = tl.load(table_ptr + row * width + start + n // BLOCK_SIZE, mask=real, other=0)
    cell = block.to(tl.int64) * SLAB_HEADS + first_head + kv_head  # [TILE_N]
    codes = codes_ptr + cell * (HALF * BLOCK_SIZE) + n % BLOCK_SIZE
    q_sum, most = tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M], tl.float32)
    for begin in range(0, DIM, TILE_C):
        q = query_part(q_ptr, query, begin, DIM, g < GROUP, DIM, TILE_C)
        q_sum += tl.sum(q, 1)
        most = tl.maximum(most, tl.max(tl.abs(q), 1))
    q_step = tl.div_rn(tl.maximum(most, SMALLEST), 127.0)[:, None]
    dots = tl.zeros([TILE_M, TILE_N], tl.int32)
    for begin in range(0, HALF, TILE_C):
        c = begin + tl.arange(0, TILE_C)
        c_mask = real[None, :] & (c < HALF)[:, None]
        packed = tl.load(codes[None, :] + c[:, None] * BLOCK_SIZE, mask=c_mask, other=0)  # [TILE_C, TILE_N]
        low = query_part(q_ptr, query, begin, HALF, g < GROUP, DIM, TILE_C)  # [TILE_M, TILE_C]
        high = query_part(q_ptr + HALF, query, begin, HALF, g < GROUP, DIM, TILE_C)
        dots = tl.dot(round_half_even(tl.div_rn(low, q_step)).to(tl.int8), (packed & 15).to(tl.int8), dots)
        dots = tl.dot(round_half_even(tl.div_rn(high, q_step)).to(tl.int8), (packed >> 4).to(tl.int8), dots)

    base = tl.load(base_ptr + cell * BLOCK_SIZE + n % BLOCK_SIZE, mask=real, other=0.0).to(tl.float32)
    step = tl.load(step_ptr + cell * BLOCK_SIZE + n % BLOCK_SIZE, mask=real, other=0.0).to(tl.float32)
    logits = tl.reshape(
        base[None, :] * q_sum[:, None] + step[None, :] * (q_step * dots.to(tl.float32)),
        [TILE_M, TILE_BLOCKS, BLOCK_SIZE],
    )
    peak = tl.max(logits, 2)
    total = peak + tl.log(tl.sum(tl.exp(logits - peak[:, :, None]), 2))
    tl.store(out, tl.where((blocks < count)[None, :], total, float("-inf")), mask=out_mask)


@triton.jit
def query_part(q_ptr, query, begin, end, real, DIM: tl.constexpr, TILE_C: tl.constexpr):
    """Channels [begin, begin + TILE_C) of some query heads, fp32 [heads, TILE_C]; 0 from `end` on."""
    c = begin + tl.arange(0, TILE_C)
    return tl.load(
        q_ptr + query[:, None] * DIM + c[None, :], mask=real[:, None] & (c < end)[None, :], other=0.0
    )


def build_tiles(half_pad: int, block_size: int) -> Tiles:
    """A block of one head is a tile; more than 1,024 of its bytes are too much for one warp's registers."""
    return Tiles(1, 1, warps=min(max(half_pad * block_size // 1024, 1), 8), stages=1)


def fourbit_build(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See reference_sketch.fourbit_build. Raises ValueError for what the kernel does not handle."""
    n, block_size, heads, dim = keys.shape
    check_block(block_size, dim)
    check_channels(dim, 4)
    if keys.dtype not in DTYPES:
        raise ValueError(f"GPU dtypes are float32, float16 and bfloat16, got {keys.dtype}")
    codes = torch.empty(n, heads, dim // 2, block_size, dtype=torch.uint8, device=keys.device)
    base, step = torch.empty(2, n, heads, block_size, dtype=torch.float16, device=keys.device)
    half_pad = triton.next_power_of_2(dim // 2)
    if n:
        fourbit_build_kernel[(n, heads)](
            keys.contiguous(), codes, base, step,
            heads, dim, half_pad, block_size, **build_tiles(half_pad, block_size).options,
        )  # fmt: skip
    return codes, base, step


def logits_tiles(group: int, block_size: int) -> Tiles:
    """Settings that compile without spills on every target (compile_check.py reports them)."""
    m = max(16, triton.next_power_of_2(group))
    return Tiles(m, max(128, block_size), warps=4 if m <= 32 else 8, stages=1)


def fourbit_logits(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor,
    heads: slice = slice(None),
) -> Tensor:  # fmt: skip
    """See reference_sketch.fourbit_logits. Entries of the table from counts[r] on are never read."""
    rows, query_heads, dim = q.shape
    _, slab_heads, half, block_size = codes.shape
    check_block(block_size, dim)
    first, stop, _ = heads.indices(slab_heads)
    kv_heads = stop - first
    if dim != 2 * half or kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{list(q.shape)} does not fit sketches of {kv_heads} KV heads of size {2 * half}")
    if not (codes.is_contiguous() and base.is_contiguous() and step.is_contiguous()):
        raise ValueError("codes, base and step must be contiguous")
    width = table.shape[1]
    out = torch.empty(rows, query_heads, width, dtype=torch.float32, device=q.device)
    tiles = logits_tiles(query_heads // kv_heads, block_size)
    if out.numel():
        fourbit_logits_kernel[(rows, triton.cdiv(width * block_size, tiles.n), kv_heads)](
            q.float().contiguous(), codes, base, step, table.contiguous(), counts, out, width, first,
            slab_heads, query_heads, kv_heads, dim, block_size, tiles.m, tiles.n, TILE_C, SMALLEST_QUERY,
            **tiles.options,
        )  # fmt: skip
    return out


def fourbit_mass(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor, scale: float,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """See reference_sketch.fourbit_mass. The softmax over blocks and the mean over heads are torch's."""
    logits = fourbit_logits(q.float() * scale, codes, base, step, table, counts)
    return group_means(torch.softmax(logits, -1).nan_to_num(0.0), groups)
