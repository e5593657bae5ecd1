"""Packed weights: read from a GGUF file's blocks, encoded, joined, multiplied; each against its definition.

Owns: these checks. Must not know: the model.
"""

from __future__ import annotations

import mmap

import gguf
import numpy as np
import pytest
import torch

from nano_oasis.kernels import linear as module
from nano_oasis.kernels.linear import linear
from nano_oasis.kernels.packed_weight import PackedWeight
from nano_oasis.weights.packed import PACKABLE, can_pack, read_packed
from nano_oasis.weights.stored import StoredTensor


def blocks_of(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random blocks [rows, bytes] whose fp16 scales and mins are ordinary numbers."""
    rng = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * width // size, nbytes), np.uint8)
    for at in range(0, 2 if kind in ("Q4_0", "Q5_0", "Q8_0") else 4, 2):
        blocks[:, at : at + 2] = rng.normal(0, 0.02, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def packed(kind: str, rows: int, width: int, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """The same matrix packed, and as gguf-py decodes it."""
    blocks = blocks_of(kind, rows, width, seed)
    data = mmap.mmap(-1, 64 + blocks.nbytes)
    data[64:] = blocks.tobytes()
    stored = StoredTensor(None, "w", kind, (rows, width), 64, blocks.nbytes)  # type: ignore[arg-type]
    assert can_pack(stored)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return read_packed(data, stored), torch.from_numpy(want).view(rows, width)


@pytest.mark.parametrize("kind", PACKABLE)
def test_every_weight_is_the_one_that_gguf_py_reads(kind: str) -> None:
    weight, want = packed(kind, 12, 512)
    assert torch.equal(weight[:], want) and weight.shape == want.shape and len(weight) == 12
    assert weight.four_bits == kind.startswith("Q4")
    assert torch.equal(weight[torch.tensor([7, 2])], want[[7, 2]])
    assert torch.equal(weight.take(torch.tensor([7, 2]))[:], want[[7, 2]])


def test_a_scale_too_large_for_eight_of_it_in_half_precision() -> None:
    blocks = blocks_of("Q4_0", 1, 64)
    blocks[0, :2] = np.float16(60000).reshape(1).view(np.uint8)
    data = mmap.mmap(-1, blocks.nbytes)
    data[:] = blocks.tobytes()
    weight = read_packed(data, StoredTensor(None, "w", "Q4_0", (1, 64), 0, blocks.nbytes))  # type: ignore[arg-type]
    assert weight[:].isfinite().all()
    assert torch.equal(
        weight[:], torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0))
    )


def test_joined_rows_are_the_same_weights_whatever_their_formats() -> None:
    parts = [packed(kind, 4, 256, seed) for seed, kind in enumerate(PACKABLE)]
    joined = PackedWeight.joined([w for w, _ in parts])
    assert torch.equal(joined[:], torch.cat([want for _, want in parts])) and not joined.four_bits
    same = PackedWeight.joined([packed("Q4_1", 4, 64, seed)[0] for seed in (1, 2)])
    assert same.four_bits and same.scales.dtype == torch.float16


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 12, 13, 33, 200])
@pytest.mark.parametrize("kind", [*PACKABLE, "float16", "bfloat16", "int8"])
def test_products_equal_those_of_the_decoded_weights(kind, rows, compiled, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(module, "numba_works", lambda: False)
    torch.manual_seed(rows)
    for out, width in ((4, 256), (68, 768)) + (((7, 256),) if kind[0] == "Q" else ((7, 32),)):
        if kind.startswith("Q"):
            weight, decoded = packed(kind, out, width)
        elif kind == "int8":
            weight = PackedWeight.of(torch.randn(out, width))
            decoded = weight[:]
        else:
            weight = torch.randn(out, width).to(getattr(torch, kind))
            decoded = weight.float()
        bias, x = torch.randn(out), torch.randn(rows, width)
        want = x.double() @ decoded.double().T
        for got, truth in ((linear(x, weight), want), (linear(x, weight, bias), want + bias)):
            assert got.is_contiguous() and got.dtype == torch.float32 and got.shape == truth.shape
            torch.testing.assert_close(got.double(), truth, atol=4e-6 * width, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_K", "bfloat16", "float32"])
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    pytest.importorskip("numba")
    weight = packed(kind, 64, 512)[0] if kind[0] == "Q" else torch.randn(64, 512).to(getattr(torch, kind))
    x = torch.randn(130, 512)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for rows in (2, 3, 5, 11, 12):  # as many as are dot products on every machine
        assert torch.equal(linear(x[:rows], weight), alone[:rows])
    many = linear(x, weight)
    for rows in (25, 32, 50):
        assert torch.equal(linear(x[-rows:], weight), many[-rows:])


def test_compiled_decoding_is_exact() -> None:
    """With inputs that pick single weights nothing is rounded but what decoding rounds."""
    pytest.importorskip("numba")
    for kind in PACKABLE:
        weight, want = packed(kind, 8, 256)
        one = torch.eye(256)
        assert torch.equal(linear(one[:1], weight), want[:, :1].T)
        assert torch.equal(linear(one, weight), want.T)


def test_encoding_in_eight_bits_is_within_half_a_step_of_each_group() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 64) * torch.logspace(-2, 3, 40)[:, None]
    weight[7] = 0
    coded = PackedWeight.of(weight)
    steps = coded.scales.float().repeat_interleave(32, 1)
    # A scale is rounded to half precision (one part in 2048): the largest weight may fall short of its code.
    assert ((coded[:] - weight).abs() <= steps * (0.5 + 127 / 2048)).all()
    assert (coded[:][7] == 0).all() and coded.codes.abs().amax() == 127
    assert coded.nbytes == 40 * 64 + 40 * 2 * 2 and coded.numel() == 40 * 64
