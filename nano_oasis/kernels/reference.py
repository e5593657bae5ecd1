"""Paged attention in plain torch: the oracle for every other kernel, and what runs on CPU.

Owns: the meaning of write_kv, paged_decode and paged_prefill. Must not know: requests, the model,
Triton. Letters in shapes: T query tokens, R rows (one request each), H query heads, Hkv KV heads,
G = H / Hkv query heads per KV head, D head size, N blocks in the cache, B tokens per block, M table width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_CHUNK = 256  # prefill queries attended at once: keeps the mask small
FEW_QUERIES = 8  # up to here a plain product beats torch's flash kernel
GROUP_TOKENS = 2048  # decode: padded tokens gathered at once
PADDING = 128  # decode: padded tokens a row may add to its group


def check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> None:
    """Raises ValueError for shapes that no backend can mean. q is any [T, heads, D]."""
    if k_cache.ndim != 4 or v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            "the caches must both be [blocks, block_size, KV heads, head size] in one dtype, got "
            f"{list(k_cache.shape)} {k_cache.dtype} and {list(v_cache.shape)} {v_cache.dtype}"
        )
    if q.ndim != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"{list(q.shape)} does not fit caches of {k_cache.shape[2]} KV heads of size {k_cache.shape[3]}: "
            "the head sizes must be equal and the KV heads divide the heads"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None for no window; got {window}")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store k, v [T, Hkv, D] in the caches [N, B, Hkv, D] at slots [T] int64 (block * B + offset)."""
    check_shapes(k, k_cache, v_cache)
    # view, unlike flatten, never copies: a write must reach the cache itself.
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v.to(v_cache.dtype))


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
) -> Any:
    """One query per row against that row's whole context.

    q [R, H, D], caches [N, B, Hkv, D], block_table [R, M] int32, context_lens [R] int32 (tokens, the
    query's own included) -> out [R, H, D] in q's dtype, and with return_lse also lse [R, H] fp32, the
    natural log of the sum of exp(scale * q.k). With window w only the last w tokens are seen. A row of
    length 0 gives zeros and -inf. Sums are fp32 whatever the dtypes. context_list is context_lens on
    the host; plans is a dict that lives for one step, so that the layers share the grouping of rows.
    """
    check_shapes(q, k_cache, v_cache, window)
    rows, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    lens = context_lens.tolist() if context_list is None else context_list
    key = ("decode", window)
    groups = plans.get(key) if plans is not None else None
    if groups is None:
        groups = _group_rows(block_table, lens, window, block_size)
        if plans is not None:
            plans[key] = groups
    out = torch.zeros_like(q)
    lse = torch.full((rows, heads), -torch.inf) if return_lse else None
    for g in groups:
        k, v = g.read(k_cache), g.read(v_cache)  # [g, n, Hkv, D] fp32
        # The G query heads of a KV head are G rows of one product, so K and V are read once for all.
        query = q[g.rows].float().view(len(k), kv_heads, -1, dim)
        o, s = attend(query, k.transpose(1, 2), v.transpose(1, 2), scale, g.bias, return_lse)
        out[g.rows] = o.reshape(len(k), heads, dim).to(q.dtype)
        if lse is not None and s is not None:
            lse[g.rows] = s.reshape(len(k), heads)
    return out if lse is None else (out, lse)


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
    """Causal attention of each row's newest tokens to its whole context, earlier chunks included.

    q [T, H, D] with row r's queries at [query_starts[r], query_starts[r + 1]); query j of a row with Q
    queries is at position context_lens[r] - Q + j. Otherwise as paged_decode -> out [T, H, D] (, lse [T, H]).
    """
    check_shapes(q, k_cache, v_cache, window)
    tokens, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    lens = context_lens.tolist() if context_list is None else context_list
    starts = query_starts.tolist() if query_list is None else query_list
    out = torch.zeros_like(q)
    lse = torch.full((tokens, heads), -torch.inf) if return_lse else None
    for r, context in enumerate(lens):
        count = starts[r + 1] - starts[r]
        if count > context:
            raise ValueError(f"row {r} has {count} queries but a context of {context} tokens")
        if count == 0:
            continue
        first = context - count  # position of the row's first query
        base = (max(0, first + 1 - window) if window else 0) // block_size * block_size
        ids = block_table[r, base // block_size : -(-context // block_size)].long()
        k = k_cache.index_select(0, ids).float().view(-1, kv_heads, dim).transpose(0, 1)  # [Hkv, keys, D]
        v = v_cache.index_select(0, ids).float().view(-1, kv_heads, dim).transpose(0, 1)
        for a in range(first, context, QUERY_CHUNK):
            b = min(a + QUERY_CHUNK, context)  # positions [a, b)
            lo = max(base, a + 1 - window) if window else 0
            where = slice(starts[r] + a - first, starts[r] + b - first)
            query = q[where].float().view(b - a, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, b - a, D]
            keys = slice(lo - base, b - base)
            bias = _causal_bias(a, b, lo, window)
            o, s = _attend_chunk(query, k[:, keys], v[:, keys], scale, bias, return_lse)
            out[where] = o.permute(2, 0, 1, 3).reshape(b - a, heads, dim).to(q.dtype)
            if lse is not None and s is not None:
                lse[where] = s.permute(2, 0, 1).reshape(b - a, heads)
    return out if lse is None else (out, lse)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [Hkv, G, m, D], k, v [Hkv, n, D], bias [m, n] -> out [Hkv, G, m, D], lse [Hkv, G, m] or None."""
    kv_heads, group, m, dim = q.shape
    if m > FEW_QUERIES:
        k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
        return attend_many(q, k, v, scale, bias)
    # Few queries are like decode: all of a KV head's rows in one product.
    bias = None if bias is None else bias.repeat(group, 1)
    o, s = attend(q.reshape(1, kv_heads, group * m, dim), k[None], v[None], scale, bias, return_lse)
    return o.view(kv_heads, group, m, dim), None if s is None else s.view(kv_heads, group, m)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * q k^T + bias) v. q [b, h, m, D], k, v [b, h, n, D], bias broadcastable to [b, h, m, n].

    Returns out [b, h, m, D] and, if asked for, lse [b, h, m]. Every query must see at least one key.
    """
    m = q.shape[2]
    if m % 4:  # the BLAS is half as fast again on a multiple of four rows
        q = F.pad(q, (0, 0, 0, -m % 4))
    scores = _matmul(q * scale, k.transpose(2, 3))
    if bias is not None:
        scores[:, :, :m] += bias
    out = _matmul(torch.softmax(scores, -1), v)
    return out[:, :, :m], torch.logsumexp(scores[:, :, :m], -1) if return_lse else None


def attend_many(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As attend, for many queries on the CPU; bias [m, n]. Three times as fast at 256 queries and 6,500 keys:
    torch's flash kernel never holds the scores. This is what scaled_dot_product_attention calls, with lse."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias, scale=scale
    )
    return out, lse


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """[b, h, m, k] @ [b, h, k, n]. torch.matmul would first copy a y that is a view into the cache."""
    dim = 0 if y.shape[0] <= y.shape[1] else 1  # batched over one dimension, a loop over the shorter
    if y.shape[dim] == 1:
        return torch.bmm(x.squeeze(dim), y.squeeze(dim)).unsqueeze(dim)
    return torch.stack([torch.bmm(a, b) for a, b in zip(x.unbind(dim), y.unbind(dim), strict=True)], dim)


def _causal_bias(a: int, b: int, lo: int, window: int | None) -> Tensor | None:
    """[b - a, b - lo]: 0 where the query at position a + i may see the key at lo + j, -inf elsewhere."""
    if b - a == 1:
        return None  # one query, and [lo, b) is exactly what it sees
    query, key = torch.arange(a, b)[:, None], torch.arange(lo, b)[None, :]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.zeros(b - a, b - lo).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class _Group:
    """Decode rows of similar length, padded to one width so that they are computed together."""

    rows: Tensor | slice  # of the batch
    blocks: Tensor | slice  # [g, width] int64 ids; a slice where one row's blocks lie in order
    start: int  # first token seen, counted from the first block; 0 unless alone
    stop: int  # one past the last token
    bias: Tensor | None  # [g, 1, 1, stop - start]: -inf on padding
    padding: Tensor | None  # flat token indices of the padding

    def read(self, cache: Tensor) -> Tensor:
        """[N, B, Hkv, D] -> [g, stop - start, Hkv, D] fp32. Padding becomes 0: 0 * NaN would leak."""
        if isinstance(self.blocks, slice):
            return cache[self.blocks].view(1, -1, *cache.shape[2:])[:, self.start : self.stop].float()
        picked = cache.index_select(0, self.blocks.flatten())  # [g * width, B, Hkv, D]
        if self.padding is not None:
            picked.flatten(0, 1).index_fill_(0, self.padding, 0.0)
        return picked.view(len(self.blocks), -1, *cache.shape[2:])[:, self.start : self.stop].float()


def _group_rows(block_table: Tensor, lens: list[int], window: int | None, block_size: int) -> list[_Group]:
    return [_make_group(block_table, lens, rows, window, block_size) for rows in _similar(lens, window)]


def _similar(lens: list[int], window: int | None) -> Iterator[list[int]]:
    """Rows to compute together: of similar length (a call costs as much as reading a few hundred padded
    tokens), and few enough that what is gathered stays in the cache of the CPU."""
    seen = {r: min(n, window) if window else n for r, n in enumerate(lens) if n > 0}
    group: list[int] = []
    for r in sorted(seen, key=lambda r: -seen[r]):
        if group:
            longest = seen[group[0]]
            if longest - seen[r] > max(PADDING, longest // 8) or longest * (len(group) + 1) > GROUP_TOKENS:
                yield sorted(group)
                group = []
        group.append(r)
    if group:
        yield sorted(group)


def _make_group(
    block_table: Tensor, lens: list[int], rows: list[int], window: int | None, block_size: int
) -> _Group:
    first = [max(0, lens[r] - window) if window else 0 for r in rows]  # first position seen
    base = [f // block_size for f in first]  # and its block
    width = max(-(-lens[r] // block_size) - b for r, b in zip(rows, base, strict=True))
    if len(rows) == 1:
        r, b = rows[0], base[0]
        ids = block_table[r, b : b + width].long()
        low = int(ids[0])
        in_order = bool((ids == torch.arange(low, low + width)).all())
        blocks = slice(low, low + width) if in_order else ids[None]
        return _Group(
            slice(r, r + 1), blocks, first[0] - b * block_size, lens[r] - b * block_size, None, None
        )
    column = (torch.tensor(base)[:, None] + torch.arange(width)).clamp_(max=block_table.shape[1] - 1)
    begin = torch.tensor([f - b * block_size for f, b in zip(first, base, strict=True)])[:, None]
    end = torch.tensor([lens[r] - b * block_size for r, b in zip(rows, base, strict=True)])[:, None]
    token = torch.arange(width * block_size)
    hidden = (token < begin) | (token >= end)  # [g, width * B]
    where = torch.tensor(rows)
    blocks = block_table[where].long().gather(1, column)
    # Table entries past a row's end may be anything: read some block that exists, and hide it.
    blocks = torch.where(torch.arange(width) * block_size < end, blocks, blocks[:, :1])
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
    return _Group(where, blocks, 0, width * block_size, bias, hidden.flatten().nonzero().flatten())
