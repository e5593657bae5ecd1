"""Scoring four-bit key sketches, compiled for the CPU: codes are read in place, never unpacked to memory.

Owns: the CPU version of FourBit's logits and mass in memory/sketch.py. Must not know: requests, which blocks
are chosen. Letters in shapes: R rows, Hq query heads, H KV heads, G = Hq / H, D head size, N blocks in the
slabs, M table width, B tokens per block, C = M / 64 chunks.

The work is cut into units of one row, one KV head and 64 of its blocks: first the logits of all their tokens,
then exp, each alone keeping the CPU's units busy. A unit's sums are relative to its own largest logit, so
they do not depend on how units are shared out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels.simd import (
    LANES,
    add,
    exp,
    jit,
    larger,
    largest_lane,
    load,
    prefetch,
    splat,
    store_sums,
)
from nano_oasis.kernels.simd_codes import MOST_HEADS, make_code_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

CHUNK = 64  # blocks of a unit: their logits fit the second-level cache
_ZERO, _ONE, _NEG_INF = np.float32(0), np.float32(1), np.float32(-np.inf)
_tile1, _tile2, _tile3, _tile4 = (make_code_tile(n) for n in range(1, MOST_HEADS + 1))


def supports(q: Tensor, codes: Tensor) -> bool:
    """On the CPU, blocks of whole vectors, channels in whole words."""
    fits = codes.shape[3] % LANES == 0 and q.shape[2] % 8 == 0
    return q.device.type == "cpu" and fits and codes.is_contiguous()


def fourbit_logits(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor,
    heads: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Log of each block's sum of exp(q.k), fp32 [R, Hq, M]; -inf from counts[r] on.

    Blocks more than 80 below the largest of their 64 neighbours are not told apart. q fp32 [R, Hq, D], already scaled, the query heads of the KV heads `heads`, of which each is rounded to 8
    bits; codes uint8 [N, H, D / 2, B] (channel c in the low bits of byte c, c + D / 2 in the high bits), base
    and step fp16 [N, H, B]; table [R, M] int64, of which row r reads the first counts[r] (int64) entries.
    """
    sums, tops = _sums(q, codes, base, step, table, counts, heads)
    with np.errstate(divide="ignore"):  # log 0: blocks that are none
        logits = np.log(sums)
    logits += np.repeat(tops, CHUNK, 2)[:, :, : table.shape[1]]
    return torch.from_numpy(logits)


def fourbit_mass(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor,
    heads: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Softmax of fourbit_logits over a row's blocks, averaged over all query heads: fp32 [R, M]."""
    sums, tops = _sums(q, codes, base, step, table, counts, heads)
    mass = np.zeros((len(sums), table.shape[1]), np.float32)
    _reduce(sums, tops, mass)
    return torch.from_numpy(mass)


def _sums(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor, heads: slice
) -> tuple[np.ndarray, np.ndarray]:
    """[R, Hq, M] sums of exp relative to [R, Hq, C] largest logits; 0 and -inf where there is no block."""
    rows, query_heads, dim = q.shape
    first, stop, _ = heads.indices(codes.shape[1])
    query = np.ascontiguousarray(q.detach().numpy(), np.float32)
    scale = np.maximum(np.abs(query).max(2), 1e-30) / 127  # [R, Hq]
    small = np.rint(query / scale[:, :, None]).astype(np.int8).view(np.int32)  # [R, Hq, D / 4]
    factors = np.stack((query.sum(2), scale), 1)  # [R, 2, Hq]
    slabs = codes.numpy(), *(x.contiguous().view(torch.uint16).numpy() for x in (base, step))
    where, limit = (x.long().contiguous().numpy() for x in (table, counts))
    chunks = -(-table.shape[1] // CHUNK)
    out = np.zeros((rows, query_heads, table.shape[1]), np.float32)
    tops = np.full((rows, query_heads, chunks), -np.inf, np.float32)
    units = rows * chunks * (stop - first)
    shares = max(1, min(4 * torch.get_num_threads(), units // 2))
    scratch = np.empty((shares, MOST_HEADS, CHUNK * codes.shape[3]), np.float32)
    groups = np.array([first, query_heads // (stop - first)])
    run_shares(_score, shares, small, factors, *slabs, where, limit, groups, scratch, out, tops)
    return out, tops


@jit
def _score(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_share, args), place(args), shares)
    finish(box)


@jit
def _share(share, shares, q, factors, codes, base, step, table, counts, groups, scratch, out, tops):  # type: ignore[no-untyped-def]
    """A share of the units of all rows. q int32 [R, Hq, D / 4], factors [R, 2, Hq], scratch [shares, 4, n]."""
    first, group = groups
    heads = out.shape[1] // group
    units = 0
    for r in range(len(counts)):
        units += (counts[r] + CHUNK - 1) // CHUNK * heads
    unit, last = units * share // shares, units * (share + 1) // shares
    at = 0
    for r in range(len(counts)):
        own = (counts[r] + CHUNK - 1) // CHUNK * heads
        while at <= unit < min(at + own, last):
            chunk, h = (unit - at) // heads, (unit - at) % heads
            blocks = table[r, chunk * CHUNK : min((chunk + 1) * CHUNK, counts[r])]
            for g in range(h * group, (h + 1) * group, MOST_HEADS):
                n = min(MOST_HEADS, (h + 1) * group - g)
                _logits(q[r], factors[r], g, n, codes, base, step, first + h, blocks, scratch[share])
                for i in range(n):
                    _soften(
                        scratch[share, i], len(blocks), codes.shape[3], out[r, g + i], chunk, tops[r, g + i]
                    )
            unit += 1
        at += own


@jit
def _logits(q, factors, g, n, codes, base, step, head, blocks, logits):  # type: ignore[no-untyped-def]
    """Query heads g .. g + n - 1 against the tokens of a few blocks -> logits [n, blocks * B]."""
    size = codes.shape[3]
    for i in range(len(blocks)):
        _fetch(codes[blocks[min(i + 4, len(blocks) - 1)], head])
        c, x, y = codes[blocks[i], head], base[blocks[i], head], step[blocks[i], head]
        for t in range(0, size, LANES):
            if n == 1:
                _tile1(c, x, y, t, q, factors, g, logits, i * size + t)
            elif n == 2:
                _tile2(c, x, y, t, q, factors, g, logits, i * size + t)
            elif n == 3:
                _tile3(c, x, y, t, q, factors, g, logits, i * size + t)
            else:
                _tile4(c, x, y, t, q, factors, g, logits, i * size + t)


@jit
def _soften(logits, count, size, out, chunk, tops):  # type: ignore[no-untyped-def]
    """logits [count * B] -> out[chunk's blocks] the sums of exp, tops[chunk] the largest logit."""
    top = splat(_NEG_INF)
    for t in range(0, count * size, LANES):
        top = larger(load(logits, t), top)
    most = largest_lane(top)
    tops[chunk] = most
    minus = splat(-most)
    first = chunk * CHUNK
    for i in range(0, count, 4):
        a = b = c = d = splat(_ZERO)
        last = count - 1
        i1, i2, i3 = min(i + 1, last), min(i + 2, last), min(i + 3, last)  # or the last one again
        for t in range(0, size, LANES):
            a = add(a, exp(add(load(logits, i * size + t), minus)))
            b = add(b, exp(add(load(logits, i1 * size + t), minus)))
            c = add(c, exp(add(load(logits, i2 * size + t), minus)))
            d = add(d, exp(add(load(logits, i3 * size + t), minus)))
        if i + 3 < count:
            store_sums(out, first + i, a, b, c, d)
        else:
            store_sums(logits, 0, a, b, c, d)  # whose first values are no longer needed
            for j in range(count - i):
                out[first + i + j] = logits[j]


@jit
def _reduce(sums, tops, mass):  # type: ignore[no-untyped-def]
    """sums [R, Hq, M], tops [R, Hq, C] -> mass [R, M]: softmax over blocks, averaged over heads."""
    rows, heads, width = sums.shape
    for r in range(rows):
        for h in range(heads):
            top, total = _NEG_INF, _ZERO
            for c in range(tops.shape[2]):
                top = max(top, tops[r, h, c])
            if top == _NEG_INF:
                continue  # a row without a block
            for c in range(tops.shape[2]):
                part = _ZERO
                for m in range(c * CHUNK, min((c + 1) * CHUNK, width)):
                    part += sums[r, h, m]
                total += part * np.exp(tops[r, h, c] - top)
            for c in range(tops.shape[2]):
                factor = np.exp(tops[r, h, c] - top) / (total * np.float32(heads))
                for m in range(c * CHUNK, min((c + 1) * CHUNK, width)):
                    mass[r, m] += factor * sums[r, h, m]


@jit
def _fetch(codes):  # type: ignore[no-untyped-def]
    """Start reading the codes of a block to come: the hardware cannot know where they are."""
    flat = codes.reshape(-1)
    for i in range(0, len(flat), 64):
        prefetch(flat, i)
