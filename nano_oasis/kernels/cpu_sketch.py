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
    largest_lane,
    load,
    load_bytes,
    load_half,
    load_low,
    mul,
    prefetch,
    splat,
    store,
    sum_lanes,
)  # fmt: skip
from nano_oasis.kernels.workers import run_shares

SHARE_BLOCKS = 64  # a thread is woken for no less
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
    sums = q.detach().float().sum(-1).numpy()
    slabs = [codes.numpy(), *(x.contiguous().view(torch.uint16).numpy() for x in (base, step))]
    where, limit = table.contiguous().numpy(), counts.contiguous().numpy()
    out = np.full((rows, query_heads, table.shape[1]), -np.inf, np.float32)
    shares = max(1, min(torch.get_num_threads(), int(limit.sum()) // SHARE_BLOCKS))

    def work(share: int) -> None:
        _score_share(parts, sums, *slabs, where, limit, first, group, share, shares, out)

    run_shares(shares, work)
    return torch.from_numpy(out)


@jit
def _score_share(q, q_sums, codes, base, step, table, counts, first_head, group, share, shares, out):  # type: ignore[no-untyped-def]
    """This share of all rows' blocks laid end to end. q [R, Hq, 2, D / 2], q_sums [R, Hq]."""
    total = counts.sum()
    begin, end = total * share // shares, total * (share + 1) // shares
    logits = np.empty((3, codes.shape[3]), np.float32)
    at = 0
    for r in range(len(counts)):
        for m in range(max(begin - at, 0), min(end - at, counts[r])):
            block, ahead = table[r, m], table[r, min(m + 1, counts[r] - 1)]
            for h in range(out.shape[1] // group):
                head = first_head + h
                _fetch(codes[ahead, head])
                # Three query heads at once share the work of taking the codes apart.
                for g in range(h * group, h * group + group, 3):
                    last = h * group + group - 1
                    g1, g2 = min(g + 1, last), min(g + 2, last)  # or the last one again
                    _dots(q[r, g], q[r, g1], q[r, g2], codes[block, head], logits)
                    for i, each in ((0, g), (1, g1), (2, g2)):
                        s = _log_sum_exp(logits[i], q_sums[r, each], base[block, head], step[block, head])
                        out[r, each, m] = s
        at += counts[r]


@jit
def _dots(q0, q1, q2, codes, out):  # type: ignore[no-untyped-def]
    """out[i, t] = q_i . code of token t. q_i [2, D / 2], codes [D / 2, B], out [3, B]."""
    half, size = codes.shape
    for t in range(0, size, LANES):
        x = y = z = splat(_ZERO)
        for c in range(half):
            low, both = load_low(codes[c], t), load_bytes(codes[c], t)
            x = fma(splat(q0[1, c]), both, fma(splat(q0[0, c]), low, x))
            y = fma(splat(q1[1, c]), both, fma(splat(q1[0, c]), low, y))
            z = fma(splat(q2[1, c]), both, fma(splat(q2[0, c]), low, z))
        store(out[0], t, x)
        store(out[1], t, y)
        store(out[2], t, z)


@jit
def _log_sum_exp(dots, q_sum, base, step):  # type: ignore[no-untyped-def]
    """log sum exp over the tokens of base * q_sum + step * dots, all [B]. Overwrites dots."""
    factor, top = splat(q_sum), splat(_NEG_INF)
    for t in range(0, len(dots), LANES):
        x = fma(load_half(step, t), load(dots, t), mul(load_half(base, t), factor))
        store(dots, t, x)
        top = larger(x, top)
    most = largest_lane(top)
    minus, total = splat(-most), splat(_ZERO)
    for t in range(0, len(dots), LANES):
        total = add(exp(add(load(dots, t), minus)), total)
    return most + np.log(sum_lanes(total))


@jit
def _fetch(codes):  # type: ignore[no-untyped-def]
    """Start reading the next block's codes: the hardware cannot know where they are."""
    flat = codes.reshape(-1)
    for i in range(0, len(flat), 64):
        prefetch(flat, i)
