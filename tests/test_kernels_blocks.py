"""Moving and encoding blocks: the Triton kernels against their torch twins and against plain indexing."""

from __future__ import annotations

import pytest
import torch

from nano_oasis.kernels import reference_blocks, reference_sketch
from nano_oasis.kernels.dispatch import select_oasis_kernels
from nano_oasis.memory import formats

triton = pytest.importorskip("triton", reason="the Triton kernels need Triton (Linux)")
from nano_oasis.kernels import triton_gather, triton_quant, triton_sketch, triton_topk  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GATHER = {"torch": reference_blocks.gather_blocks, "triton": triton_gather.gather_blocks}
AXES = {"keys": formats.KEYS, "values": formats.VALUES}
# Division by a scale of NaN or of a step of 0 is numpy's business in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


# ---- gather


@pytest.mark.parametrize("backend", GATHER)
@pytest.mark.parametrize(
    "blocks, slots",
    [
        ([5], [2]),
        ([3, 4, 5, 0], [6, 7, 8, 1]),  # a run on both sides, and a single block
        ([3, 4, 5, 6], [0, 1, 7, 8]),  # a run that the slots cut in two
        ([8, 7, 6], [0, 1, 2]),  # neighbours in the wrong order
        ([2, 2], [4, 1]),  # one block to two slots
        ([], []),
    ],
    ids=["one block", "runs", "cut run", "backwards", "twice", "none"],
)
@pytest.mark.parametrize(
    "shape, dtype, heads",
    [
        ((16, 3, 80), torch.float32, slice(None)),  # more than one chunk a block
        ((16, 4, 96), torch.bfloat16, slice(2, 4)),
        ((32, 2, 64), torch.float16, slice(0, 1)),
        ((16, 1, 256), torch.int8, slice(None)),
        ((1, 3, 8), torch.bfloat16, slice(1, 2)),  # the scale of int8 keys
    ],
    ids=["fp32", "bf16, a head group", "fp16, blocks of 32", "int8", "scales"],
)
def test_gather_fills_its_slots_and_no_others(backend, shape, dtype, heads, blocks, slots) -> None:
    device = DEVICE if backend == "triton" else "cpu"
    source = (torch.randn(2, 9, *shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    source = source.pin_memory() if device == "cuda" else source
    host = source[:, :, :, heads]
    pool = torch.full((2, 9, *host.shape[2:]), 7, dtype=dtype, device=device)
    want = pool.cpu().clone()
    want[:, slots] = host[:, blocks]
    GATHER[backend](*host, *pool, *(torch.tensor(x, dtype=torch.int64) for x in (blocks, slots)))
    assert torch.equal(pool.cpu(), want)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_torch_gather_to_a_gpu() -> None:
    host = torch.randn(2, 9, 16, 2, 8).pin_memory()
    pool = torch.zeros(2, 9, 16, 2, 8, device="cuda")
    reference_blocks.gather_blocks(*host, *pool, torch.tensor([3, 4, 0]), torch.tensor([6, 7, 1]))
    assert torch.equal(pool[:, [6, 7, 1]].cpu(), host[:, [3, 4, 0]]) and not pool[:, 0].any()


def test_torch_gather_copies_a_run_at_once(monkeypatch) -> None:
    """Blocks that are neighbours on both sides are one piece."""
    pieces = []
    plain = reference_blocks.runs
    monkeypatch.setattr(reference_blocks, "runs", lambda *ids: (pieces.append(r) or r for r in plain(*ids)))
    host, pool = torch.randn(2, 9, 4, 1, 8), torch.zeros(2, 9, 4, 1, 8)
    reference_blocks.gather_blocks(*host, *pool, torch.tensor([3, 4, 5, 0]), torch.tensor([1, 2, 3, 4]))
    assert pieces == [(0, 3), (3, 4)] * 2  # keys, values
    assert torch.equal(pool[:, 1:5], host[:, [3, 4, 5, 0]])


def test_triton_gather_refuses_by_name() -> None:
    host, pool = torch.zeros(2, 4, 16, 2, 8), torch.zeros(2, 4, 16, 2, 8)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one shape and dtype.*\[4, 16, 2, 8\] torch.float32.*float16"):
        triton_gather.gather_blocks(*host, *pool.half(), one, one)
    with pytest.raises(ValueError, match="one layout"):
        triton_gather.gather_blocks(host[0], torch.zeros(4, 16, 4, 8)[:, :, :2], *pool, one, one)
    with pytest.raises(ValueError, match="slots must be contiguous"):
        triton_gather.gather_blocks(*host, *torch.zeros(2, 4, 16, 4, 8)[:, :, :, :2], one, one)
    with pytest.raises(ValueError, match="heads of one token in host memory"):
        triton_gather.gather_blocks(*torch.zeros(2, 4, 16, 2, 16)[..., :8], *pool, one, one)


# ---- int8


def trouble(kind: str, dtype: torch.dtype, dim: int, heads: int, size: int) -> torch.Tensor:
    """[2, 2, size, heads, dim] (layers, blocks)."""
    x = torch.randn(2, 2, size, heads, dim, generator=torch.Generator().manual_seed(dim))
    limits = torch.finfo(dtype)
    x = {
        "mixed": lambda: x * torch.where(torch.arange(dim) == 5, 100.0, 0.1),
        "zero": lambda: torch.zeros_like(x),
        "huge": lambda: x.clamp(-1, 1) * (0.98 * limits.max),
        "tiny": lambda: x * limits.smallest_normal,
        "ties": lambda: (x * 127).round() / 2 + 0.25,
    }[kind]()
    return x.to(dtype)


@pytest.mark.parametrize(
    "kind, dim, heads, size",
    [
        ("mixed", 64, 3, 16),
        ("mixed", 96, 1, 32),
        ("mixed", 8, 2, 1),
        ("ties", 256, 1, 16),
        ("zero", 24, 2, 16),
        ("huge", 24, 2, 16),
        ("tiny", 24, 2, 16),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_triton_quantises_bit_for_bit(kind, dtype, axis, dim, heads, size) -> None:
    x = trouble(kind, dtype, dim, heads, size)
    want = reference_blocks.quantise(x, axis)
    got = [y.cpu() for y in triton_quant.quantise(x.to(DEVICE), axis)]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.view(torch.int8), b.view(torch.int8))
    codes, scale = (y.flatten(0, 1) for y in want)
    out = torch.full(codes.shape, torch.nan, dtype=dtype)
    reference_blocks.dequantise(codes, scale, out)
    mine = torch.full(codes.shape, torch.nan, dtype=dtype, device=DEVICE)
    triton_quant.dequantise(codes.to(DEVICE), scale.to(DEVICE), mine)
    if dtype == torch.bfloat16 and not GPU:  # the interpreter cuts where a GPU rounds to nearest
        torch.testing.assert_close(mine, out, atol=0.0, rtol=2**-7)
    else:
        assert torch.equal(mine.cpu(), out)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, "largest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_a_group_that_int8_cannot_hold_has_no_scale(bad, dtype, axis) -> None:
    """NaN for its scale, and no trace of it in the other groups."""
    x = trouble("mixed", dtype, 24, 2, 16)
    clean = [y.clone() for y in reference_blocks.quantise(x, axis)]
    x[1, 1, 3, 1, 7] = torch.finfo(dtype).max if bad == "largest" else bad
    group = (1, 1, 0, 1, 7) if axis == formats.KEYS else (1, 1, 3, 1, 0)
    for codes, scale in (reference_blocks.quantise(x, axis), triton_quant.quantise(x.to(DEVICE), axis)):
        lost = scale.isnan().cpu()
        assert lost.sum() == 1 and lost[group]
        assert torch.equal(scale.cpu()[~lost], clean[1][~lost])
        kept = ~lost.expand(x.shape)
        assert torch.equal(codes.cpu()[kept], clean[0][kept])


def test_nothing_to_quantise() -> None:
    x = torch.zeros(2, 0, 16, 2, 8, device=DEVICE)
    codes, scale = triton_quant.quantise(x, formats.KEYS)
    assert codes.shape == x.shape and scale.shape == (2, 0, 1, 2, 8)
    triton_quant.dequantise(codes[0], scale[0], x[0])


def test_triton_quantisation_refuses_by_name() -> None:
    x = torch.zeros(1, 16, 2, 8)
    with pytest.raises(ValueError, match=r"axis must be -3 .* got -2"):
        triton_quant.quantise(x, -2)
    with pytest.raises(ValueError, match=r"GPU dtypes are.*float64"):
        triton_quant.quantise(x.double(), -1)
    with pytest.raises(ValueError, match="power of two on a GPU, got 24"):
        triton_quant.quantise(torch.zeros(1, 24, 2, 8), -1)
    codes, scale = reference_blocks.quantise(x, -1)
    with pytest.raises(ValueError, match=r"scale of \[1, 2, 16, 1\] does not fit codes of \[1, 16, 2, 8\]"):
        triton_quant.dequantise(codes, scale.transpose(1, 2), x)
    with pytest.raises(ValueError, match=r"out must be \[1, 16, 2, 8\]"):
        triton_quant.dequantise(codes, scale, x[:, :8])


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_the_int8_format_on_the_gpu_uses_these_kernels(axis: int, monkeypatch) -> None:
    x = trouble("mixed", torch.float32, 24, 2, 16)
    form = formats.make_format("int8", torch.float32)
    want = form.encode(x, axis)
    monkeypatch.setattr(formats, "select_oasis_kernels", lambda kind: select_oasis_kernels("cuda"))
    got = form.encode(x.to(DEVICE), axis)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    out = torch.empty(4, 16, 2, 24, device=DEVICE)
    form.decode([y.flatten(0, 1) for y in got], out)
    assert (out.cpu() - x.flatten(0, 1)).abs().max() <= want[1].float().max() / 2 * (1 + 1e-5)
    x[0, 0, 0, 0, 0] = torch.nan
    with pytest.raises(formats.HostTierError, match="NaN, inf"):
        form.encode(x.to(DEVICE), axis)


# ---- who supplies what


def test_choice_of_backend() -> None:
    cpu, gpu = select_oasis_kernels("cpu"), select_oasis_kernels("cuda")
    assert (cpu.name, gpu.name) == ("torch", "triton")
    assert cpu.fourbit_build is reference_sketch.fourbit_build
    assert cpu.top_blocks is reference_sketch.top_blocks
    for name, module in (
        ("fourbit_build", triton_sketch), ("fourbit_logits", triton_sketch), ("top_blocks", triton_topk),
        ("gather_blocks", triton_gather), ("quantise", triton_quant), ("dequantise", triton_quant),
    ):  # fmt: skip
        assert getattr(gpu, name) is getattr(module, name)
    with pytest.raises(ValueError, match=r"'mps'.*use 'cpu' or 'cuda'"):
        select_oasis_kernels("mps")
