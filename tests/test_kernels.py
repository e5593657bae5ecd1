"""Paged attention: the torch twins against a naive float64 answer, the Triton kernels against both."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kernel_cases import DECODE, PREFILL, SCALE, TOLERANCE, Case, Inputs, build, dense

from nano_oasis.kernels import make_batch, reference, select_kernels

triton = pytest.importorskip("triton", reason="the Triton kernels need Triton (Linux)")
from nano_oasis.kernels import triton_decode, triton_kv_write, triton_prefill  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("bfloat16_products")


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)


def run_decode(function, x: Inputs, window: int | None, **options):
    b = x.batch
    return function(x.q, x.k_cache, x.v_cache, b.block_table, b.context_lens, SCALE, window, **options)


def run_prefill(function, x: Inputs, window: int | None, **options):
    b = x.batch
    return function(
        x.q, x.k_cache, x.v_cache, b.block_table, b.query_starts, b.context_lens, SCALE, window, **options
    )


# ---- the torch twins


@pytest.mark.parametrize("case", DECODE, ids=lambda c: c.name)
def test_torch_decode_is_exact(case: Case) -> None:
    x = build(case, torch.float32)
    want, want_lse = dense(x, case.window)
    out, lse = run_decode(reference.paged_decode, x, case.window, return_lse=True)
    near(out, want, TOLERANCE[torch.float32])
    near(lse, want_lse, TOLERANCE[torch.float32])
    plain = run_decode(reference.paged_decode, x, case.window, context_list=x.batch.context_list, plans={})
    assert torch.equal(plain, out)


@pytest.mark.parametrize("case", DECODE + PREFILL, ids=lambda c: c.name)
def test_torch_prefill_is_exact(case: Case) -> None:
    x = build(case, torch.float32)
    want, want_lse = dense(x, case.window)
    out, lse = run_prefill(reference.paged_prefill, x, case.window, return_lse=True)
    near(out, want, TOLERANCE[torch.float32])
    near(lse, want_lse, TOLERANCE[torch.float32])
    near(run_prefill(reference.paged_prefill, x, case.window), want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 300, 700])
def test_torch_prefill_in_query_chunks(window: int | None) -> None:
    """Rows longer than QUERY_CHUNK, so that chunks and torch's own key tiles meet the window's edges."""
    x = build(Case("", ((600, 600), (0, 520)), heads=2, kv_heads=1, dim=8), torch.float32)
    near(run_prefill(reference.paged_prefill, x, window), dense(x, window)[0], TOLERANCE[torch.float32])


def test_torch_decode_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the rows are grouped for speed, and in whatever order they come, each gets its own answer."""
    x = build(Case("", tuple((7 * i % 90, 1) for i in range(20))), torch.float32)
    want, _ = dense(x, None)
    for padding, tokens in ((0, 1), (0, 10**6), (10**6, 10**6), (20, 200)):
        monkeypatch.setattr(reference, "PADDING", padding)
        monkeypatch.setattr(reference, "GROUP_TOKENS", tokens)
        near(run_decode(reference.paged_decode, x, None), want, TOLERANCE[torch.float32])


def test_torch_half_precision_sums_in_fp32() -> None:
    """Forty thousand equal values average to themselves; a running bfloat16 sum would stop growing."""
    n, value = 40_000, 0.1
    cache = torch.full((n // 16, 16, 1, 8), value, dtype=torch.bfloat16)
    q = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    table = torch.arange(n // 16, dtype=torch.int32)[None]
    out = reference.paged_decode(q, cache, cache, table, torch.tensor([n], dtype=torch.int32), 1.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.full_like(q, value))


def test_torch_blocks_in_order_need_no_gather() -> None:
    """An ascending run of blocks is read in place; the answer is that of the scattered copy."""
    x = build(Case("", ((60, 1),)), torch.float32)
    ids = x.batch.block_table[0].long()
    order = torch.arange(len(ids), dtype=torch.int32)[None]
    k, v = x.k_cache[ids], x.v_cache[ids]
    plans: dict = {}
    got = reference.paged_decode(x.q, k, v, order, x.batch.context_lens, SCALE, plans=plans)
    assert isinstance(plans["decode", None][0].blocks, slice)
    assert torch.equal(got, run_decode(reference.paged_decode, x, None))


# ---- the Triton kernels


@pytest.mark.parametrize("case", DECODE, ids=lambda c: c.name)
def test_triton_decode(case: Case) -> None:
    dtype = DTYPES[DECODE.index(case) % 3]
    x = build(case, dtype, DEVICE)
    want, want_lse = dense(x, case.window)
    options = {"splits": case.splits} if case.splits else {"context_list": x.batch.context_list}
    out, lse = run_decode(triton_decode.paged_decode, x, case.window, return_lse=True, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    near(out, want, TOLERANCE[dtype])
    near(lse, want_lse, TOLERANCE[torch.float32] * (1 if dtype == torch.float32 else 10))


@pytest.mark.parametrize("case", PREFILL, ids=lambda c: c.name)
def test_triton_prefill(case: Case) -> None:
    dtype = DTYPES[PREFILL.index(case) % 3]
    x = build(case, dtype, DEVICE)
    want, want_lse = dense(x, case.window)
    queries = x.batch.query_list
    out, lse = run_prefill(triton_prefill.paged_prefill, x, case.window, return_lse=True, query_list=queries)
    assert out.dtype == dtype and lse.dtype == torch.float32
    near(out, want, TOLERANCE[dtype])
    near(lse, want_lse, TOLERANCE[torch.float32] * (1 if dtype == torch.float32 else 10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_triton_decode_in_every_dtype(dtype: torch.dtype, splits: int) -> None:
    case = Case("", ((199, 1), (3, 1)), heads=9, kv_heads=3, dim=24)
    x = build(case, dtype, DEVICE)
    near(run_decode(triton_decode.paged_decode, x, None, splits=splits), dense(x, None)[0], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_prefill_in_every_dtype(dtype: torch.dtype) -> None:
    case = Case("", ((50, 40), (0, 3)), heads=9, kv_heads=3, dim=24, window=60)
    x = build(case, dtype, DEVICE)
    near(run_prefill(triton_prefill.paged_prefill, x, 60), dense(x, 60)[0], TOLERANCE[dtype])


@pytest.mark.parametrize(
    "function", [reference.paged_decode, triton_decode.paged_decode], ids=["torch", "triton"]
)
@pytest.mark.parametrize("splits", [None, 3])
def test_rows_with_nothing_to_see(function, splits: int | None) -> None:
    """Context 0, whatever the table says: zeros and -inf, no NaN, and the other rows are not disturbed."""
    device = DEVICE if function is triton_decode.paged_decode else "cpu"
    x = build(Case("", ((20, 1), (3, 1), (70, 1))), torch.float32, device)
    want, want_lse = dense(x, None)
    x.batch.context_lens[1] = 0
    x.batch.block_table[1] = 0  # a block full of NaN
    want[1], want_lse[1] = 0.0, -torch.inf
    options = {} if splits is None or function is reference.paged_decode else {"splits": splits}
    out, lse = run_decode(function, x, None, return_lse=True, **options)
    near(out, want, TOLERANCE[torch.float32])
    near(lse, want_lse, TOLERANCE[torch.float32])
    x.batch.context_lens[:] = 0
    out, lse = run_decode(function, x, None, return_lse=True, **options)
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_table_entries_past_the_end_are_ignored(backend: str) -> None:
    """They may name blocks that do not exist, or that another row has taken since."""
    device = DEVICE if backend == "triton" else "cpu"
    decode = triton_decode.paged_decode if backend == "triton" else reference.paged_decode
    prefill = triton_prefill.paged_prefill if backend == "triton" else reference.paged_prefill
    x = build(Case("", ((16, 1), (15, 1), (63, 1), (0, 1))), torch.float32, device)
    for r, context in enumerate(x.batch.context_list):
        x.batch.block_table[r, -(-context // 16) :] = 2**30
    want, _ = dense(x, None)
    near(run_decode(decode, x, None), want, TOLERANCE[torch.float32])
    near(run_prefill(prefill, x, None), want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("width", [1, 3, 16])
def test_partial_results_merge_to_the_whole(width: int) -> None:
    """The same keys in 1, 3 or 16 splits: the merge by log-sum-exp changes rounding only."""
    x = build(Case("", ((340, 1), (30, 1), (128, 1))), torch.float32, DEVICE)
    out, lse = run_decode(triton_decode.paged_decode, x, None, return_lse=True, splits=width)
    twin, twin_lse = run_decode(reference.paged_decode, replace_cpu(x), None, return_lse=True)
    near(out, twin.double(), TOLERANCE[torch.float32])
    near(lse, twin_lse.double(), TOLERANCE[torch.float32])


def replace_cpu(x: Inputs) -> Inputs:
    batch = replace(x.batch, block_table=x.batch.block_table.cpu(), context_lens=x.batch.context_lens.cpu())
    return replace(x, q=x.q.cpu(), k_cache=x.k_cache.cpu(), v_cache=x.v_cache.cpu(), batch=batch)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 80])
def test_kv_write_touches_its_slots_only(stored: torch.dtype, given: torch.dtype, dim: int) -> None:
    k, v = torch.randn(5, 3, dim, device=DEVICE).to(given), torch.randn(5, 3, dim, device=DEVICE).to(given)
    slots = torch.tensor([0, 63, 17, 31, 32], device=DEVICE)
    for write in (triton_kv_write.write_kv, reference.write_kv):
        caches = torch.full((2, 4, 16, 3, dim), 7.0, dtype=stored, device=DEVICE)
        write(k, v, caches[0], caches[1], slots)
        for cache, source in zip(caches.flatten(1, 2), (k, v), strict=True):
            # The interpreter cuts float32 to bfloat16 where the GPU rounds to nearest.
            cut = not GPU and write is triton_kv_write.write_kv and [given, stored] == DTYPES[::2]
            near(cache[slots], source.to(stored).cpu().double(), 2**-7 if cut else 0.0)
            rest = [s for s in range(64) if s not in slots.tolist()]
            assert bool((cache[rest] == 7.0).all())
        write(k[:0], v[:0], caches[0], caches[1], slots[:0])


def test_kv_write_of_a_strided_view() -> None:
    """K and V cut out of one wide projection are not contiguous."""
    wide = torch.randn(4, 12, 8, device=DEVICE)
    k, v = wide[:, 8:10], wide[:, 10:]
    caches = torch.zeros(2, 1, 16, 2, 8, device=DEVICE)
    triton_kv_write.write_kv(k, v, caches[0], caches[1], torch.arange(4, device=DEVICE))
    assert torch.equal(caches[0, 0, :4], k) and torch.equal(caches[1, 0, :4], v)


# ---- mixed batches and refusals

MIXED = Case("", ((40, 1), (0, 1), (99, 1), (0, 1 + 16), (30, 20), (17, 1)))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no GPU"))]
)
def test_mixed_batch_equals_each_row_alone(window: int | None, device: str) -> None:
    kernels = select_kernels(device)
    x = build(MIXED, torch.float32, device)
    assert x.batch.num_decodes == 3
    got = kernels.attention(x.q, x.k_cache, x.v_cache, x.batch, SCALE, window)
    near(got, dense(x, window)[0], TOLERANCE[torch.float32])
    for r, (start, count) in enumerate(MIXED.rows):
        row = (x.batch.block_table[r].tolist(), start, count)
        begin, end = x.batch.query_list[r : r + 2]
        alone = make_batch([row], MIXED.block_size, device)
        one = kernels.attention(x.q[begin:end], x.k_cache, x.v_cache, alone, SCALE, window)
        near(one, got[begin:end].cpu().double(), TOLERANCE[torch.float32])


def test_triton_backend_on_a_mixed_batch() -> None:
    x = build(MIXED, torch.float32, DEVICE)
    got = select_kernels("cuda").attention(x.q, x.k_cache, x.v_cache, x.batch, SCALE, None)
    near(got, dense(x, None)[0], TOLERANCE[torch.float32])


def test_make_batch() -> None:
    batch = make_batch([([5, 2], 19, 1), ([7], 0, 1), ([1, 4], 15, 3), ([3], 2, 1)], 16)
    assert (batch.num_decodes, batch.max_context, batch.max_query) == (2, 20, 3)
    assert batch.context_list == batch.context_lens.tolist() == [20, 1, 18, 3]
    assert batch.query_list == batch.query_starts.tolist() == [0, 1, 2, 5, 6]
    assert batch.slots.tolist() == [2 * 16 + 3, 7 * 16, 1 * 16 + 15, 4 * 16, 4 * 16 + 1, 3 * 16 + 2]
    with pytest.raises(ValueError, match="row 1: 1 blocks of 16 tokens do not hold 17 tokens"):
        make_batch([([0], 0, 1), ([0], 16, 1)], 16)
    with pytest.raises(ValueError, match="at least one token"):
        make_batch([([0], 0, 0)], 16)


def test_both_backends_refuse_by_name() -> None:
    x = build(Case("", ((20, 1),)), torch.float32, "cpu")
    for decode in (reference.paged_decode, triton_decode.paged_decode):
        with pytest.raises(ValueError, match="window must be at least 1 token"):
            run_decode(decode, x, 0)
        with pytest.raises(ValueError, match="KV heads divide the heads"):
            run_decode(decode, replace(x, q=x.q[:, :5]), None)
        with pytest.raises(ValueError, match="head sizes must be equal"):
            run_decode(decode, replace(x, q=x.q[:, :, :8]), None)
        with pytest.raises(ValueError, match="in one dtype"):
            run_decode(decode, replace(x, v_cache=x.v_cache.half()), None)
    with pytest.raises(ValueError, match="row 0 has 2 queries but a context of 1 tokens"):
        reference.paged_prefill(
            x.q.expand(2, -1, -1), x.k_cache, x.v_cache, x.batch.block_table,
            torch.tensor([0, 2]), torch.tensor([1]), SCALE,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="view"):
        strided = torch.zeros(4, 2, 16, 8).transpose(1, 2)
        reference.write_kv(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), strided, strided, torch.tensor([0]))


def test_triton_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="power of two on a GPU, got 24"):
        run_decode(triton_decode.paged_decode, build(Case("", ((9, 1),), block_size=24), torch.float32), None)
    with pytest.raises(ValueError, match="head sizes above 256"):
        run_decode(triton_decode.paged_decode, build(Case("", ((9, 1),), dim=320), torch.float32), None)
    x = build(Case("", ((9, 1),)), torch.float32)
    with pytest.raises(ValueError, match=r"float32, float16 and bfloat16.*float64"):
        run_prefill(triton_prefill.paged_prefill, replace(x, q=x.q.double()), None)
    with pytest.raises(ValueError, match="one dtype on a GPU"):
        run_prefill(triton_prefill.paged_prefill, replace(x, q=x.q.half()), None)
    with pytest.raises(ValueError, match="must be contiguous"):
        turned = x.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
        run_decode(triton_decode.paged_decode, replace(x, k_cache=turned), None)


def test_splits_fill_the_device_but_stay_long() -> None:
    choose = triton_decode.choose_splits
    assert choose(1, 8, 100, 64, 132) == 1  # under two tiles: nothing to split
    assert choose(1, 8, 100_000, 64, 132) == 33  # 264 programs on 132 processors
    assert choose(256, 8, 100_000, 64, 132) == 1  # the rows fill it alone
    assert choose(1, 1, 10**6, 64, 132) == triton_decode.MAX_SPLITS
    assert choose(0, 8, 0, 64, 132) == 1


def test_choice_of_backend() -> None:
    assert select_kernels("cpu", torch.float16).paged_decode is reference.paged_decode
    assert select_kernels("cuda").paged_decode is triton_decode.paged_decode
    with pytest.raises(ValueError, match=r"'mps'.*use 'cpu' or 'cuda'"):
        select_kernels("mps")


def test_cpu_never_imports_triton() -> None:
    """Triton is missing on a Mac, and slow to import anywhere."""
    code = (
        "import sys; sys.modules['triton'] = None\n"  # any import of it now fails
        "from nano_oasis.kernels import select_kernels\n"
        "select_kernels('cpu')\n"
        "try: select_kernels('cuda')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "device 'cuda' needs Triton (pip install triton)" in done.stdout
