"""Compiled norms, rotation, activations and KV writes against torch in float64."""

import pytest
import torch
import torch.nn.functional as F

from nano_oasis.kernels import pointwise, reference
from nano_oasis.kernels.dispatch import numba_works, select_kernels

pytestmark = pytest.mark.skipif(not numba_works(), reason="nothing is compiled without numba")
EPS = 1e-6


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Counts the calls: a test of the torch twin against itself would prove nothing."""
    from nano_oasis.kernels import cpu_pointwise

    calls = []
    for name in ("add_norm", "norm_rotate", "gated"):
        real = getattr(cpu_pointwise, name)
        monkeypatch.setattr(
            cpu_pointwise, name, lambda *a, _real=real, _name=name: (calls.append(_name), _real(*a))[1]
        )
    return calls


def rand(*shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])) * scale


def true_norm(x, weight):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def near(got, want, tolerance=2e-6):
    assert got.dtype == torch.float32
    assert float(((got.double() - want).abs() / (want.abs() + 1)).max()) < tolerance


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
@pytest.mark.parametrize("width", [16, 576, 640])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_sum_and_norm(rows, width, scale, compiled):
    x, h, weight = rand(rows, width, scale=scale), rand(width, rows).T * scale, rand(width)
    before = x.clone()
    total, out = pointwise.add_norm(x, h, weight, EPS)
    assert torch.equal(total, x + h) and torch.equal(x, before), "the operands are left as they were"
    near(out, true_norm(total, weight), 1e-5)
    same, out = pointwise.add_norm(x, None, weight, EPS)
    assert same is x
    near(out, true_norm(x, weight), 1e-5)
    assert compiled == ["add_norm"] * 2


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(1, 9, 3, 64), (5, 4, 1, 256), (3, 2, 2, 16)])
def test_norm_and_rotation(shape, normed, compiled):
    rows, heads, kv_heads, size = shape
    qkv, angles = rand(rows, heads + 2 * kv_heads, size), rand(rows, 2, size)
    norms = (rand(size, scale=2.0), rand(size, scale=0.5)) if normed else None
    q, k, v = pointwise.norm_rotate(qkv, heads, kv_heads, angles, norms, EPS)
    assert compiled == ["norm_rotate"] and torch.equal(v, qkv[:, heads + kv_heads :])
    for got, part, weight in ((q, qkv[:, :heads], 0), (k, qkv[:, heads : heads + kv_heads], 1)):
        x = true_norm(part, norms[weight]) if norms else part.double()
        first, second = x.chunk(2, -1)
        cos, sin = angles[:, None, 0].double(), angles[:, None, 1].double()
        near(got, x * cos + torch.cat((-second, first), -1) * sin, 1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(activation, compiled):
    x = torch.cat((torch.linspace(-120, 120, 16 * 33).view(3, -1), rand(3, 176, scale=4.0)), 1)
    gate, up = x.double().chunk(2, 1)
    want = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    near(pointwise.gated(x, activation), want)
    assert compiled == ["gated"]


def test_what_is_not_a_number_stays_so():
    x = torch.full((1, 32), float("nan"))
    assert pointwise.gated(x, "silu").isnan().all()
    assert pointwise.add_norm(x, x, torch.ones(32), EPS)[1].isnan().all()


@pytest.mark.parametrize(
    "x", [rand(33, 64), rand(4, 24), rand(4, 64).bfloat16()], ids=["rows", "width", "dtype"]
)
def test_other_shapes_and_types_take_torch(x, compiled):
    total, out = pointwise.add_norm(x, x, torch.ones(x.shape[1]), EPS)
    gate, up = x.chunk(2, 1)
    assert torch.equal(total, x + x) and out.dtype == x.dtype
    assert torch.equal(pointwise.gated(x, "silu"), F.silu(gate) * up) or x.shape[1] % 32 == 0
    assert "add_norm" not in compiled


def test_writes_are_those_of_the_reference():
    write = select_kernels("cpu").write_kv
    k, v = rand(5, 9, 16)[:, 2:5], rand(5, 9, 16)[:, 6:]  # views, as a step has them
    slots = torch.tensor([0, 17, 8, 31, 4])
    caches = [torch.zeros(4, 8, 3, 16) for _ in range(4)]
    write(k, v, *caches[:2], slots)
    reference.write_kv(k, v, *caches[2:], slots)
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
    assert caches[0].abs().sum() > 0
    for wrong in (32, -1):
        with pytest.raises(IndexError):
            write(k[:1], v[:1], *caches[:2], torch.tensor([wrong]))
    half = [torch.zeros(4, 8, 3, 16, dtype=torch.bfloat16) for _ in range(2)]
    write(k, v, *half, slots)
    assert torch.equal(half[0], caches[2].bfloat16())
