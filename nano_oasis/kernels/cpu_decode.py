"""Paged decode attention compiled for the CPU: K and V are read once, in place, and nothing is gathered.

Owns: the compiled version of reference.paged_decode. Must not know: requests, the model, sketches.
Letters in shapes as in reference.py.

The visible blocks of all rows are laid end to end and cut into equal shares, one for each thread, so rows
of any lengths keep all threads busy. A share visits its blocks one by one and keeps, per head, the running
maximum, sum and weighted values (online softmax); a row cut by a share's edge is merged by log-sum-exp.
Inside a block four tokens at a time go through all KV heads: memory is read in order, and the query heads
of a KV head take K and V from the first-level cache.
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
    fma,
    jit,
    larger,
    largest_lane,
    load,
    mul,
    prefetch,
    splat,
    store,
    store_sums,
    sum_lanes,
)
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

SHARE_TOKENS = 256  # of which a share has no less
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
    query = (q.detach() * scale).contiguous().numpy()
    table, lens = (x.int().contiguous().numpy() for x in (block_table, context_lens))
    tokens = sum(context_list) if context_list is not None else int(lens.sum())
    shares = max(1, min(2 * torch.get_num_threads(), tokens // SHARE_TOKENS))
    out = np.zeros((shares, rows, heads, dim), np.float32)
    lse = np.full((shares, rows, heads), -np.inf, np.float32)
    scratch = np.empty((shares, heads, -(-k.shape[1] // LANES) * LANES + 1), np.float32)
    run_shares(_decode, shares, query, k, v, table, lens, window or 0, scratch, out, lse)
    result = torch.from_numpy(out[0])
    return (result, torch.from_numpy(lse[0])) if return_lse else result


@jit
def _decode(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_decode_share, args), place(args), shares)
    finish(box)
    if shares > 1:
        _merge(args[7], args[8])


@jit
def _decode_share(share, shares, q, k, v, table, lens, window, scratch, outs, lses):  # type: ignore[no-untyped-def]
    """A share's part of every row it touches -> outs[share] and lses[share], zeros and -inf before."""
    out, lse, weights, sums = outs[share], lses[share], scratch[share, :, :-1], scratch[share, :, -1]
    size = k.shape[1]
    total = 0
    for r in range(len(lens)):
        first = max(0, lens[r] - window) // size if window else 0
        total += (lens[r] + size - 1) // size - first
    begin, end = total * share // shares, total * (share + 1) // shares
    at = 0
    for r in range(len(lens)):
        seen_from = max(0, lens[r] - window) if window else 0
        first = seen_from // size
        count = (lens[r] + size - 1) // size - first
        low, high = max(begin - at, 0), min(end - at, count)
        at += count
        if low < high:
            low, high = first + low, first + high
            _row(q[r], k, v, table[r], seen_from, lens[r], low, high, weights, sums, out[r], lse[r])


@jit
def _row(q, k, v, table, seen_from, seen_to, first, last, weights, sums, acc, most):  # type: ignore[no-untyped-def]
    """One row's blocks [first, last) of positions [seen_from, seen_to) -> acc [H, D], most [H]."""
    heads, dim = q.shape
    size = k.shape[1]
    sums[:] = _ZERO
    for b in range(first, last):
        begin, end = max(seen_from - b * size, 0), min(seen_to - b * size, size)  # tokens of this block
        ahead = table[min(b + 1, last - 1)]
        _score(q, k[table[b]], k[ahead], begin, end, weights)
        for h in range(heads):
            _soften(weights[h], end - begin, h, most, sums, acc[h])
        _add_values(weights, v[table[b]], v[ahead], begin, end, acc)
    for h in range(heads):
        share = splat(_ONE / sums[h])
        for d in range(0, dim, LANES):
            store(acc[h], d, mul(share, load(acc[h], d)))
        most[h] += np.log(sums[h])  # the maximum becomes the log-sum-exp


@jit
def _score(query, keys, ahead, begin, end, scores):  # type: ignore[no-untyped-def]
    """scores[h, t - begin] = query[h] . keys[t, h's KV head], keys [B, Hkv, D], tokens [begin, end)."""
    kv_heads, dim = keys.shape[1:]
    group = len(scores) // kv_heads
    for t in range(begin, end, 4):
        t1, t2, t3 = min(t + 1, end - 1), min(t + 2, end - 1), min(t + 3, end - 1)  # or the last one again
        for h in range(kv_heads):
            _fetch(ahead, t, h)
            k0, k1, k2, k3 = keys[t, h], keys[t1, h], keys[t2, h], keys[t3, h]
            for g in range(h * group, h * group + group):
                s0 = s1 = s2 = s3 = splat(_ZERO)
                for d in range(0, dim, LANES):
                    x = load(query[g], d)
                    s0 = fma(x, load(k0, d), s0)
                    s1 = fma(x, load(k1, d), s1)
                    s2 = fma(x, load(k2, d), s2)
                    s3 = fma(x, load(k3, d), s3)
                store_sums(scores[g], t - begin, s0, s1, s2, s3)


@jit
def _soften(w, count, h, most, sums, acc):  # type: ignore[no-untyped-def]
    """Scores w[:count] -> weights exp(w - maximum); the maximum, sum and values so far follow it."""
    for t in range(count, len(w)):
        w[t] = _NEG_INF
    top = load(w, 0)
    for t in range(LANES, len(w), LANES):
        top = larger(load(w, t), top)
    new = largest_lane(top)
    if not new <= most[h]:  # also when it is NaN
        shrink = exp(splat(most[h] - new))
        for d in range(0, len(acc), LANES):
            store(acc, d, mul(shrink, load(acc, d)))
        sums[h] = sums[h] * sum_lanes(shrink) * _SIXTEENTH
        most[h] = new
    minus, total = splat(-most[h]), splat(_ZERO)
    for t in range(0, len(w), LANES):
        p = exp(add(load(w, t), minus))
        store(w, t, p)
        total = add(total, p)
    sums[h] += sum_lanes(total)


@jit
def _add_values(weights, values, ahead, begin, end, acc):  # type: ignore[no-untyped-def]
    """acc[h] += weights[h, t - begin] * values[t, h's KV head], values [B, Hkv, D], tokens [begin, end)."""
    kv_heads, dim = values.shape[1:]
    group = len(weights) // kv_heads
    whole = begin + (end - begin) // 4 * 4
    for t in range(begin, whole, 4):
        for h in range(kv_heads):
            _fetch(ahead, t, h)
            v0, v1, v2, v3 = values[t, h], values[t + 1, h], values[t + 2, h], values[t + 3, h]
            for g in range(h * group, h * group + group):
                w, a = weights[g], acc[g]
                i = t - begin
                w0, w1, w2, w3 = splat(w[i]), splat(w[i + 1]), splat(w[i + 2]), splat(w[i + 3])
                for d in range(0, dim, LANES):
                    x = fma(w1, load(v1, d), fma(w0, load(v0, d), load(a, d)))
                    store(a, d, fma(w3, load(v3, d), fma(w2, load(v2, d), x)))
    for t in range(whole, end):
        for h in range(kv_heads):
            for g in range(h * group, h * group + group):
                w0 = splat(weights[g, t - begin])
                for d in range(0, dim, LANES):
                    store(acc[g], d, fma(w0, load(values[t, h], d), load(acc[g], d)))


@jit
def _fetch(block, t, h):  # type: ignore[no-untyped-def]
    """Start reading one head of four tokens of the next block: the hardware cannot know where it is."""
    for i in range(t, min(t + 4, len(block))):
        row = block[i, h]
        for d in range(0, len(row), LANES):
            prefetch(row, d)


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
