"""Adversarial shapes for paged attention, and the naive float64 answer that every kernel must give."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_oasis.kernels import AttentionBatch, make_batch

SCALE = 0.3
# Largest difference to float64, given inputs rounded to the dtype: the softmax weights are rounded to the
# dtype too, and so is the result.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Case:
    name: str
    rows: tuple[tuple[int, int], ...]  # (tokens already cached, new tokens)
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16
    window: int | None = None
    splits: int | None = None


def ones(*contexts: int) -> tuple[tuple[int, int], ...]:
    """Decode rows of these context lengths."""
    return tuple((n - 1, 1) for n in contexts)


DECODE = [
    Case("one token", ones(1)),
    Case("one block, exactly full", ones(16)),
    Case("block edges", ones(15, 16, 17, 31, 32, 33)),
    Case("ragged tails, long and short", ones(200, 3, 77, 1)),
    Case("head size 80", ones(40, 9), dim=80),
    Case("head size 96, three heads per KV head", ones(50, 17), heads=9, kv_heads=3, dim=96),
    Case("head size 8", ones(40, 5), dim=8),
    Case("head size 256", ones(40), dim=256, heads=4, kv_heads=1),
    Case("one KV head for all", ones(33, 8), heads=8, kv_heads=1),
    Case("twenty heads on one KV head", ones(33, 8), heads=20, kv_heads=1),
    Case("every head its own", ones(33, 8), heads=4, kv_heads=4),
    Case("window of one", ones(1, 16, 17, 60), window=1),
    Case("window inside a block", ones(3, 40, 47, 48), window=7),
    Case("window of whole blocks", ones(31, 32, 33, 90), window=32),
    Case("window larger than any context", ones(20, 70), window=1000),
    Case("blocks of 32", ones(31, 32, 33, 100), block_size=32),
    Case("blocks of 1", ones(1, 9, 40), block_size=1),
    Case("blocks of 128, larger than a tile", ones(127, 129, 300), block_size=128),
    Case("more splits than tiles", ones(150, 1, 70), splits=16),
    Case("many splits", ones(700), splits=11, dim=8),
    Case("splits of a window", ones(400, 20), splits=5, window=150),
]
PREFILL = [
    Case("one query, nothing before", ((0, 1),)),
    Case("one query after others", ((40, 1),)),
    Case("one whole block", ((0, 16),)),
    Case("first chunks, ragged", ((0, 5), (0, 33), (0, 1), (0, 16))),
    Case("later chunks from and to block edges", ((16, 16), (15, 2), (31, 17), (32, 3))),
    Case("more queries than a tile", ((30, 150),), heads=3, kv_heads=1),
    Case("head size 80", ((9, 30), (0, 8)), dim=80),
    Case("head size 96, three heads per KV head", ((20, 13),), heads=9, kv_heads=3, dim=96),
    Case("head size 256", ((4, 20),), heads=4, kv_heads=1, dim=256),
    Case("one KV head for all", ((10, 20),), heads=8, kv_heads=1),
    Case("twenty heads on one KV head", ((10, 20), (0, 3)), heads=20, kv_heads=1),
    Case("every head its own", ((10, 20),), heads=4, kv_heads=4),
    Case("window of one", ((0, 20), (17, 5)), window=1),
    Case("window inside a block", ((0, 40), (45, 9)), window=7),
    Case("window that leaves whole tiles unseen", ((0, 150),), heads=3, kv_heads=1, window=7),
    Case("window across chunks", ((60, 40), (100, 1)), window=50),
    Case("window larger than any context", ((20, 20),), window=1000),
    Case("blocks of 32", ((31, 34), (0, 32)), block_size=32),
    Case("blocks of 1", ((5, 9),), block_size=1),
]


@dataclass(eq=False)
class Inputs:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    new_k: Tensor  # [T, Hkv, D]: what write_kv stored last, at batch.slots
    new_v: Tensor


def build(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Scattered blocks; every slot that no row owns is NaN, and so are the table's unused entries' blocks."""
    draw = torch.Generator().manual_seed(seed)
    b = case.block_size
    need = [-(-(start + count) // b) for start, count in case.rows]
    ids = list(range(1, sum(need) + 3))  # block 0 pads the table and belongs to nobody
    random.Random(seed).shuffle(ids)
    tables = [[ids.pop() for _ in range(n)] for n in need]
    rows = [(t, start, count) for t, (start, count) in zip(tables, case.rows, strict=True)]
    batch = make_batch(rows, b)
    caches = torch.full((2, sum(need) + 3, b, case.kv_heads, case.dim), float("nan"))
    for table, start, count in rows:
        for position in range(start + count):
            where = table[position // b], position % b
            caches[:, *where] = torch.randn(2, case.kv_heads, case.dim, generator=draw)
    caches = caches.to(dtype)
    q = torch.randn(batch.query_list[-1], case.heads, case.dim, generator=draw).to(dtype)
    new = caches.flatten(1, 2)[:, batch.slots]
    moved = make_batch(rows, b, device)
    return Inputs(q.to(device), *caches.to(device), moved, *new.to(device))


def dense(inputs: Inputs, window: int | None) -> tuple[Tensor, Tensor]:
    """The definition, one query at a time in float64: out [T, H, D], lse [T, H]."""
    q, batch = inputs.q.cpu().double(), inputs.batch
    k_cache, v_cache = inputs.k_cache.cpu().double(), inputs.v_cache.cpu().double()
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for r, (begin, end) in enumerate(itertools.pairwise(batch.query_list)):
        table = batch.block_table[r].long().cpu()
        for token in range(begin, end):
            position = batch.context_list[r] - (end - token)
            seen = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
            where = table[seen // block_size], seen % block_size
            k = k_cache[where].repeat_interleave(group, 1)  # [n, H, D]
            v = v_cache[where].repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", q[token], k) * SCALE
            out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
            lse[token] = scores.logsumexp(-1)
    return out, lse
