"""Scoring four-bit key sketches, compiled for the CPU: codes are read in place, never unpacked to memory.

Owns: the CPU version of FourBit.logits in memory/sketch.py. Must not know: requests, which blocks are
chosen. Letters in shapes: R rows, Hq query heads, H KV heads, G = Hq / H, D head size, N blocks in the
slabs, M table width, B tokens per block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels.simd import (
    LANES,
    add,
    exp,
    fma,
    jit,
    larger,
    load,
    load_bytes,
    load_half,
    load_low,
    mul,
    prefetch,
    splat,
    store,
    store_largest,
    store_sums,
)  # fmt: skip
from nano_oasis.kernels.workers import run_shares

SHARE_BLOCKS = 64  # a thread is woken for no less
CHUNK = 8  # blocks whose products are kept before exp is taken of them
_ZERO, _NEG_INF = np.float32(0), np.float32(-np.inf)


def supports(q: Tensor, codes: Tensor) -> bool:
    """On the CPU, and blocks of whole vectors."""
    return q.device.type == "cpu" and codes.shape[3] % LANES == 0 and codes.is_contiguous()


def fourbit_logits(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor,
    heads: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Log of each block's sum of exp(q.k), fp32 [R, Hq, M]; -inf from counts[r] on.

    q fp32 [R, Hq, D], already scaled, the query heads of the KV heads `heads`; codes uint8 [N, H, D / 2, B]
    (channel c in the low bits of byte c, c + D / 2 in the high bits), base and step fp16 [N, H, B];
    table [R, M] int64, of which row r reads the first counts[r] (int64) entries.
    """
    rows, query_heads, dim = q.shape
    first, stop, _ = heads.indices(codes.shape[1])
    group = query_heads // (stop - first)
    low, high = q.detach().float().view(rows, query_heads, 2, dim // 2).unbind(2)
    # q_low.low + q_high.high with high = (byte - low) / 16: one mask for both halves of a byte
    parts = torch.stack((low - high / 16, high / 16), 2).numpy()  # [R, Hq, 2, D / 2]
    q_sums = q.detach().float().sum(-1).numpy()
    slabs = [codes.numpy(), *(x.contiguous().view(torch.uint16).numpy() for x in (base, step))]
    where, limit = (x.long().contiguous().numpy() for x in (table, counts))
    out = np.full((rows, query_heads, table.shape[1]), -np.inf, np.float32)
    sums = np.ones_like(out)
    shares = max(1, min(torch.get_num_threads(), int(limit.sum()) // SHARE_BLOCKS))

    def work(share: int) -> None:
        scratch = np.empty((CHUNK, 3, codes.shape[3]), np.float32), np.empty((CHUNK, 2, 4), np.float32)
        _score_share(parts, q_sums, *slabs, where, limit, first, group, share, shares, *scratch, out, sums)

    run_shares(shares, work)
    out += np.log(sums)  # all at once, which numpy does with vectors
    return torch.from_numpy(out)


@jit
def _score_share(  # type: ignore[no-untyped-def]
    q, q_sums, codes, base, step, table, counts, first_head, group, share, shares, logits, four, out, sums
):
    """This share of all rows' blocks laid end to end. q [R, Hq, 2, D / 2], q_sums [R, Hq].

    Each block's largest logit goes to out [R, Hq, M], the sum of exp(logit - largest) to sums.
    logits [CHUNK, 3, B] and four [CHUNK, 2, 4] are scratch.
    """
    all_blocks = 0
    for r in range(len(counts)):
        all_blocks += counts[r]
    begin, end = all_blocks * share // shares, all_blocks * (share + 1) // shares
    at = 0
    for r in range(len(counts)):
        low, high = max(begin - at, 0), min(end - at, counts[r])
        for m in range(low, high, CHUNK):
            for h in range(out.shape[1] // group):
                # Three query heads at once share the work of taking the codes apart.
                for g in range(h * group, h * group + group, 3):
                    last = h * group + group - 1
                    heads = g, min(g + 1, last), min(g + 2, last)  # or the last one again
                    blocks = table[r, m : min(m + CHUNK, high)]
                    _score_chunk(
                        q[r], q_sums[r], heads, codes, base, step, first_head + h, blocks,
                        logits, four, out[r], sums[r], m,
                    )  # fmt: skip
        at += counts[r]


@jit
def _score_chunk(  # type: ignore[no-untyped-def]
    q, q_sums, heads, codes, base, step, kv_head, blocks, logits, four, out, sums, m
):
    """Three query heads against a few blocks, which go to out and sums from m on.

    All products first, then exp: each alone keeps the CPU's units busy, where one after the other in
    every block would wait for results.
    """
    g0, g1, g2 = heads
    for i in range(len(blocks)):
        ahead = blocks[min(i + 2, len(blocks) - 1)]
        _fetch(codes[ahead, kv_head])
        _dots(q[g0], q[g1], q[g2], codes[blocks[i], kv_head], logits[i])
    s = q_sums[g0], q_sums[g1], q_sums[g2]
    for i in range(len(blocks)):
        _exp_sums(logits[i], s, base[blocks[i], kv_head], step[blocks[i], kv_head], four[i])
        for k in range(3):
            out[heads[k], m + i], sums[heads[k], m + i] = four[i, 0, k], four[i, 1, k]


@jit
def _dots(q0, q1, q2, codes, out):  # type: ignore[no-untyped-def]
    """out[i, t] = q_i . code of token t. q_i [2, D / 2], codes [D / 2, B], out [3, B]."""
    half, size = codes.shape
    for t in range(0, size, LANES):
        x0 = x1 = y0 = y1 = z0 = z1 = splat(_ZERO)  # two sums a head: a sum must wait for the one before
        for c in range(half):
            low, both = load_low(codes[c], t), load_bytes(codes[c], t)
            x0, x1 = fma(splat(q0[0, c]), low, x0), fma(splat(q0[1, c]), both, x1)
            y0, y1 = fma(splat(q1[0, c]), low, y0), fma(splat(q1[1, c]), both, y1)
            z0, z1 = fma(splat(q2[0, c]), low, z0), fma(splat(q2[1, c]), both, z1)
        store(out[0], t, add(x0, x1))
        store(out[1], t, add(y0, y1))
        store(out[2], t, add(z0, z1))


@jit
def _exp_sums(logits, q_sums, base, step, results):  # type: ignore[no-untyped-def]
    """q.code of three heads [3, B] -> logits base * q_sum + step * q.code, their maxima and sums of exp
    -> results [2, 4]."""
    f0, f1, f2 = splat(q_sums[0]), splat(q_sums[1]), splat(q_sums[2])
    a, b, c = logits[0], logits[1], logits[2]
    x = y = z = splat(_NEG_INF)
    for t in range(0, len(a), LANES):
        low, gap = load_half(base, t), load_half(step, t)
        store(a, t, fma(gap, load(a, t), mul(low, f0)))
        store(b, t, fma(gap, load(b, t), mul(low, f1)))
        store(c, t, fma(gap, load(c, t), mul(low, f2)))
        x, y, z = larger(load(a, t), x), larger(load(b, t), y), larger(load(c, t), z)
    store_largest(results[0], 0, x, y, z, z)
    f0, f1, f2 = splat(-results[0, 0]), splat(-results[0, 1]), splat(-results[0, 2])
    x = y = z = splat(_ZERO)
    for t in range(0, len(a), LANES):
        x = add(exp(add(load(a, t), f0)), x)
        y = add(exp(add(load(b, t), f1)), y)
        z = add(exp(add(load(c, t), f2)), z)
    store_sums(results[1], 0, x, y, z, z)


@jit
def _fetch(codes):  # type: ignore[no-untyped-def]
    """Start reading the next block's codes: the hardware cannot know where they are."""
    flat = codes.reshape(-1)
    for i in range(0, len(flat), 64):
        prefetch(flat, i)
