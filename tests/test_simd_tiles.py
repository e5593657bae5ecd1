"""Products on the CPU's matrix unit against float64; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="the compiled CPU kernels need numba")
from nano_oasis.kernels import simd_tiles
from nano_oasis.kernels.cpu_linear import FEW_ROWS, linear_rows
from nano_oasis.kernels.packed_weight import PackedWeight

pytestmark = pytest.mark.skipif(not simd_tiles.allowed(), reason="this CPU has no AMX, or it may not be used")
ROWS = [FEW_ROWS + 1, 31, 32, 33, 48, 49, 97, 200]
SHAPES = [(16, 32), (48, 64), (64, 96), (960, 576), (576, 1536)]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_good_as_sixteen_bits(rows: int, shape: tuple[int, int], threads) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    want = x.double() @ weight.double().T
    got = linear_rows(x, weight, tiles=True)
    assert 2e-7 < error(got, want) < 1e-5, "else it is not the unit's product"
    assert torch.equal(got, linear_rows(x, weight, tiles=True))
    assert error(linear_rows(x, weight), want) < 2e-6


@pytest.mark.parametrize("kind", ["int8", "float16", "bfloat16"])
def test_every_format(kind: str, threads) -> None:
    weight, x = torch.randn(80, 128), torch.randn(50, 128)
    stored = PackedWeight.of(weight) if kind == "int8" else weight.to(getattr(torch, kind))
    full = stored[torch.arange(80)].double()
    assert error(linear_rows(x, stored, tiles=True), x.double() @ full.T) < 1e-5


def test_other_shapes_and_few_rows_are_not_rounded() -> None:
    for rows, shape in ((40, (24, 64)), (40, (32, 48)), (FEW_ROWS, (32, 64))):
        weight, x = torch.randn(shape), torch.randn(rows, shape[1])
        assert torch.equal(linear_rows(x, weight, tiles=True), linear_rows(x, weight))


def test_a_row_does_not_depend_on_the_others() -> None:
    weight, x = torch.randn(96, 64), torch.randn(130, 64)
    whole = linear_rows(x, weight, tiles=True)
    for rows in (25, 48, 77):
        assert torch.equal(linear_rows(x[-rows:], weight, tiles=True), whole[-rows:])


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    weight, x = torch.randn(48, 64), torch.randn(40, 64)
    want = linear_rows(x, weight, tiles=True)
    x[7, 3] = bad
    got = linear_rows(x, weight, tiles=True)
    assert got[7].isnan().all()
    keep = [i for i in range(40) if i != 7]
    assert torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_small_and_large_numbers(scale: float) -> None:
    weight, x = torch.randn(32, 64), torch.randn(32, 64) * scale
    assert error(linear_rows(x, weight, tiles=True), x.double() @ weight.double().T) < 1e-5
