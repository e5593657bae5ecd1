"""Triton twin of reference.paged_prefill.

Owns: causal attention of many queries per row over a block table. Must not know: requests, the model.
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.triton_common import LOG2_E, Tiles, check_inputs, finish_softmax, online_softmax


# The plain integers and the batch's metadata are not specialised on: one compilation serves every step.
@triton.jit(
    do_not_specialize=["table_width", "query_tiles"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lens_ptr"],
)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, starts_ptr, lens_ptr,
    table_width, query_tiles, scale_log2,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries of one row, for the G heads that share one KV head.

    FlashAttention-2 (arXiv 2307.08691) over a block table (PagedAttention, arXiv 2309.06180). Grid
    (rows * query_tiles, KV_HEADS); tiles past a row's last query return at once, so the grid depends on
    the longest row only. q, out [T, HEADS, DIM]; caches [N, BLOCK_SIZE, KV_HEADS, DIM] in q's dtype;
    lse [T, HEADS] fp32, natural log; table [rows, table_width], starts [rows + 1], lens [rows] int32, in
    blocks and tokens. scale_log2 is the softmax scale times log2(e). WINDOW 0 means no window.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_Q: tl.constexpr = TILE_M // GROUP  # queries of a tile; a few of the TILE_M rows may stay unused
    row = tl.program_id(0) // query_tiles
    first = (tl.program_id(0) % query_tiles) * TILE_Q
    kv_head = tl.program_id(1)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    if first >= count:
        return
    before = tl.load(lens_ptr + row) - count  # tokens of the row computed in earlier steps

    m = tl.arange(0, TILE_M)
    query, head = first + m // GROUP, kv_head * GROUP + m % GROUP
    valid = (m < TILE_Q * GROUP) & (query < count)
    position = before + query
    d = tl.arange(0, DIM_PAD)
    q_index = (start + query).to(tl.int64) * HEADS + head
    q_offsets = q_index[:, None] * DIM + d[None, :]
    q_mask = valid[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)  # [TILE_M, DIM_PAD]

    newest = before + tl.minimum(first + TILE_Q, count) - 1  # the last key that any query here sees
    oldest = tl.maximum(before + first - WINDOW + 1, 0) if WINDOW else 0
    acc = tl.zeros([TILE_M, DIM_PAD], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    for begin in range(oldest // TILE_N * TILE_N, newest + 1, TILE_N):
        n = begin + tl.arange(0, TILE_N)
        # Nothing outside [oldest, newest] is touched: unused slots may hold anything, even NaN.
        inside = (n >= oldest) & (n <= newest)
        block = tl.load(table_ptr + row * table_width + n // BLOCK_SIZE, mask=inside, other=0)
        token = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        offset = (token * KV_HEADS + kv_head) * DIM
        k_mask = inside[None, :] & (d < DIM)[:, None]
        k = tl.load(k_ptr + offset[None, :] + d[:, None], mask=k_mask, other=0.0)  # [DIM_PAD, TILE_N]
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        age = position[:, None] - n[None, :]  # 0 = the query's own token
        visible = (age >= 0) & (age < WINDOW) if WINDOW else age >= 0
        scores = tl.where(visible, scores, float("-inf"))
        weights, decay, row_max, row_sum = online_softmax(scores, row_max, row_sum)
        v_mask = inside[:, None] & (d < DIM)[None, :]
        v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=v_mask, other=0.0)  # [TILE_N, DIM_PAD]
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    out, lse = finish_softmax(acc, row_max, row_sum)
    tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(lse_ptr + q_index, lse, mask=valid)


def prefill_tiles(dim_pad: int, dtype: torch.dtype, group: int) -> Tiles:
    """The largest tiles that compile without spills on every target (compile_check.py reports them)."""
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:  # products in full fp32 take many registers
        tiles = Tiles(32, 32 if dim_pad <= 128 else 16, warps=8, stages=1)
    elif dim_pad <= 64:
        tiles = Tiles(64, 64, warps=4, stages=2)
    else:
        tiles = Tiles(128 if dim_pad <= 128 else 64, 32, warps=8, stages=2)
    return dataclasses.replace(tiles, m=max(tiles.m, least))


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    return_lse: bool = False,
    *,
    context_list: list[int] | None = None,
    query_list: list[int] | None = None,
) -> Any:
    """See reference.paged_prefill. Without query_list the grid is sized for one row of all T tokens."""
    check_inputs(q, k_cache, v_cache, window)
    if q.dtype != k_cache.dtype:
        raise ValueError(f"q and the caches must have one dtype on a GPU, got {q.dtype} and {k_cache.dtype}")
    q = q.contiguous()
    tokens, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group, dim_pad = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    longest = tokens
    if query_list is not None:
        longest = max((b - a for a, b in itertools.pairwise(query_list)), default=0)
    tiles = prefill_tiles(dim_pad, q.dtype, group)
    query_tiles = triton.cdiv(longest, tiles.m // group)
    out = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        prefill_kernel[(len(context_lens) * query_tiles, kv_heads)](
            q, k_cache, v_cache, out, lse, block_table, query_starts, context_lens,
            block_table.stride(0), query_tiles, scale * LOG2_E,
            window or 0, heads, kv_heads, dim, dim_pad, block_size, tiles.m, tiles.n,
            **tiles.options,
        )  # fmt: skip
    return (out, lse) if return_lse else out
