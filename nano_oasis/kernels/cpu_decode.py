"""Paged decode attention compiled for the CPU: K and V are read once, in place, and nothing is gathered.

Owns: the compiled version of reference.paged_decode. Must not know: requests, the model, sketches.
Letters in shapes as in reference.py.

The visible blocks of all rows are laid end to end and cut into equal shares, some for each thread, so rows
of any lengths keep all threads busy. Rows of one text (drafts, a shared prompt) go through it side by side.
A share keeps, per head, the running maximum, sum and weighted values (online softmax); a row cut by a share's
edge is merged by log-sum-exp. The blocks are taken eight at a time: scores, exp, values, each alone keeping
the CPU's units busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import reference
from nano_oasis.kernels.reference import check_shapes
from nano_oasis.kernels.simd import (
    LANES,
    add,
    exp,
    jit,
    larger,
    largest_lane,
    load,
    mul,
    splat,
    store,
    sum_lanes,
)
from nano_oasis.kernels.simd_attend import MOST_HEADS, TOKENS, make_score_tile, make_value_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

SHARE_TOKENS = 256  # of which a share has no less
CHUNK = 8  # blocks whose scores are kept
_score1, _score2, _score3, _score4 = (make_score_tile(n) for n in range(1, MOST_HEADS + 1))
_value1, _value2, _value3, _value4 = (make_value_tile(n) for n in range(1, MOST_HEADS + 1))
_ZERO, _ONE, _SIXTEENTH, _NEG_INF = (np.float32(x) for x in (0, 1, 1 / 16, -np.inf))


def supports(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """fp32 throughout, heads of whole vectors, caches without gaps."""
    fp32 = q.dtype == k_cache.dtype == torch.float32
    return fp32 and q.shape[2] % LANES == 0 and k_cache.is_contiguous() and v_cache.is_contiguous()


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
    """As reference.paged_decode, to which it leaves what it is not written for."""
    check_shapes(q, k_cache, v_cache, window)
    if not supports(q, k_cache, v_cache):
        return reference.paged_decode(
            q, k_cache, v_cache, block_table, context_lens, scale, window, return_lse,
            context_list=context_list, plans=plans,
        )  # fmt: skip
    rows, heads, dim = q.shape
    k, v = k_cache.detach().numpy(), v_cache.detach().numpy()
    query = q.detach().contiguous().numpy()
    table, lens = (x.int().contiguous().numpy() for x in (block_table, context_lens))
    tokens = sum(context_list) if context_list is not None else int(lens.sum())
    shares = max(1, min(2 * torch.get_num_threads(), tokens // SHARE_TOKENS))
    out = np.empty((shares, rows, heads, dim), np.float32)
    lse = np.empty((shares, rows, heads), np.float32)
    scratch = np.empty((shares, heads, -(-CHUNK * k.shape[1] // LANES) * LANES + LANES), np.float32)
    sums = np.empty((shares, rows, heads), np.float32)
    run_shares(
        _decode, shares, query, k, v, table, lens, window or 0, np.float32(scale), scratch, sums, out, lse
    )
    result = torch.from_numpy(out[0])
    return (result, torch.from_numpy(lse[0])) if return_lse else result


@jit
def _decode(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_decode_share, args), place(args), shares)
    finish(box)
    if shares > 1:
        _merge(args[9], args[10])


@jit
def _decode_share(share, shares, q, k, v, table, lens, window, scale, scratch, sums_of, outs, lses):  # type: ignore[no-untyped-def]
    """A share's part of every row -> outs[share] and lses[share], zeros and -inf where it has none."""
    outs[share] = _ZERO
    lses[share] = _NEG_INF
    size, rows = k.shape[1], len(lens)
    total, r = 0, 0
    while r < rows:
        end_row = _alike(table, r)
        first, count = _columns(lens, window, size, r, end_row)
        total += count * (end_row - r)
        r = end_row
    begin, end = total * share // shares, total * (share + 1) // shares
    at, r = 0, 0
    while r < rows:
        end_row = _alike(table, r)
        first, count = _columns(lens, window, size, r, end_row)
        n = end_row - r
        low = min(max((begin - at + n - 1) // n, 0), count)
        high = min(max((end - at + n - 1) // n, 0), count)
        at += count * n
        if low < high:
            _rows(
                q, k, v, table, lens, window, scale, r, end_row, first + low, first + high,
                scratch[share], sums_of[share], outs[share], lses[share],
            )  # fmt: skip
        r = end_row


@jit
def _alike(table, r):  # type: ignore[no-untyped-def]
    """One past the last row that begins with the same block as row r: drafts, or a shared prompt."""
    end = r + 1
    while end < len(table) and table[end, 0] == table[r, 0]:
        end += 1
    return end


@jit
def _columns(lens, window, size, r, end_row):  # type: ignore[no-untyped-def]
    """First block that any of the rows sees, and how many blocks there are up to the last."""
    first, last = 1 << 30, 0
    for i in range(r, end_row):
        first = min(first, max(0, lens[i] - window) // size if window else 0)
        last = max(last, (lens[i] + size - 1) // size)
    return first, max(last - first, 0)


@jit
def _rows(q, k, v, table, lens, window, scale, r0, r1, first, last, weights, sums_of, out, lse):  # type: ignore[no-untyped-def]
    """Blocks [first, last) of rows [r0, r1) -> out, lse of these rows.

    The rows take turns at every few blocks, so what they share comes from memory once.
    """
    heads, dim, size = q.shape[1], q.shape[2], k.shape[1]
    sums_of[r0:r1] = _ZERO
    for low in range(first, last, CHUNK):
        for r in range(r0, r1):
            seen_from = max(0, lens[r] - window) if window else 0
            begin = max(low, seen_from // size)
            end = min(min(low + CHUNK, last), (lens[r] + size - 1) // size)
            if begin < end:
                _chunk(
                    q[r], k, v, table[r], seen_from, lens[r], scale, begin, end,
                    weights, sums_of[r], out[r], lse[r],
                )  # fmt: skip
    for r in range(r0, r1):
        sums, most, acc = sums_of[r], lse[r], out[r]
        if most[0] == _NEG_INF and sums[0] == _ZERO:
            continue  # none of its blocks are here
        for h in range(heads):
            share = splat(_ONE / sums[h])
            for d in range(0, dim, LANES):
                store(acc[h], d, mul(share, load(acc[h], d)))
            most[h] += np.log(sums[h])  # the maximum becomes the log-sum-exp


@jit
def _chunk(q, k, v, table, seen_from, seen_to, scale, low, high, weights, sums, acc, most):  # type: ignore[no-untyped-def]
    """One row's blocks [low, high) of positions [seen_from, seen_to), added to acc [H, D], sums, most [H]."""
    size, count, last = k.shape[1], 0, len(table) - 1  # the next chunk's first block is fetched meanwhile too
    for b in range(low, high):
        begin, end = max(seen_from - b * size, 0), min(seen_to - b * size, size)  # tokens of this block
        _score(q, k, table[b], table[min(b + 1, last)], begin, end, weights, count)
        count += end - begin
    for h in range(len(q)):
        _soften(weights[h], count, scale, h, most, sums, acc[h])
    count = 0
    for b in range(low, high):
        begin, end = max(seen_from - b * size, 0), min(seen_to - b * size, size)
        _add_values(weights, count, v, table[b], table[min(b + 1, last)], begin, end, acc)
        count += end - begin


@jit
def _score(q, k, block, ahead, begin, end, scores, at):  # type: ignore[no-untyped-def]
    """scores[h, at + t - begin] = q[h] . k[block, t, h's KV head] for tokens [begin, end)."""
    kv_heads = k.shape[2]
    group = len(q) // kv_heads
    for h in range(kv_heads):
        for g in range(h * group, (h + 1) * group, MOST_HEADS):
            n = (h + 1) * group - g
            for t in range(begin, end, TOKENS):
                to = at + t - begin
                if n == 1:
                    _score1(q, g, k, block, ahead, t, end - 1, h, scores, to)
                elif n == 2:
                    _score2(q, g, k, block, ahead, t, end - 1, h, scores, to)
                elif n == 3:
                    _score3(q, g, k, block, ahead, t, end - 1, h, scores, to)
                else:
                    _score4(q, g, k, block, ahead, t, end - 1, h, scores, to)


@jit
def _soften(w, count, scale, h, most, sums, acc):  # type: ignore[no-untyped-def]
    """Scores w[:count] -> weights exp(scale * w - maximum); the maximum, sum and values so far follow it."""
    end = (count + LANES - 1) // LANES * LANES
    for t in range(count, end):
        w[t] = _NEG_INF
    factor, top = splat(scale), splat(_NEG_INF)
    for t in range(0, end, LANES):
        scaled = mul(factor, load(w, t))
        store(w, t, scaled)
        top = larger(scaled, top)
    new = largest_lane(top)
    if not new <= most[h]:  # also when it is NaN
        shrink = exp(splat(most[h] - new))
        for d in range(0, len(acc), LANES):
            store(acc, d, mul(shrink, load(acc, d)))
        sums[h] = sums[h] * sum_lanes(shrink) * _SIXTEENTH
        most[h] = new
    minus, total = splat(-most[h]), splat(_ZERO)
    for t in range(0, end, LANES):
        p = exp(add(load(w, t), minus))
        store(w, t, p)
        total = add(total, p)
    sums[h] += sum_lanes(total)


@jit
def _add_values(weights, at, v, block, ahead, begin, end, acc):  # type: ignore[no-untyped-def]
    """acc[h] += weights[h, at + t - begin] * v[block, t, h's KV head] for tokens [begin, end)."""
    kv_heads = v.shape[2]
    group = len(acc) // kv_heads
    for h in range(kv_heads):
        for g in range(h * group, (h + 1) * group, MOST_HEADS):
            n = (h + 1) * group - g
            if n == 1:
                _value1(weights, g, at, v, block, ahead, begin, end, h, acc)
            elif n == 2:
                _value2(weights, g, at, v, block, ahead, begin, end, h, acc)
            elif n == 3:
                _value3(weights, g, at, v, block, ahead, begin, end, h, acc)
            else:
                _value4(weights, g, at, v, block, ahead, begin, end, h, acc)


@jit
def _merge(out, lse):  # type: ignore[no-untyped-def]
    """Shares [S, R, H, D] and [S, R, H] -> the whole, in share 0."""
    shares, rows, heads, dim = out.shape
    for r in range(rows):
        for h in range(heads):
            for s in range(1, shares):
                if lse[s, r, h] == _NEG_INF:
                    continue  # it had none of this row
                a, b = lse[0, r, h], lse[s, r, h]
                top = max(a, b)
                x, y = np.exp(a - top), np.exp(b - top)
                for d in range(dim):
                    out[0, r, h, d] = (x * out[0, r, h, d] + y * out[s, r, h, d]) / (x + y)
                lse[0, r, h] = top + np.log(x + y)
