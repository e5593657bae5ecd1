"""Causal attention of many queries compiled for the CPU: keys and values in place, scores never whole.

Owns: the compiled version of reference.paged_prefill, and of a piece of it for stream.py. Must not know:
requests, the model. Letters in shapes as in reference.py.

The query heads of one KV head and a few neighbouring tokens make a line of LINE queries (simd_queries.py). A
line goes through the keys that any of its queries sees, KEYS_AT_ONCE at a time: scores, exp, values, with
running maximum and sum (online softmax, FlashAttention, arXiv 2205.14135). Threads share bundles of lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import reference
from nano_oasis.kernels.cpu_decode import supports
from nano_oasis.kernels.reference import check_shapes
from nano_oasis.kernels.simd import add, exp, jit, larger, largest_lane, load, mul, splat, store
from nano_oasis.kernels.simd_queries import KEYS, LINE, LINE_ROOM, add_values, score_keys
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

KEYS_AT_ONCE = 64  # their scores, keys and values stay in the first-level cache
MOST_LINES = 4  # that go through the same keys together, while those are in the cache
_LANES = 16
_ZERO, _ONE, _NEG_INF = (np.float32(x) for x in (0, 1, -np.inf))
_NOTHING = np.float32(-1e30)  # the maximum of no scores: finite, so that no difference is NaN


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
    """As reference.paged_prefill, to which it leaves what it is not written for."""
    check_shapes(q, k_cache, v_cache, window)
    if not supports(q, k_cache, v_cache):
        return reference.paged_prefill(
            q, k_cache, v_cache, block_table, query_starts, context_lens, scale, window, return_lse,
            context_list=context_list, query_list=query_list,
        )  # fmt: skip
    starts, lens = query_starts.int(), context_lens.int()
    first = lens - starts.diff()  # position of a row's first query
    if bool((first < 0).any()):
        r = int((first < 0).nonzero()[0])
        count = int(starts[r + 1] - starts[r])
        raise ValueError(f"row {r} has {count} queries but a context of {int(lens[r])} tokens")
    table = block_table.int().contiguous().numpy()
    rows = np.stack([first.numpy(), np.zeros(len(lens), np.int32), lens.numpy()], 1)
    out, lse = _attend(q, k_cache, v_cache, table, starts.numpy(), rows, scale, window)
    return (out, lse) if return_lse else out


def piece(
    q: Tensor, k: Tensor, v: Tensor, q_first: int, k_first: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """As stream.piece_attention, for tensors that supports_piece()."""
    starts = np.array([0, len(q)], np.int32)
    rows = np.array([[q_first, k_first, len(k)]], np.int32)
    return _attend(q, k[None], v[None], np.zeros((1, 1), np.int32), starts, rows, scale, window)


def supports_piece(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and len(q) > 0 and len(k) > 0 and supports(q, k[None], v[None])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, table: np.ndarray, starts: np.ndarray, rows: np.ndarray,
    scale: float, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rows int32 [R, 3]: positions of the first query and of the table's first token, tokens in the table.

    Returns out [T, H, D] and lse [T, H]; a query that sees nothing has zeros and -inf.
    """
    tokens, heads, dim = q.shape
    out, lse = np.empty((tokens, heads, dim), np.float32), np.empty((tokens, heads), np.float32)
    lines = -(-tokens * heads // LINE)
    shares = max(1, min(8 * torch.get_num_threads(), -(-lines // 2)))
    together = max(1, min(MOST_LINES, lines // shares))
    scratch = np.zeros((shares, together, 2 * dim + 3, LINE_ROOM), np.float32)
    scores = np.zeros((shares, KEYS_AT_ONCE + KEYS, LINE_ROOM), np.float32)
    places = np.empty((shares, KEYS_AT_ONCE + KEYS), np.int64)
    run_shares(
        _prefill, shares, q.detach().contiguous().numpy(), k.detach().numpy(), v.detach().numpy(), table,
        starts, rows, window or 0, np.float32(scale), scratch, scores, places, out, lse,
    )  # fmt: skip
    return torch.from_numpy(out), torch.from_numpy(lse)


@jit
def _prefill(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_prefill_share, args), place(args), shares)
    finish(box)


@jit
def _prefill_share(  # type: ignore[no-untyped-def]
    share, shares, q, k, v, table, starts, rows, window, scale, scratch, scores, places, out, lse
):
    """Every shares-th bundle of lines, a row's last one first: the first lines of a text see few keys."""
    kv_heads, size = k.shape[2], scratch.shape[1] * LINE
    group, number = q.shape[1] // kv_heads, 0
    for r in range(len(rows)):
        queries = (starts[r + 1] - starts[r]) * group  # of one KV head
        for first in range((queries - 1) // size * size, -1, -size):
            for h in range(kv_heads):
                if number % shares == share:
                    these = slice(starts[r], starts[r + 1])
                    _bundle(
                        q[these], k, v, table[r], h, first, min(first + size, queries), rows[r], window,
                        scale, scratch[share], scores[share], places[share], out[these], lse[these],
                    )  # fmt: skip
                number += 1


@jit
def _bundle(q, k, v, table, h, first, end, row, window, scale, lines, scores, places, out, lse):  # type: ignore[no-untyped-def]
    """Queries [first, end) of KV head h, counted over tokens and then a token's heads, through their keys.

    A line's part of scratch: its queries [D], results so far [D], their maxima, sums, and positions.
    """
    dim, size, group = q.shape[2], k.shape[1], q.shape[1] // k.shape[2]
    number = (end - first + LINE - 1) // LINE
    for i in range(number):
        _open(q, h, first + i * LINE, end, group, row[0], scale, lines[i])
    # Tokens count from the table's first. Of a line, the first and last query see the least and most.
    begin, stop = 0, min(row[2], row[0] + (end - 1) // group + 1 - row[1])
    if window:
        begin = max(0, row[0] + first // group + 1 - window - row[1])
    for at in range(begin, stop, KEYS_AT_ONCE):
        count = min(stop - at, KEYS_AT_ONCE)
        _find(table, at, count, size, places)
        for i in range(number):
            most, sums, seen = lines[i, 2 * dim], lines[i, 2 * dim + 1], lines[i, 2 * dim + 2]
            oldest, newest = np.int64(seen[0]) - row[1], np.int64(seen[LINE - 1]) - row[1]
            n = min(count, newest + 1 - at)
            if n <= 0 or (window and at + n <= oldest + 1 - window):
                continue  # this line sees none of them
            for t in range(0, n, KEYS):
                score_keys(k, places, t, h, lines[i], scores)
            if at + n > oldest + 1 or (window and at < newest + 1 - window):
                _hide(scores, at + row[1], n, seen, window)
            _soften(scores, n, most, sums, lines[i, dim : 2 * dim])
            add_values(v, places, n, h, scores, lines[i, dim : 2 * dim])
    for i in range(number):
        _close(h, first + i * LINE, min(end, first + (i + 1) * LINE), group, lines[i], out, lse)


@jit
def _open(q, h, first, end, group, position, scale, line):  # type: ignore[no-untyped-def]
    dim = q.shape[2]
    for i in range(LINE_ROOM):
        n = min(first + min(i, LINE - 1), end - 1)  # the last query stands for those that are not there
        line[2 * dim, i], line[2 * dim + 1, i] = _NOTHING, _ZERO
        line[2 * dim + 2, i] = position + n // group
        for d in range(dim):
            line[d, i] = q[n // group, h * group + n % group, d] * scale
            line[dim + d, i] = _ZERO


@jit
def _close(h, first, end, group, line, out, lse):  # type: ignore[no-untyped-def]
    dim = out.shape[2]
    for n in range(first, end):
        i, token, head = n - first, n // group, h * group + n % group
        most, total = line[2 * dim, i], line[2 * dim + 1, i]
        if most == _NOTHING:  # this query saw nothing
            out[token, head] = _ZERO
            lse[token, head] = _NEG_INF
            continue
        share = _ONE / total
        for d in range(dim):
            out[token, head, d] = line[dim + d, i] * share
        lse[token, head] = most + np.log(total)


@jit
def _find(table, at, count, size, places):  # type: ignore[no-untyped-def]
    """Where tokens [at, at + count) are, and the last one again to fill the last block of scores."""
    for i in range(count + KEYS):
        t = at + min(i, count - 1)
        places[i] = np.int64(table[t // size]) * size + t % size


@jit
def _hide(scores, position, count, seen, window):  # type: ignore[no-untyped-def]
    """-inf where a query does not see the token: later than its own, or too early for the window."""
    for t in range(count):
        token = np.float32(position + t)
        oldest = token + np.float32(window) if window else np.float32(np.inf)
        for i in range(LINE_ROOM):
            if token > seen[i] or oldest <= seen[i]:
                scores[t, i] = _NEG_INF


@jit
def _soften(scores, count, most, sums, acc):  # type: ignore[no-untyped-def]
    """Scores -> weights exp(score - maximum); the maximum, sum and values so far follow it."""
    for i in range(0, LINE_ROOM, _LANES):
        before = load(most, i)
        top = before
        for t in range(count):
            top = larger(load(scores[t], i), top)
        store(most, i, top)
        minus = mul(splat(-_ONE), top)
        change = add(before, minus)
        total = load(sums, i)
        if not largest_lane(mul(splat(-_ONE), change)) <= _ZERO:  # also when it is NaN
            shrink = exp(change)
            total = mul(shrink, total)
            for d in range(len(acc)):
                store(acc[d], i, mul(shrink, load(acc[d], i)))
        for t in range(count):
            p = exp(add(load(scores[t], i), minus))
            store(scores[t], i, p)
            total = add(total, p)
        store(sums, i, total)
