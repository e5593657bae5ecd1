"""Attention in pieces, as a prefill chunk reads the host tier: merged, against attention to everything.

Owns: these checks. Must not know: engines.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_oasis.kernels import reference
from nano_oasis.memory.stream import merge, piece_attention


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int | None) -> tuple:
    """By the letter: q [n, Hq, D] at first.., k, v [m, H, D] from position 0 -> out, lse in fp64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * 0.3
    at, key = first + torch.arange(len(q))[:, None], torch.arange(len(k))
    hidden = (key > at) | (key <= at - window if window else key < 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).T


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000), n=st.sampled_from([1, 5, 8, 9, 20, 300]), first=st.integers(0, 60),
    cut=st.integers(1, 40), window=st.sampled_from([None, None, 1, 7, 64]), heads=st.integers(1, 3),
)  # fmt: skip
def test_pieces_merge_to_the_whole(
    seed: int, n: int, first: int, cut: int, window: int | None, heads: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(n, heads * 2, 16)
    k, v = torch.randn(2, first + n, heads, 16)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    ends = [*range(0, first, cut), first, first + n]  # the last piece is the chunk itself
    for a, b in itertools.pairwise(ends):
        out, lse = merge(out, lse, *piece_attention(q, k[a:b], v[a:b], first, a, 0.3, window))
    expected = whole(q, k, v, first, window)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [3, 40])
def test_prefill_gives_lse_for_few_and_many_queries(count: int) -> None:
    torch.manual_seed(count)
    k, v = torch.randn(2, 8, 8, 2, 16)  # blocks of 8 tokens
    q, table = torch.randn(count, 6, 16), torch.tensor([[3, 1, 4, 0, 5, 2]], dtype=torch.int32)
    context = 45
    out, lse = reference.paged_prefill(
        q, k, v, table, torch.tensor([0, count]), torch.tensor([context]), 0.3, None, return_lse=True
    )
    keys, values = (x[table[0].long()].flatten(0, 1)[:context] for x in (k, v))
    expected = whole(q, keys, values, context - count, None)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-5)
