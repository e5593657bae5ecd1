"""The compiled CPU kernels: against float64 and the torch twins, one thread and two, and who uses them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_cases import DECODE, SCALE, TOLERANCE, Case, build, dense

pytest.importorskip("numba", reason="the compiled CPU kernels need numba")
from nano_oasis.kernels import (
    cpu_decode,
    cpu_gather,
    cpu_sketch,
    reference,
    reference_blocks,
    select_kernels,
    simd,
    simd_codes,
)
from nano_oasis.memory.sketch import FourBit, Selector

NEAR = TOLERANCE[torch.float32]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """That many shares even for short rows, so that every case is cut at every place."""
    monkeypatch.setattr(cpu_decode, "SHARE_TOKENS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decode(x, window=None, **options):
    b = x.batch
    return cpu_decode.paged_decode(
        x.q, x.k_cache, x.v_cache, b.block_table, b.context_lens, SCALE, window, **options
    )


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = NEAR) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


# ---- paged decode


@pytest.mark.parametrize("case", DECODE, ids=lambda c: c.name)
def test_decode_equals_float64(case: Case, threads: int) -> None:
    """Slots that no row owns are NaN, so a read past a row's end or before its window would show."""
    x = build(case, torch.float32)
    want, want_lse = dense(x, case.window)
    got, lse = decode(x, case.window, return_lse=True)
    near(got, want)
    near(lse, want_lse)
    assert torch.equal(decode(x, case.window, context_list=x.batch.context_list), got)


@pytest.mark.parametrize("seed", range(20))
def test_decode_of_rows_that_share_blocks_equals_the_torch_twin(seed: int, threads: int) -> None:
    """Drafts see a little more each; requests with one prompt go apart after it."""
    draw = torch.Generator().manual_seed(seed)
    contexts = torch.randint(1, 400, (5,), generator=draw).tolist()
    case = Case("", tuple((n - 1, 1) for n in contexts), heads=9, kv_heads=3, dim=64, block_size=16)
    x = build(case, torch.float32, seed=seed)
    rows = torch.randint(0, 5, (9,), generator=draw).sort().values
    table = x.batch.block_table[rows].clone()
    lens = torch.tensor([int(torch.randint(1, contexts[r] + 1, (), generator=draw)) for r in rows])
    alike = rows[:-1].eq(rows[1:]).nonzero()[:, 0]
    if seed % 2 and len(alike) and contexts[int(rows[alike[0]])] > 64:
        width = -(-contexts[int(rows[alike[0]])] // 16)  # the same first block, others after it
        table[alike[0], 1 : width - 1] = table[alike[0], 1 : width - 1].flip(0)
    q, lens = torch.randn(9, 9, 64, generator=draw), lens.int()
    window = [None, 40][seed % 3 == 0]
    args = q, x.k_cache, x.v_cache, table, lens, SCALE, window
    want, want_lse = reference.paged_decode(*args, return_lse=True)
    got, lse = cpu_decode.paged_decode(*args, return_lse=True)
    near(got, want)
    near(lse, want_lse)


@pytest.mark.parametrize("seed", range(30))
def test_decode_fuzz_equals_the_torch_twin(seed: int, threads: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    kv_heads, rows = pick(1, 2, 3, 5), pick(1, 2, 7, 13)
    contexts = torch.randint(1, pick(20, 300, 900), (rows,), generator=draw).tolist()
    case = Case(
        "", tuple((n - 1, 1) for n in contexts), heads=kv_heads * pick(1, 2, 3, 4, 7), kv_heads=kv_heads,
        dim=pick(16, 24, 64, 80, 128), block_size=pick(1, 5, 8, 16, 32),
    )  # fmt: skip
    window = pick(None, None, 1, 17, 100)
    x = build(case, torch.float32, seed=seed)
    b = x.batch
    want, want_lse = reference.paged_decode(
        x.q, x.k_cache, x.v_cache, b.block_table, b.context_lens, SCALE, window, return_lse=True
    )
    got, lse = decode(x, window, return_lse=True)
    near(got, want)
    near(lse, want_lse)


def test_the_table_beyond_a_row_and_rows_of_nothing(threads: int) -> None:
    x = build(Case("", ((39, 1), (4, 1), (70, 1))), torch.float32)
    want = decode(x)
    x.batch.context_lens[1] = 0
    for r, blocks in enumerate((3, 0, 5)):
        x.batch.block_table[r, blocks:] = torch.tensor([-(2**31), 2**31 - 1, -1, 10**6, -7])[blocks:]
    got, lse = decode(x, return_lse=True)
    near(got[[0, 2]], want[[0, 2]], 1e-6)
    assert not got[1].any() and (lse[1] == -torch.inf).all()
    out, lse = cpu_decode.paged_decode(
        x.q[:0],
        x.k_cache,
        x.v_cache,
        x.batch.block_table[:0],
        x.batch.context_lens[:0],
        SCALE,
        return_lse=True,
    )
    assert out.shape == (0, 6, 16) and lse.shape == (0, 6)


def test_large_scores_neither_overflow_nor_lose_the_maximum(threads: int) -> None:
    """The maximum comes last, after weights that must all vanish; then first, with the rest vanishing."""
    for loud in (199, 0):
        x = build(Case("", ((199, 1),)), torch.float32)
        x.k_cache *= 100
        where = x.batch.block_table[0, loud // 16], loud % 16
        x.k_cache[where] = 1000 * x.q[0, ::3]
        want, want_lse = dense(x, None)
        got, lse = decode(x, return_lse=True)
        near(got, want, 1e-4)  # scores of thousands: float32 has no more digits
        near(lse, want_lse, 1e-5)


def test_nan_in_a_row_stays_in_its_row(threads: int) -> None:
    x = build(Case("", ((50, 1), (60, 1))), torch.float32)
    want = decode(x)
    for cache, at in ((x.k_cache, 3), (x.v_cache, 40)):
        block, offset = x.batch.block_table[0, at // 16], at % 16
        old = cache[block, offset].clone()
        cache[block, offset] = torch.nan
        got = decode(x)
        assert got[0].isnan().all()
        near(got[1], want[1], 1e-6)
        cache[block, offset] = old


def test_strided_inputs_give_the_same(threads: int) -> None:
    x = build(Case("", ((50, 1), (60, 1)), dim=64), torch.float32)
    want = decode(x)
    b = x.batch
    wide = torch.randn(2, 6, 128)
    wide[..., ::2] = x.q
    table = torch.stack((b.block_table, b.block_table), 2)[..., 0]
    turned = x.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert not (wide[..., ::2].is_contiguous() or table.is_contiguous() or turned.is_contiguous())
    for q, keys, ids in ((wide[..., ::2], x.k_cache, b.block_table), (x.q, turned, table)):
        got = cpu_decode.paged_decode(q, keys, x.v_cache, ids, b.context_lens, SCALE)
        near(got, want, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_twins_affair(dtype: torch.dtype) -> None:
    x = build(Case("", ((50, 1),)), dtype)
    b = x.batch
    want = reference.paged_decode(x.q, x.k_cache, x.v_cache, b.block_table, b.context_lens, SCALE)
    assert torch.equal(decode(x), want) and want.dtype == dtype


def test_decode_refuses_by_name() -> None:
    x = build(Case("", ((20, 1),)), torch.float32)
    with pytest.raises(ValueError, match="window must be at least 1 token"):
        decode(x, 0)


# ---- four-bit sketches


@pytest.mark.parametrize("dim", [16, 24, 64, 80, 128])
@pytest.mark.parametrize("size", [8, 16, 32, 48])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
def test_fourbit_logits_equal_the_gathered_ones(dim: int, size: int, group: int, threads: int) -> None:
    torch.manual_seed(dim + size + group)
    heads, selector = 4, FourBit()
    keys = torch.randn(40, size, heads, dim)
    keys[:5] *= 1e-6  # steps that float16 can only hold as subnormal numbers
    keys[5:9] *= 3000
    keys[9] = 0.25  # all equal: a step of zero
    slabs = selector.build(keys)
    table = torch.randint(40, (5, 30))
    counts = torch.tensor([30, 0, 1, 17, 29])
    for part in (slice(None), slice(2, 4), slice(1, 2)):
        q = torch.randn(5, len(range(*part.indices(heads))) * group, dim) * dim**-0.5
        want = Selector.logits_at(selector, q.double().float(), slabs, table, counts, part)
        got = selector.logits_at(q, slabs, table, counts, part)
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        floor = (
            want.amax(-1, keepdim=True) - 80
        )  # what receives less than e**-80 of the mass is not told apart
        error = torch.maximum(got, floor) - torch.maximum(want, floor)
        large = ((table >= 5) & (table < 9))[:, None]  # products of thousands, which cancel
        assert (error.abs() <= 3e-4 + 1e-5 * want.abs() + 1e-3 * large)[want > -torch.inf].all()
        mass = selector.score_at(q, slabs, table, counts, 1.0, part)  # [R, H, M]
        each = torch.softmax(got, -1).nan_to_num(0.0)
        assert torch.equal(mass, each.view(5, -1, group, 30).mean(2)) and not mass[1].any()
        if part == slice(None):
            for groups in (1, 2, heads):
                one = selector.mass_at(q, slabs, table, counts, 1.0, groups)  # [groups, R, M]
                near(one, mass.unflatten(1, (groups, -1)).mean(2).transpose(0, 1), 1e-6)


def test_fourbit_reads_no_more_than_its_blocks(threads: int) -> None:
    slabs = FourBit().build(torch.randn(6, 16, 2, 32))
    table = torch.tensor([[3, 1, -(2**40)], [2**40, 7, -1]])
    got = cpu_sketch.fourbit_logits(torch.randn(2, 4, 32), *slabs.values(), table, torch.tensor([2, 0]))
    assert got[0, :, :2].isfinite().all() and (got[0, :, 2] == -torch.inf).all()
    assert (got[1] == -torch.inf).all()


def test_every_float16_is_read_right() -> None:
    """Bases run through all of them, through a logit of one token: base + log of the block's sixteen."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    base = bits.view(-1, 1, 16)
    codes = torch.zeros(len(base), 1, 4, 16, dtype=torch.uint8)
    q = torch.tensor([[[1e-3] + [0.0] * 7]])  # so a logit is a thousandth of the base
    table = torch.arange(len(base))[None]
    got = cpu_sketch.fourbit_logits(q, codes, base, torch.zeros_like(base), table, torch.tensor([len(base)]))
    want = torch.logsumexp(base[:, 0].float() / 1000, -1)
    finite = base[:, 0].float().isfinite().all(1)
    torch.testing.assert_close(got[0, 0][finite], want[finite], atol=3e-4, rtol=2e-6)
    assert not got[0, 0][~finite].isfinite().any() and finite.sum() == 2**12 - 128


@pytest.mark.parametrize("pair", [False, True], ids=["block", "pair of blocks"])
@pytest.mark.parametrize("features", [set(), {"avx2"}, {"avx2", "f16c"}, {"avx512f", "avx512vnni", "avx2"}])
def test_every_way_of_multiplying_codes_gives_the_same(features: set[str], pair: bool) -> None:
    if not features <= simd_codes.features():
        pytest.skip("not on this CPU")
    tile = simd_codes.make_code_tile(2, pair, features)
    size = 8 if pair else 32

    @simd.jit
    def logits(codes, base, step, query, factors, out):
        if pair:
            tile(codes, base, step, 3, 1, 0, 1, 0, query, factors, 1, out, 0)
        else:
            for t in range(0, 32, 16):
                tile(codes, base, step, 1, 1, 0, 1, t, query, factors, 1, out, t)

    draw = np.random.default_rng(0)
    codes = draw.integers(256, size=(4, 3, 12, size), dtype=np.uint8)
    base, step = draw.normal(size=(2, 4, 3, size)).astype(np.float16)
    query = draw.integers(-127, 128, size=(3, 24), dtype=np.int8)
    factors = draw.normal(size=(2, 3)).astype(np.float32)
    out = np.zeros((2, 16 if pair else 32), np.float32)
    bits = base.view(np.uint16), step.view(np.uint16)
    logits(codes, *bits, query.view(np.int32), factors, out)
    read = [3, 1] if pair else [1]
    codes, base, step = (np.concatenate([x[block, 1] for block in read], -1) for x in (codes, base, step))
    dots = query[1:].astype(np.int32) @ np.concatenate((codes & 15, codes >> 4)).astype(np.int32)
    want = base * factors[0, 1:, None] + step * factors[1, 1:, None].astype(np.float64) * dots
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-3)


# ---- the choice


def test_choice() -> None:
    assert select_kernels("cpu").name == "numba"
    assert select_kernels("cpu").paged_decode is cpu_decode.paged_decode
    assert select_kernels("cpu", torch.bfloat16).name == "torch"
    assert select_kernels("cpu", torch.bfloat16).paged_decode is reference.paged_decode


def test_without_numba_the_twins_are_used() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"  # any import of it now fails
        "import torch\n"
        "from nano_oasis.kernels import select_kernels\n"
        "from nano_oasis.memory.sketch import FourBit\n"
        "import nano_oasis.async_engine\n"
        "print(select_kernels('cpu').name)\n"
        "slabs = FourBit().build(torch.randn(3, 16, 1, 32))\n"
        "table, counts = torch.tensor([[2, 0]]), torch.tensor([2])\n"
        "print(FourBit().logits_at(torch.randn(1, 2, 32), slabs, table, counts).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["torch", "torch.Size([1, 2, 2])"]
    assert "numba cannot be imported" in done.stderr


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path) -> None:
    code = (
        "import torch\n"
        "from nano_oasis.kernels import simd\n"
        "import numpy as np\n"
        "f = simd.jit(lambda x: x + 1)\n"
        "print(f(1))"
    )
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"NUMBA_CACHE_DIR": str(blocked / "cache"), "PATH": ""},
    )  # fmt: skip
    assert done.stdout.strip() == "2", done.stderr


# --- moving blocks --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_head_groups_of_blocks_reach_their_slots_and_no_others(dtype: torch.dtype, size: int) -> None:
    source = (torch.randn(2, 9, 16, 4, 24) * 50).to(dtype)
    blocks, slots = torch.tensor([5, 6, 7, 0, 5, 8]), torch.tensor([3, 4, 10, 0, 7, 8])
    groups = torch.tensor([0, 1, 1, 3, 2, 0]) % (4 // size)
    pool = torch.full((2, 11, 16, size, 24), 7, dtype=dtype)
    want = pool.clone()
    for b, g, s in zip(blocks, groups, slots, strict=True):
        want[:, s] = source[:, b, :, g * size : (g + 1) * size]
    assert cpu_gather.supports(source, pool)
    for gather in (cpu_gather.gather_groups, reference_blocks.gather_groups):
        got = torch.full_like(pool, 7)
        gather(*source, *got, blocks, groups, slots)
        assert torch.equal(got, want)
