"""Triton twin of reference.paged_decode.

Owns: attention of one query per row, the context split over programs and merged by log-sum-exp.
Must not know: requests, the model.
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.triton_common import LOG2_E, Tiles, check_inputs, finish_softmax, online_softmax

MAX_SPLITS = 64
MERGE_STEP = 8  # partial results the merge kernel reads at once
MERGE_TILES = Tiles(m=1, n=MERGE_STEP, warps=1, stages=2)


# The plain integers and the batch's metadata are not specialised on: one compilation serves every step.
@triton.jit(
    do_not_specialize=["table_width", "splits"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"]
)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, table_ptr, lens_ptr, table_width, splits, scale_log2,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One program: one split of one row's context, for the G heads that share one KV head.

    Flash-Decoding (Dao et al., 2023) over a block table (PagedAttention, arXiv 2309.06180). Grid
    (rows * splits, KV_HEADS), fixed whatever the lengths: each program works out its share from lens, and
    an empty share yields 0 and -inf. q [rows, HEADS, DIM]; caches [N, BLOCK_SIZE, KV_HEADS, DIM] in q's
    dtype; part [rows, HEADS, splits, DIM] in any float dtype; part_lse [rows, HEADS, splits] fp32, natural
    log; table [rows, table_width], lens [rows] int32, in blocks and tokens (the query's own included).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    context = tl.load(lens_ptr + row)
    oldest = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    share = tl.cdiv(tl.cdiv(context - oldest, splits), TILE_N) * TILE_N  # keys per split, whole tiles
    low = oldest + split * share
    high = tl.minimum(low + share, context)

    m = tl.arange(0, TILE_M)  # the G heads, padded to what a matrix instruction takes
    head = kv_head * GROUP + m
    d = tl.arange(0, DIM_PAD)
    q_index = row.to(tl.int64) * HEADS + head
    q_mask = (m < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + q_index[:, None] * DIM + d[None, :], mask=q_mask, other=0.0)  # [TILE_M, DIM_PAD]

    acc = tl.zeros([TILE_M, DIM_PAD], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    for begin in range(low, high, TILE_N):
        n = begin + tl.arange(0, TILE_N)
        inside = n < high  # slots past the context are not touched: they may hold anything, even NaN
        block = tl.load(table_ptr + row * table_width + n // BLOCK_SIZE, mask=inside, other=0)
        token = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        offset = (token * KV_HEADS + kv_head) * DIM
        k_mask = inside[None, :] & (d < DIM)[:, None]
        k = tl.load(k_ptr + offset[None, :] + d[:, None], mask=k_mask, other=0.0)  # [DIM_PAD, TILE_N]
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        weights, decay, row_max, row_sum = online_softmax(scores, row_max, row_sum)
        v_mask = inside[:, None] & (d < DIM)[None, :]
        v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=v_mask, other=0.0)  # [TILE_N, DIM_PAD]
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    out, lse = finish_softmax(acc, row_max, row_sum)
    part = q_index * splits + split
    tl.store(part_ptr + part[:, None] * DIM + d[None, :], out.to(part_ptr.dtype.element_ty), mask=q_mask)
    tl.store(part_lse_ptr + part, lse, mask=m < GROUP)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, splits,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, MAX: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per (row, head) adds up its splits: out = sum_s exp(lse_s - lse) part_s.

    Exact whatever the splits, as in Flash-Decoding. part [rows * heads, splits, DIM], part_lse [rows *
    heads, splits], lse [rows * heads] fp32; out [rows * heads, DIM]. splits <= MAX; MAX and STEP are
    powers of two. Nothing seen at all yields 0 and -inf.
    """
    index = tl.program_id(0).to(tl.int64)
    every_split = tl.arange(0, MAX)
    every = tl.load(
        part_lse_ptr + index * splits + every_split, mask=every_split < splits, other=float("-inf")
    )
    peak = tl.max(every, 0)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(every - anchor), 0)
    norm = tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, DIM_PAD)
    acc = tl.zeros([DIM_PAD], tl.float32)
    for begin in range(0, splits, STEP):
        s = begin + tl.arange(0, STEP)
        some = tl.load(part_lse_ptr + index * splits + s, mask=s < splits, other=float("-inf"))
        weights = tl.exp(some - anchor) / norm
        mask = (s < splits)[:, None] & (d < DIM)[None, :]
        part = tl.load(part_ptr + (index * splits + s)[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        acc += tl.sum(weights[:, None] * part, 0)
    tl.store(out_ptr + index * DIM + d, acc.to(out_ptr.dtype.element_ty), mask=d < DIM)
    tl.store(lse_ptr + index, peak + tl.log(norm))


def decode_tiles(dim_pad: int, dtype: torch.dtype, group: int) -> Tiles:
    """Settings that compile without spills on every target (compile_check.py reports them)."""
    m = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:  # products in full fp32 take many registers
        return Tiles(m, 32, warps=4, stages=1) if dim_pad <= 128 else Tiles(m, 16, warps=8, stages=1)
    return Tiles(m, 64 if dim_pad <= 128 else 32, warps=4, stages=2)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def choose_splits(rows: int, kv_heads: int, max_context: int, tile: int, processors: int) -> int:
    """Enough programs to fill the device twice over, but no split under two tiles of keys."""
    wanted = triton.cdiv(2 * processors, max(1, rows * kv_heads))
    return max(1, min(wanted, max_context // (2 * tile), MAX_SPLITS))


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    return_lse: bool = False,
    *,
    context_list: list[int] | None = None,
    plans: dict[Any, Any] | None = None,
    splits: int | None = None,
) -> Any:
    """See reference.paged_decode. The number of splits follows context_list (else the table's width)."""
    check_inputs(q, k_cache, v_cache, window)
    if q.dtype != k_cache.dtype:
        raise ValueError(f"q and the caches must have one dtype on a GPU, got {q.dtype} and {k_cache.dtype}")
    q = q.contiguous()
    rows, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group, dim_pad = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    tiles = decode_tiles(dim_pad, q.dtype, group)
    if splits is None:
        seen = max(context_list, default=0) if context_list is not None else block_table.shape[1] * block_size
        seen = min(seen, window) if window else seen
        splits = choose_splits(rows, kv_heads, seen, tiles.n, _processors(q.device))
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    part, part_lse = out, lse  # a single split is the result
    if splits > 1:
        part = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    if rows:
        decode_kernel[(rows * splits, kv_heads)](
            q, k_cache, v_cache, part, part_lse, block_table, context_lens,
            block_table.stride(0), splits, scale * LOG2_E,
            window or 0, heads, kv_heads, dim, dim_pad, block_size, tiles.m, tiles.n,
            **tiles.options,
        )  # fmt: skip
    if rows and splits > 1:
        merge_kernel[(rows * heads,)](
            part, part_lse, out, lse, splits, dim, dim_pad, MAX_SPLITS, MERGE_STEP, **MERGE_TILES.options
        )
    return (out, lse) if return_lse else out
