"""Sketches, the choice of blocks, sparse decode: torch against a float64 definition, Triton against torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import SCALE, TOLERANCE, Case, build, dense

from nano_oasis.kernels import make_batch, reference, reference_sketch
from nano_oasis.memory import sketch
from nano_oasis.memory.sketch import FourBit

triton = pytest.importorskip("triton", reason="the Triton kernels need Triton (Linux)")
from nano_oasis.kernels import triton_decode, triton_sketch, triton_topk  # noqa: E402
from nano_oasis.kernels.dispatch import select_oasis_kernels  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = [
    pytest.mark.usefixtures("bfloat16_products"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # numpy in the interpreter
]


@dataclass(frozen=True)
class Shape:
    name: str
    blocks: int = 7
    size: int = 16
    heads: int = 2
    group: int = 3
    dim: int = 16
    counts: tuple[int, ...] = (5, 0, 1, 3)  # sealed blocks per row
    width: int = 5


SHAPES = [
    Shape("one block", blocks=1, counts=(1,), width=1),
    Shape("head size 8", dim=8),
    Shape("head size 80", dim=80),
    Shape("head size 96, blocks of 32", dim=96, size=32),
    Shape("head size 128", dim=128, group=4),
    Shape("head size 256", dim=256, heads=1, group=2),
    Shape("one KV head for all", heads=1, group=8),
    Shape("twenty heads on one KV head", heads=1, group=20),
    Shape("every head its own", heads=4, group=1),
    Shape("blocks of 1", size=1, counts=(5, 0, 1, 2)),
    Shape("blocks larger than a tile", size=256, dim=8, counts=(2, 0)),
    Shape("tables of several tiles", blocks=30, counts=(29, 8, 9, 17), width=30),
    Shape("nothing sealed anywhere", counts=(0, 0)),
    Shape("no rows", counts=()),
]


def keys_of(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """[n, B, H, D]: a loud channel, and blocks of equal, tiny and large keys."""
    g = torch.Generator().manual_seed(shape.dim + shape.size)
    keys = torch.randn(shape.blocks, shape.size, shape.heads, shape.dim, generator=g) * 2
    keys[..., 3] += 9
    keys[1:2] = 0.25
    keys[2:3] *= 1e-6  # steps that float16 holds as subnormal numbers, or not at all
    keys[3:4] *= 300
    return keys.to(dtype)


@pytest.mark.parametrize("shape", SHAPES[:10], ids=lambda s: s.name)
def test_triton_builds_the_same_sketch(shape: Shape) -> None:
    dtype = DTYPES[SHAPES.index(shape) % 3]
    keys = keys_of(shape, dtype)
    want = reference_sketch.fourbit_build(keys)
    got = triton_sketch.fourbit_build(keys.to(DEVICE))
    assert [x.dtype for x in got] == [torch.uint8, torch.float16, torch.float16]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    wide = torch.cat((keys, keys), 2).to(DEVICE)[:, :, : shape.heads]  # a view of some heads
    assert torch.equal(triton_sketch.fourbit_build(wide)[0].cpu(), want[0])
    assert triton_sketch.fourbit_build(keys[:0].to(DEVICE))[0].shape == want[0][:0].shape


def defined_logits(q, codes, base, step, table, counts) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in float64: keys base + step * code, queries in 255 steps. And the sizes of the sums."""
    group = q.shape[1] // codes.shape[1]
    out = torch.full((*q.shape[:2], table.shape[1]), -torch.inf, dtype=torch.float64)
    sizes = torch.ones_like(out)
    for r, count in enumerate(counts.tolist()):
        for m in range(count):
            packed = codes[table[r, m]]  # [H, D / 2, B]
            code = torch.cat((packed & 15, packed >> 4), 1).double()
            unit = q[r].abs().amax(-1, keepdim=True) / 127
            small = ((q[r] / unit).round() * unit.double())[..., None]  # [Hq, D, 1]
            steps, bases = (
                x[table[r, m]].double().repeat_interleave(group, 0) for x in (step, base)
            )  # [Hq, B]
            dots = steps * (small * code.repeat_interleave(group, 0)).sum(1)
            out[r, :, m] = (bases * q[r].double().sum(-1, keepdim=True) + dots).logsumexp(-1)
            parts = base[table[r, m], :, None].abs().double() + step[table[r, m], :, None].double() * code
            each = torch.einsum("hd,hdt->ht", q[r].abs().double(), parts.repeat_interleave(group, 0))
            sizes[r, :, m] += each.amax(-1)
    return out, sizes


@pytest.mark.parametrize(
    "shape, heads",
    [(s, slice(None)) for s in SHAPES] + [(s, slice(1, 2)) for s in (SHAPES[4], SHAPES[8])],
    ids=lambda x: x.name if isinstance(x, Shape) else "all heads" if x.start is None else "one group",
)
def test_logits_equal_the_definition(shape: Shape, heads: slice) -> None:
    """Unsealed blocks hold anything; table entries past a row's count may name blocks that do not exist."""
    slabs = reference_sketch.fourbit_build(keys_of(shape, torch.float32))
    g = torch.Generator().manual_seed(1)
    rows, chosen = len(shape.counts), len(range(*heads.indices(shape.heads)))
    q = torch.randn(rows, chosen * shape.group, shape.dim, generator=g) * shape.dim**-0.5
    table = torch.randint(shape.blocks, (rows, shape.width), generator=g)
    counts = torch.tensor(shape.counts, dtype=torch.int64)
    part = [x[:, heads] for x in slabs]
    want, sizes = defined_logits(q, *part, table, counts)
    twin = reference_sketch.fourbit_logits(q, *slabs, table, counts, heads)
    assert torch.equal(twin == -torch.inf, want == -torch.inf)
    assert ((twin - want).abs() <= 2**-20 * sizes)[want > -torch.inf].all()

    past = torch.arange(shape.width) >= counts[:, None]
    table = table.masked_fill(past, 2**40)
    used = set(table[~past].tolist())
    for b in set(range(shape.blocks)) - used:
        slabs[0][b], slabs[1][b], slabs[2][b] = 255, torch.nan, torch.nan
    inputs = [x.to(DEVICE) for x in (q, *slabs, table, counts)]
    got = triton_sketch.fourbit_logits(*inputs, heads).cpu()
    assert got.dtype == torch.float32 and torch.equal(got == -torch.inf, want == -torch.inf)
    assert ((got - want).abs() <= 2**-20 * sizes)[want > -torch.inf].all()
    if chosen == shape.heads:  # masses are of all heads
        each = torch.softmax(got, -1).nan_to_num(0.0).unflatten(1, (shape.heads, shape.group))
        mass = triton_sketch.fourbit_mass(*inputs, 1.0).cpu()
        torch.testing.assert_close(mass, each.mean((1, 2))[None])
        mass = triton_sketch.fourbit_mass(*inputs, 1.0, shape.heads).cpu()
        torch.testing.assert_close(mass, each.mean(2).transpose(0, 1))


def test_a_selector_on_the_gpu_scores_with_these_kernels(monkeypatch) -> None:
    """FourBit through the Triton set gives the masses, and so the choice, that it gives on the CPU."""
    keys = keys_of(SHAPES[4], torch.float32)
    q = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(2))
    table, counts = torch.tensor([[4, 0, 6, 5], [6, 5, 4, 0]]), torch.tensor([4, 3])
    selector = FourBit()
    want = selector.score_at(q, selector.build(keys), table, counts, 0.05)
    want_one = selector.mass_at(q, selector.build(keys), table, counts, 0.05)
    monkeypatch.setattr(sketch, "select_oasis_kernels", lambda kind: select_oasis_kernels("cuda"))
    slabs = selector.build(keys.to(DEVICE))
    got = selector.score_at(q.to(DEVICE), slabs, table.to(DEVICE), counts.to(DEVICE), 0.05)
    torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-4)
    one = selector.mass_at(q.to(DEVICE), slabs, table.to(DEVICE), counts.to(DEVICE), 0.05)
    torch.testing.assert_close(one.cpu(), want_one, atol=1e-5, rtol=1e-4)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    for a, b in ((want, got), (want_one[0, :, None], one[0, :, None])):
        chosen = triton_topk.top_blocks(b, 2, nothing.to(DEVICE)).cpu()
        assert torch.equal(chosen, reference_sketch.top_blocks(a, 2, nothing))


def test_sketch_kernels_refuse_by_name() -> None:
    with pytest.raises(ValueError, match="9 channels do not fill whole bytes"):
        triton_sketch.fourbit_build(torch.zeros(1, 16, 1, 9))
    with pytest.raises(ValueError, match="power of two on a GPU, got 24"):
        triton_sketch.fourbit_build(torch.zeros(1, 24, 1, 8))
    with pytest.raises(ValueError, match=r"GPU dtypes are.*float64"):
        triton_sketch.fourbit_build(torch.zeros(1, 16, 1, 8, dtype=torch.float64))
    slabs = reference_sketch.fourbit_build(torch.zeros(3, 16, 2, 8))
    table, counts = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\[1, 3, 8\] does not fit sketches of 2 KV heads of size 8"):
        triton_sketch.fourbit_logits(torch.zeros(1, 3, 8), *slabs, table, counts)
    with pytest.raises(ValueError, match="codes, base and step must be contiguous"):
        strided = slabs[0].transpose(2, 3).contiguous().transpose(2, 3)
        triton_sketch.fourbit_logits(torch.zeros(1, 2, 8), strided, *slabs[1:], table, counts)


# ---- the choice


def choose(mass, count, forced, valid=None) -> torch.Tensor:
    flags = [None if x is None else x.to(DEVICE) for x in (forced, valid)]
    return triton_topk.top_blocks(mass.to(DEVICE), count, *flags).cpu()


@pytest.mark.parametrize("masked", [False, True], ids=["all valid", "some valid"])
@pytest.mark.parametrize(
    "rows, heads, width, count",
    [(1, 1, 1, 1), (2, 3, 5, 3), (3, 1, 32, 32), (2, 1, 33, 5), (1, 2, 150, 40), (2, 2, 6, 9), (0, 1, 4, 2)],
)
def test_triton_chooses_the_same_blocks(rows: int, heads: int, width: int, count: int, masked: bool) -> None:
    g = torch.Generator().manual_seed(width)
    mass = torch.softmax(3 * torch.randn(rows, heads, width, generator=g), -1)
    forced = torch.rand(rows, width, generator=g) < 0.1
    valid = torch.rand(rows, width, generator=g) < 0.7 if masked else None
    want = reference_sketch.top_blocks(mass, count, forced, valid)
    got = choose(mass, count, forced, valid)
    assert got.dtype == torch.int64 and got.shape == want.shape == (rows, heads, min(count, width))
    ranked = mass.masked_fill(forced[:, None], 2.0)  # forced blocks are equals: any order among them will do
    for ids in got.flatten(0, 1).tolist():
        real = [i for i in ids if i >= 0]
        assert len(set(real)) == len(real) and real == ids[: len(real)]
    values = [ranked.gather(2, x.clamp(min=0)).masked_fill(x < 0, -1.0) for x in (got, want)]
    assert torch.equal(*values)


def test_of_equals_the_earlier_and_padding_never() -> None:
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    assert choose(torch.full((1, 1, 6), 0.25), 4, nothing).tolist() == [[[0, 1, 2, 3]]]
    some = torch.tensor([[False, True, False, True, True, False]])
    assert choose(torch.full((1, 1, 6), 0.25), 4, nothing, some).tolist() == [[[1, 3, 4, -1]]]
    assert choose(torch.zeros(1, 1, 6), 4, some, nothing).tolist() == [[[-1, -1, -1, -1]]]
    # NaN is a mass of nothing, and forced blocks come first in order of position.
    mass = torch.tensor([[[torch.nan, 0.2, torch.nan, 0.1, 0.3, 0.4]]])
    assert choose(mass, 6, some).tolist() == [[[1, 3, 4, 5, 0, 2]]]
    with pytest.raises(ValueError, match=r"mass must be float32.*float16"):
        choose(mass.half(), 2, nothing)


# ---- sparse decode: the slots of chosen blocks are a table like any other


@pytest.mark.parametrize(
    "function, splits",
    [(reference.paged_decode, None), (triton_decode.paged_decode, 1), (triton_decode.paged_decode, 4)],
    ids=["torch", "triton", "triton, 4 splits"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_over_chosen_blocks(function, splits: int | None, dtype: torch.dtype) -> None:
    """Attention to some blocks and the partial last one; with the rest, by log-sum-exp, to all."""
    case = Case("", ((99, 1), (40, 1), (15, 1), (64, 1)), heads=6, kv_heads=2, dim=24)
    x = build(case, dtype, DEVICE)
    sparse, rest, g = [], [], torch.Generator().manual_seed(3)
    for r, (start, _) in enumerate(case.rows):
        last, size = start // 16, start % 16 + 1
        ids = x.batch.block_table[r, : last + 1].tolist()
        keep = torch.rand(last, generator=g) < 0.4
        chosen = [b for b, k in zip(ids, keep, strict=False) if k]
        others = [b for b, k in zip(ids, keep, strict=False) if not k]
        sparse.append(([*chosen, ids[-1]], 16 * len(chosen) + size - 1, 1))
        rest.append((others, 16 * len(others) - 1, 1) if others else ([0], 0, 1))
    options = {} if splits is None else {"splits": splits}
    results = []
    for rows in (sparse, rest):
        batch = make_batch(rows, 16, DEVICE)
        for r, (blocks, _, _) in enumerate(rows):
            batch.block_table[r, len(blocks) :] = 2**30
        lens = batch.context_lens
        if rows is rest:
            lens[2] = 0  # its only block was chosen
        out, lse = function(x.q, x.k_cache, x.v_cache, batch.block_table, lens, SCALE, None, True, **options)
        results.append((out.cpu().double(), lse.cpu().double()))
        if rows is sparse:
            want, want_lse = dense(replace(x, batch=batch), None)
            torch.testing.assert_close(results[0][0], want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            torch.testing.assert_close(results[0][1], want_lse, atol=5e-5, rtol=5e-5)
    lse = torch.logaddexp(results[0][1], results[1][1])
    whole = sum(out * (part - lse).exp()[..., None] for out, part in results)
    want, want_lse = dense(x, None)
    torch.testing.assert_close(whole, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse, want_lse, atol=5e-5, rtol=5e-5)
