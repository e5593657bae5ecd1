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
    jit,
    larger,
    largest_lane,
    load,
    rough_exp,
    splat,
    store_half_sums,
    store_sums,
)
from nano_oasis.kernels.simd_codes import MOST_HEADS, make_code_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

CHUNK = 64  # blocks of a unit: their logits fit the second-level cache
AHEAD = 6  # blocks: how far ahead codes are fetched
_ZERO, _NEG_INF = np.float32(0), np.float32(-np.inf)
_TINY, _LARGEST = np.float32(1e-30), np.float32(127)
PAIRED = 8  # tokens of blocks that are taken two at a time
_tile1, _tile2, _tile3, _tile4 = (make_code_tile(n) for n in range(1, MOST_HEADS + 1))
_pair1, _pair2, _pair3, _pair4 = (make_code_tile(n, pair=True) for n in range(1, MOST_HEADS + 1))


def supports(q: Tensor, codes: Tensor) -> bool:
    """On the CPU, blocks of whole vectors or half of one, channels in whole words."""
    fits = (codes.shape[3] % LANES == 0 or codes.shape[3] == PAIRED) and q.shape[2] % 8 == 0
    return q.device.type == "cpu" and fits and codes.is_contiguous()


def fourbit_logits(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor,
    heads: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Log of each block's sum of exp(q.k), fp32 [R, Hq, M]; -inf from counts[r] on.

    q fp32 [R, Hq, D], already scaled, the query heads of the KV heads `heads`, each rounded to 8 bits; codes
    uint8 [N, H, D / 2, B] (channel c in the low bits of byte c, c + D / 2 in the high bits), base and step
    fp16 [N, H, B]; table [R, M] int64, of which row r reads the first counts[r] (int64) entries. Blocks more
    than 80 below the largest of their 64 neighbours are not told apart.
    """
    sums, tops, _ = _sums(q, codes, base, step, table, counts, heads, 1.0, 1)
    with np.errstate(divide="ignore"):  # log 0: blocks that are none
        logits = np.log(sums)
    logits += np.repeat(tops[..., 0], CHUNK, 2)[:, :, : table.shape[1]]
    return torch.from_numpy(logits)


def fourbit_mass(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor, scale: float,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Softmax of fourbit_logits over a row's blocks, averaged over the query heads of each of `groups` groups
    of KV heads: fp32 [groups, R, M].

    q is scaled by `scale` here.
    """
    return torch.from_numpy(_sums(q, codes, base, step, table, counts, slice(None), scale, groups)[2])


def _sums(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor, heads: slice,
    scale: float, choices: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """sums [R, Hq, M] of exp, relative to their chunk's largest logit; tops [R, Hq, C, 2], that logit and the
    chunk's sum; mass [choices, R, M]. Where there is no block: 0, -inf, 0."""
    rows, query_heads, dim = q.shape
    first, stop, _ = heads.indices(codes.shape[1])
    query = q.detach().float().contiguous().numpy()
    slabs = codes.numpy(), *(x.contiguous().view(torch.uint16).numpy() for x in (base, step))
    where, limit = (x.long().contiguous().numpy() for x in (table, counts))
    chunks = -(-table.shape[1] // CHUNK)
    units = rows * chunks * (stop - first)
    shares = max(1, min(4 * torch.get_num_threads(), units // 2))
    small = np.empty((rows, query_heads, dim), np.int8)
    factors = np.empty((rows, 2, query_heads), np.float32)
    sums = np.empty((rows, query_heads, table.shape[1]), np.float32)
    tops = np.empty((rows, query_heads, chunks, 2), np.float32)
    mass = np.empty((choices, rows, table.shape[1]), np.float32)
    scratch = np.empty((shares, MOST_HEADS, CHUNK * codes.shape[3]), np.float32)
    groups = np.array([first, query_heads // (stop - first)])
    _quantise(query, np.float32(scale), small, factors)
    words = small.view(np.int32)  # [R, Hq, D / 4]
    run_shares(_score, shares, words, factors, *slabs, where, limit, groups, scratch, sums, tops, mass)
    return sums, tops, mass


@jit
def _quantise(query, scale, small, factors):  # type: ignore[no-untyped-def]
    """query [R, Hq, D] * scale -> int8, and in factors [R, 2, Hq] its sum and its step."""
    rows, heads, dim = query.shape
    for r in range(rows):
        for h in range(heads):
            most, total = _ZERO, _ZERO
            for d in range(dim):
                x = query[r, h, d] * scale
                most = max(most, abs(x))
                total += x
            step = max(most, _TINY) / _LARGEST
            factors[r, 0, h], factors[r, 1, h] = total, step
            for d in range(dim):
                small[r, h, d] = np.rint(query[r, h, d] * scale / step)


@jit
def _score(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_share, args), place(args), shares)
    finish(box)
    _reduce(args[6], args[9], args[10], args[11])


@jit
def _share(share, shares, q, factors, codes, base, step, table, counts, groups, scratch, out, tops, mass):  # type: ignore[no-untyped-def]
    """A share of all rows' units. q int32 [R, Hq, D / 4], factors [R, 2, Hq], scratch [shares, 4, n]."""
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
    if size == PAIRED:
        return _logits_of_pairs(q, factors, g, n, codes, base, step, head, blocks, logits)
    for i in range(len(blocks)):
        block, ahead = blocks[i], blocks[min(i + AHEAD, len(blocks) - 1)]
        for t in range(0, size, LANES):
            at = i * size + t
            if n == 1:
                _tile1(codes, base, step, block, block, ahead, head, t, q, factors, g, logits, at)
            elif n == 2:
                _tile2(codes, base, step, block, block, ahead, head, t, q, factors, g, logits, at)
            elif n == 3:
                _tile3(codes, base, step, block, block, ahead, head, t, q, factors, g, logits, at)
            else:
                _tile4(codes, base, step, block, block, ahead, head, t, q, factors, g, logits, at)


@jit
def _logits_of_pairs(q, factors, g, n, codes, base, step, head, blocks, logits):  # type: ignore[no-untyped-def]
    """As _logits. An odd last block is its own partner, and its logits stand there twice."""
    last = len(blocks) - 1
    for i in range(0, len(blocks), 2):
        block, other = blocks[i], blocks[min(i + 1, last)]
        ahead = blocks[min(i + 2 * AHEAD, last)]  # of two blocks one is fetched early
        at = i * PAIRED
        if n == 1:
            _pair1(codes, base, step, block, other, ahead, head, 0, q, factors, g, logits, at)
        elif n == 2:
            _pair2(codes, base, step, block, other, ahead, head, 0, q, factors, g, logits, at)
        elif n == 3:
            _pair3(codes, base, step, block, other, ahead, head, 0, q, factors, g, logits, at)
        else:
            _pair4(codes, base, step, block, other, ahead, head, 0, q, factors, g, logits, at)


@jit
def _soften(logits, count, size, out, chunk, tops):  # type: ignore[no-untyped-def]
    """logits [count * B] -> out[chunk's blocks] the sums of exp, tops[chunk] the largest logit, their sum."""
    top = splat(_NEG_INF)
    for t in range(0, count * size, LANES):
        top = larger(load(logits, t), top)
    most = largest_lane(top)
    minus = splat(-most)
    first, total = chunk * CHUNK, _ZERO
    if size == PAIRED:
        last = (count - 1) // 2 * LANES
        for t in range(0, count * size, 4 * LANES):
            t1, t2, t3 = min(t + LANES, last), min(t + 2 * LANES, last), min(t + 3 * LANES, last)
            a, b = rough_exp(add(load(logits, t), minus)), rough_exp(add(load(logits, t1), minus))
            c, d = rough_exp(add(load(logits, t2), minus)), rough_exp(add(load(logits, t3), minus))
            store_half_sums(logits, 0, a, b, c, d)  # whose first values are no longer needed
            for j in range(min(8, count - t // size)):
                out[first + t // size + j] = logits[j]
                total += logits[j]
        tops[chunk, 0], tops[chunk, 1] = most, total
        return
    for i in range(0, count, 4):
        a = b = c = d = splat(_ZERO)
        last = count - 1
        i1, i2, i3 = min(i + 1, last), min(i + 2, last), min(i + 3, last)  # or the last one again
        for t in range(0, size, LANES):
            a = add(a, rough_exp(add(load(logits, i * size + t), minus)))
            b = add(b, rough_exp(add(load(logits, i1 * size + t), minus)))
            c = add(c, rough_exp(add(load(logits, i2 * size + t), minus)))
            d = add(d, rough_exp(add(load(logits, i3 * size + t), minus)))
        store_sums(logits, 0, a, b, c, d)  # whose first values are no longer needed
        for j in range(min(4, count - i)):
            out[first + i + j] = logits[j]
            total += logits[j]
    tops[chunk, 0], tops[chunk, 1] = most, total


@jit
def _reduce(counts, sums, tops, mass):  # type: ignore[no-untyped-def]
    """sums [R, Hq, M], tops [R, Hq, C, 2] -> mass [choices, R, M]: softmax over blocks, averaged over heads.

    Where there is no block all become 0, and tops[..., 0] -inf.
    """
    rows, heads = sums.shape[:2]
    group = heads // len(mass)
    mass[:] = _ZERO
    for r in range(rows):
        chunks = (counts[r] + CHUNK - 1) // CHUNK
        tops[r, :, chunks:, 0] = _NEG_INF
        for h in range(heads):
            sums[r, h, counts[r] :] = _ZERO
            top, total = _NEG_INF, _ZERO
            for c in range(chunks):
                top = max(top, tops[r, h, c, 0])
            for c in range(chunks):
                total += tops[r, h, c, 1] * np.exp(tops[r, h, c, 0] - top)
            for c in range(chunks):
                factor = np.exp(tops[r, h, c, 0] - top) / (total * np.float32(group))
                _accumulate(factor, sums, mass, h // group, r, h, c * CHUNK, min((c + 1) * CHUNK, counts[r]))


@jit
def _accumulate(factor, sums, mass, choice, r, h, low, high):  # type: ignore[no-untyped-def]
    for m in range(low, high):
        mass[choice, r, m] += factor * sums[r, h, m]
