"""The compiled halves of a layer against the same layer in torch and float64; compiled KV writes."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nano_oasis.kernels import reference
from nano_oasis.kernels.dispatch import numba_works, select_kernels
from nano_oasis.kernels.packed_weight import PackedWeight
from nano_oasis.layer import Layer

pytestmark = pytest.mark.skipif(not numba_works(), reason="nothing is compiled without numba")

FAMILIES = {  # bias on q, k, v; on the rest; norms of q and k; norms after blocks; activation
    "llama": (False, False, False, False, "silu"),
    "biased": (True, True, False, False, "silu"),
    "qwen2": (True, False, False, False, "silu"),
    "qwen3": (False, False, True, False, "silu"),
    "gemma3": (False, False, True, True, "gelu_tanh"),
}
ROWS = [1, 2, 7, 8, 9, 33, 300]  # both sides of what one thread does alone, and of FEW_ROWS


def make(family, hidden=96, inner=160, heads=4, kv_heads=2, size=32):
    biased, all_biased, normed, post, activation = FAMILIES[family]
    draw = torch.Generator().manual_seed(7)

    def rand(*shape):
        return torch.randn(*shape, generator=draw)

    def matrix(out, wide):
        return rand(out, wide) / wide**0.5

    return Layer(
        attn_norm=rand(hidden), mlp_norm=rand(hidden),
        qkv=matrix((heads + 2 * kv_heads) * size, hidden), out=matrix(hidden, heads * size),
        gate_up=matrix(2 * inner, hidden), down=matrix(hidden, inner),
        qkv_bias=rand((heads + 2 * kv_heads) * size) if biased else None,
        out_bias=rand(hidden) if all_biased else None,
        gate_up_bias=rand(2 * inner) if all_biased else None,
        down_bias=rand(hidden) if all_biased else None,
        q_norm=rand(size) if normed else None, k_norm=rand(size) if normed else None,
        post_attn_norm=rand(hidden) if post else None, post_mlp_norm=rand(hidden) if post else None,
        window=None, local_rope=False, heads=heads, kv_heads=kv_heads, head_dim=size,
        activation=activation, eps=1e-6,
    )  # fmt: skip


def compiled(layer):
    layer = dataclasses.replace(layer)
    layer.compile(torch.float32)
    assert layer.compiled is not None, "a test of torch against itself would prove nothing"
    return layer


def exact(layer):
    """The same layer in torch and float64."""
    fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
    wide = {n: v.double() for n, v in fields.items() if isinstance(v, Tensor)}
    return dataclasses.replace(layer, **wide)


def inputs(layer, rows, scale=1.0):
    draw = torch.Generator().manual_seed(rows)
    hidden = len(layer.attn_norm)
    x, h = (torch.randn(rows, hidden, generator=draw) * scale for _ in range(2))
    turn = torch.rand(rows, layer.head_dim, generator=draw) * 6
    attended = torch.randn(rows, layer.heads * layer.head_dim, generator=draw)
    return x, h, torch.stack((turn.cos(), turn.sin()), 1), attended


def near(got, want, tolerance=2e-5):
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert float(((got.double() - want).abs() / (want.abs() + 1)).max()) < tolerance


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_halves_are_those_of_torch(family, rows):
    layer = make(family)
    fast, true = compiled(layer), exact(layer)
    x, h, angles, attended = inputs(layer, rows)
    for added in (None, h):
        want = true.before(x.double(), None if added is None else added.double(), angles.double())
        for got, expected in zip(fast.before(x.clone(), added, angles), want, strict=True):
            near(got, expected)
    want = true.after(x.double(), attended.double())
    for got, expected in zip(fast.after(x.clone(), attended), want, strict=True):
        near(got, expected)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("packing", ["int8", "float16", "bfloat16"])
def test_matrices_in_other_formats(packing, rows):
    """Exact against the same layer with the matrices that the packed numbers stand for."""
    layer = make("gemma3")
    packed, full = {}, {}
    for name in ("qkv", "out", "gate_up", "down"):
        w = getattr(layer, name)
        if packing == "int8":
            packed[name] = PackedWeight.of(w)
            full[name] = packed[name][torch.arange(len(w))].float()
        else:
            packed[name] = w.to(getattr(torch, packing))
            full[name] = packed[name].float()
        assert not torch.equal(full[name], w)
    fast = compiled(dataclasses.replace(layer, **packed))
    true = exact(dataclasses.replace(layer, **full))
    x, h, angles, attended = inputs(layer, rows)
    want = true.before(x.double(), h.double(), angles.double()), true.after(x.double(), attended.double())
    for half, got in zip(
        want, (fast.before(x.clone(), h, angles), fast.after(x.clone(), attended)), strict=True
    ):
        for one, expected in zip(got, half, strict=True):
            near(one, expected)


@pytest.mark.parametrize("rows", [25, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_products_are_near(family, rows):
    """Where the CPU has no unit for them they are not rounded, and this says no more than the tests above."""
    layer = make(family)
    fast, true = dataclasses.replace(layer), exact(layer)
    fast.compile(torch.float32, rounded=True)
    x, h, angles, attended = inputs(layer, rows)
    want = true.before(x.double(), h.double(), angles.double()), true.after(x.double(), attended.double())
    got = fast.before(x.clone(), h, angles), fast.after(x.clone(), attended)
    for one, expected in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        near(one, expected, 2e-4)


def test_who_may_round(monkeypatch):
    simd_tiles = pytest.importorskip("nano_oasis.kernels.simd_tiles")
    for precision, rounded in (("highest", False), ("highest", True), ("high", False)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda p=precision: p)
        layer = make("llama")
        layer.compile(torch.float32, rounded)
        assert layer.compiled.tiles == (simd_tiles.allowed() and (rounded or precision == "high"))


@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_norms_of_small_and_large_numbers(scale):
    layer = make("llama")
    x, h, angles, _ = inputs(layer, 3, scale)
    want = exact(layer).before(x.double(), h.double(), angles.double())
    for got, expected in zip(compiled(layer).before(x.clone(), h, angles), want, strict=True):
        near(got, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_far_ends_of_the_activation(family):
    """Gates from -120 to 120: silu and gelu must reach 0 and the identity without overflow."""
    layer = make(family)
    layer.gate_up = layer.gate_up * 40
    x, _, _, attended = inputs(layer, 4)
    want = exact(layer).after(x.double(), attended.double())
    assert want[1].isfinite().all()
    for got, expected in zip(compiled(layer).after(x.clone(), attended), want, strict=True):
        near(got, expected, 1e-4)


@pytest.mark.parametrize("rows", [2, 20])
def test_what_is_not_a_number_stays_in_its_row(rows):
    layer = make("qwen3")
    fast = compiled(layer)
    x, h, angles, attended = inputs(layer, rows)
    x[1] = float("nan")
    for got in (*fast.before(x.clone(), h, angles), *fast.after(x.clone(), attended)):
        bad = got.flatten(1).isnan()
        assert bad[1].all()
        assert not bad[[t for t in range(rows) if t != 1]].any()


def test_other_types_and_sizes_take_torch():
    layer = make("llama")
    layer.compile(torch.bfloat16)
    assert layer.compiled is None
    odd = make("llama", hidden=72)
    odd.compile(torch.float32)
    assert odd.compiled is None
    x, h, angles, _ = inputs(odd, 5)
    want = exact(odd).before(x.double(), h.double(), angles.double())
    for got, expected in zip(odd.before(x, h, angles), want, strict=True):
        near(got, expected)


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


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
