"""Compiled prefill attention: against float64 and the torch twin, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import DECODE, PREFILL, SCALE, TOLERANCE, Case, build, dense

pytest.importorskip("numba", reason="the compiled CPU kernels need numba")
from nano_oasis.kernels import cpu_prefill, reference, select_kernels
from nano_oasis.memory import stream

NEAR = TOLERANCE[torch.float32]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def prefill(x, window=None, **options):
    b = x.batch
    return cpu_prefill.paged_prefill(
        x.q, x.k_cache, x.v_cache, b.block_table, b.query_starts, b.context_lens, SCALE, window, **options
    )


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = NEAR) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", DECODE + PREFILL, ids=lambda c: c.name)
def test_equals_float64(case: Case, threads: int) -> None:
    """Slots that no row owns are NaN, so a read past a row's end would show."""
    x = build(case, torch.float32)
    want, want_lse = dense(x, case.window)
    got, lse = prefill(x, case.window, return_lse=True)
    near(got, want)
    near(lse, want_lse)
    lists = {"context_list": x.batch.context_list, "query_list": x.batch.query_list}
    assert torch.equal(prefill(x, case.window, **lists), got)


@pytest.mark.parametrize("seed", range(30))
def test_fuzz_equals_the_torch_twin(seed: int, threads: int) -> None:
    """Up to several bundles of lines for a head, and contexts of several times KEYS_AT_ONCE."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    kv_heads, rows = pick(1, 2, 3), pick(1, 2, 5)
    counts = torch.randint(0, pick(20, 400), (rows,), generator=draw).tolist()
    before = torch.randint(0, pick(5, 500), (rows,), generator=draw).tolist()
    case = Case(
        "", tuple((a, max(n, 1)) for a, n in zip(before, counts, strict=True)),
        heads=kv_heads * pick(1, 2, 3, 4, 7), kv_heads=kv_heads, dim=pick(16, 64, 80, 128),
        block_size=pick(1, 5, 8, 16, 32),
    )  # fmt: skip
    window = pick(None, None, 1, 17, 100)
    x = build(case, torch.float32, seed=seed)
    b = x.batch
    want, want_lse = reference.paged_prefill(
        x.q, x.k_cache.nan_to_num(0.0), x.v_cache.nan_to_num(0.0), b.block_table, b.query_starts,
        b.context_lens, SCALE, window, return_lse=True,
    )  # fmt: skip
    got, lse = prefill(x, window, return_lse=True)
    near(got, want, 3 * NEAR)  # the twin is rounded as well
    near(lse, want_lse, 3 * NEAR)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("window", [None, 7, 40])
def test_pieces_before_and_after_the_queries(heads: int, window: int | None, threads: int) -> None:
    """Queries at 70 to 129. What a query does not see at all is zeros and -inf."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(60, 2 * heads, 32), torch.randn(2, 50, heads, 32)
    for first in (0, 19, 20, 60, 100, 129, 130, 500):
        got, lse = cpu_prefill.piece(q, k, v, 70, first, SCALE, window)
        at, key = 70 + torch.arange(60)[:, None], first + torch.arange(50)
        seen = (key <= at) & (key > at - window if window else key >= 0)  # [60, 50]
        scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double().repeat_interleave(2, 1)) * SCALE
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        near(got, torch.einsum("hnm,mhd->nhd", weights, v.double().repeat_interleave(2, 1)))
        near(lse, scores.logsumexp(-1).T)
        assert not got[~seen.any(1)].any()


def test_stream_uses_it_and_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    q, (k, v) = torch.randn(40, 6, 64), torch.randn(2, 90, 2, 64)
    got = stream.piece_attention(q, k, v, 50, 0, SCALE, None)
    assert all(
        torch.equal(a, b) for a, b in zip(got, cpu_prefill.piece(q, k, v, 50, 0, SCALE, None), strict=True)
    )
    monkeypatch.setattr(stream, "numba_works", lambda: False)
    for a, b in zip(got, stream.piece_attention(q, k, v, 50, 0, SCALE, None), strict=True):
        near(a, b)


def test_large_scores_neither_overflow_nor_lose_the_maximum(threads: int) -> None:
    """The maximum comes late, after weights that must all vanish; then first, with the rest vanishing."""
    for loud in (150, 0):
        x = build(Case("", ((199, 5),)), torch.float32)
        x.k_cache *= 100
        where = x.batch.block_table[0, loud // 16], loud % 16
        x.k_cache[where] = 1000 * x.q[0, ::3]
        want, want_lse = dense(x, None)
        got, lse = prefill(x, return_lse=True)
        near(got, want, 1e-4)  # scores of thousands: float32 has no more digits
        near(lse, want_lse, 1e-5)


def test_nan_in_a_row_stays_in_its_row(threads: int) -> None:
    x = build(Case("", ((50, 20), (60, 30))), torch.float32)
    want = prefill(x)
    for cache, at in ((x.k_cache, 3), (x.v_cache, 40)):
        block, offset = x.batch.block_table[0, at // 16], at % 16
        old = cache[block, offset].clone()
        cache[block, offset] = torch.nan
        got = prefill(x)
        assert got[:20].isnan().all()
        assert torch.equal(got[20:], want[20:])
        cache[block, offset] = old


def test_a_query_does_not_depend_on_the_chunk_it_came_in(threads: int) -> None:
    """Where keys are cut does not follow the queries, so chunks of any size give the same."""
    whole = build(Case("", ((0, 300),), heads=9, kv_heads=3, dim=64), torch.float32)
    want = prefill(whole)
    b = whole.batch
    for first, end in ((0, 100), (100, 133), (299, 300)):
        got = cpu_prefill.paged_prefill(
            whole.q[first:end], whole.k_cache, whole.v_cache, b.block_table,
            torch.tensor([0, end - first]), torch.tensor([end]), SCALE,
        )  # fmt: skip
        near(got, want[first:end], 1e-6)


def test_more_queries_than_tokens_are_refused() -> None:
    x = build(Case("", ((0, 20), (0, 3))), torch.float32)
    x.batch.context_lens[1] = 2
    with pytest.raises(ValueError, match="row 1 has 3 queries but a context of 2 tokens"):
        prefill(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_twins_affair(dtype: torch.dtype) -> None:
    x = build(Case("", ((50, 9),)), dtype)
    b = x.batch
    args = x.q, x.k_cache, x.v_cache, b.block_table, b.query_starts, b.context_lens, SCALE
    assert torch.equal(prefill(x), reference.paged_prefill(*args))


def test_choice() -> None:
    assert select_kernels("cpu").paged_prefill is cpu_prefill.paged_prefill
    assert select_kernels("cpu", torch.bfloat16).paged_prefill is reference.paged_prefill
