"""Linear layers on the CPU: every path against float64, and a row that does not feel its neighbours.

Owns: that check. Must not know: the model.
"""

from __future__ import annotations

import pytest
import torch

from nano_oasis.kernels import linear as module
from nano_oasis.kernels.linear import linear

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 24, 25, 32, 33, 48, 49, 64, 65, 130]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(4, 16), (576, 64), (300, 1024), (7, 16), (8, 20), (640, 2048)])
def test_equals_float64(rows: int, shape: tuple[int, int], compiled: bool, threads, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(module, "numba_works", lambda: False)
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(rows, shape[1])
    want = x.double() @ weight.double().T
    for got, truth in ((linear(x, weight), want), (linear(x, weight, bias), want + bias)):
        assert got.is_contiguous() and got.dtype == torch.float32 and got.shape == truth.shape
        torch.testing.assert_close(got.double(), truth, atol=2e-6 * shape[1], rtol=1e-5)


def test_parts_of_larger_tensors_are_right() -> None:
    weight, x = torch.randn(64, 160), torch.randn(5, 160)
    for w, rows in ((weight[:, :80], x[:, 80:]), (weight.T.contiguous().T[:, :80], x[:, ::2])):
        torch.testing.assert_close(linear(rows, w), rows @ w.T, atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Few rows are dot products, many are blocks; each way adds up in its own order."""
    pytest.importorskip("numba")
    from nano_oasis.kernels.cpu_linear import FEW_ROWS

    weight, x = torch.randn(128, 576), torch.randn(200, 576)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for rows in (2, 3, 5, 7, 11, FEW_ROWS):
        assert torch.equal(linear(x[:rows], weight), alone[:rows])
    many = linear(x, weight)
    for rows in (FEW_ROWS + 1, 49, 64, 130):
        assert torch.equal(linear(x[-rows:], weight), many[-rows:])


def test_scratch_that_was_used_before_does_not_show() -> None:
    """A thread keeps its scratch: rows that do not fill a register, after larger and smaller products."""
    torch.manual_seed(0)
    for rows, shape in ((300, (64, 96)), (26, (32, 1024)), (300, (64, 96)), (33, (8, 16))):
        x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
        torch.testing.assert_close(linear(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)
        assert linear(torch.full((rows, shape[1]), torch.nan), weight).isnan().all()


def test_scratch_holds_every_narrower_product() -> None:
    """A layer takes it once, for its widest matrix."""
    pytest.importorskip("numba")
    from nano_oasis.kernels.cpu_linear import BLOCK_OUT, _room_size

    sizes = [_room_size(width) for width in range(16, 20_000, 16)]
    assert sizes == sorted(sizes)
    assert all(size >= BLOCK_OUT * width for size, width in zip(sizes, range(16, 20_000, 16), strict=True))


def test_other_dtypes_are_torchs_affair() -> None:
    weight, x = torch.randn(8, 16, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
