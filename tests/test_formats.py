"""Host KV formats: bit-exact as the model, or int8 within half a step of the stored scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_oasis.kernels.reference_blocks import round_up
from nano_oasis.memory.formats import DTYPES, KEYS, VALUES, HostTierError, make_format, part_bytes

B, H, D = 16, 3, 64
AXES = {"keys": KEYS, "values": VALUES}


def tensor_of(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """[2, 3, B, H, D] (layers, blocks) of one kind of trouble."""
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(2, 3, B, H, D, generator=gen)
    top = torch.finfo(dtype).max
    return {
        "random": lambda: x,
        "constant": lambda: torch.full_like(x, -1.7),
        "zero": lambda: torch.zeros_like(x),
        "huge": lambda: x.clamp(-1, 1) * (0.98 * top),
        "tiny": lambda: x * torch.finfo(dtype).smallest_normal,
        "subnormal": lambda: x * torch.finfo(dtype).smallest_normal / 16,
        "loud channel": lambda: x * torch.where(torch.arange(D) == 5, 1000.0, 0.01),
        "loud token": lambda: x * torch.where(torch.arange(B) == 3, 1000.0, 0.01)[:, None, None],
        "one value": lambda: torch.zeros_like(x).index_fill_(-1, torch.tensor([9]), 3.0),
    }[kind]().to(dtype)


KINDS = ["random", "constant", "zero", "huge", "tiny", "subnormal", "loud channel", "loud token", "one value"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
@pytest.mark.parametrize("side", AXES)
def test_int8_error_is_at_most_half_a_step(side, dtype, kind):
    x, form = tensor_of(kind, dtype), make_format("int8", dtype)
    codes, scale = form.encode(x, AXES[side])
    assert codes.dtype == torch.int8 and codes.abs().max() <= 127
    assert (scale >= 2.0**-100).all()  # zeros too: 0 / 0 has no code
    exact = codes.double() * scale.double()
    # The division by the scale rounds once in fp32, which can tip a tie: hence the hair above one half.
    assert ((x.double() - exact).abs() <= scale.double() * 0.5 * (1 + 1e-5)).all()
    out = torch.full_like(x, torch.nan)
    form.decode([codes.flatten(0, 1), scale.flatten(0, 1)], out.view(-1, B, H, D))
    rounding = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    assert ((out.double() - exact).abs() <= rounding).all()  # finite: "huge" must not decode to inf
    if kind in ("zero", "one value"):
        assert (out[x == 0] == 0).all()


@pytest.mark.parametrize("side", AXES)
def test_int8_scale_follows_the_largest_value(side):
    x = tensor_of("random", torch.float32)
    _, scale = make_format("int8", torch.float32).encode(x, AXES[side])
    ratio = scale.float() / (x.abs().amax(AXES[side], keepdim=True) / 127)
    assert (ratio >= 1).all() and (ratio <= 1 + 2**-7).all()


def test_one_loud_key_channel_or_value_token_does_not_cost_the_others():
    form = make_format("int8", torch.float32)
    for kind, axis in (("loud channel", KEYS), ("loud token", VALUES)):
        x = tensor_of(kind, torch.float32)
        codes, scale = form.encode(x, axis)
        quiet = x.abs() < 1
        assert quiet.float().mean() > 0.9
        assert ((codes * scale.float() - x).abs()[quiet] < 2e-4).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, "largest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_int8_refuses_what_it_cannot_hold(dtype, bad):
    x = tensor_of("random", dtype)
    x[1, 2, 3, 1, 7] = torch.finfo(dtype).max if bad == "largest" else bad
    for axis in AXES.values():
        with pytest.raises(HostTierError, match="NaN, inf"):
            make_format("int8", dtype).encode(x, axis)


@given(st.floats(min_value=2.0**-100, max_value=2.0**120, width=32))
def test_round_up_is_the_next_bfloat16(value):
    x = torch.tensor(value)
    up = round_up(x)
    assert up.float() >= x
    assert up.float() <= x * (1 + 2**-7)
    assert round_up(up.float()) == up


def test_parts_describe_what_encode_makes_and_heads_are_in_the_middle():
    for dtype in DTYPES:
        for name in ("auto", "int8"):
            form = make_format(name, dtype)
            for axis in AXES.values():
                made = form.encode(tensor_of("random", dtype), axis)
                parts = form.parts((B, H, D), axis)
                assert [(tuple(m.shape[2:]), m.dtype) for m in made] == parts
                assert all(shape[1] == H for shape, _ in parts)


def test_bytes_of_a_token():
    """Per token, layer and head, keys and values together; the table of docs/11-tiers.md."""

    def per_token(name, dtype):
        form = make_format(name, dtype)
        parts = form.parts((B, 1, D), KEYS) + form.parts((B, 1, D), VALUES)
        return sum(map(part_bytes, parts)) / B

    assert per_token("auto", torch.float32) == 512
    assert per_token("auto", torch.bfloat16) == 256
    assert per_token("int8", torch.bfloat16) == 128 + 2 * D / B + 2


def test_unknown_formats_and_dtypes_are_refused_by_name():
    with pytest.raises(HostTierError, match="'int4': allowed are auto, int8"):
        make_format("int4", torch.float32)
    with pytest.raises(HostTierError, match=r"torch\.int8: allowed are float32"):
        make_format("auto", torch.int8)
