"""Linear layers on the CPU: every path against float64, and a row that does not feel its neighbours.

Owns: that check. Must not know: the model.
"""

from __future__ import annotations

import pytest
import torch

from nano_oasis.kernels import linear as module
from nano_oasis.kernels.linear import linear

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 32, 33, 130]


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
    pytest.importorskip("numba")
    weight, x = torch.randn(128, 576), torch.randn(32, 576)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for rows in (2, 3, 5, 11, 32):
        assert torch.equal(linear(x[:rows], weight), alone[:rows])


def test_other_dtypes_are_torchs_affair() -> None:
    weight, x = torch.randn(8, 16, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
