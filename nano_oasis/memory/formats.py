"""How the KV of a block is written in the host tier: as it is, or as int8 with scales.

Owns: encoding and decoding of keys and values, the parts a block consists of, and the error bound.
Must not know: where the bytes are kept, which block they belong to, or devices other than the input's.

Every part of a block has the shape [b, H, d], heads in the middle, so a slice of heads is always
`part[..., heads, :]`. Keys and values differ in one number, the axis that shares a scale:

    keys    one scale per channel, over the block's B tokens    scale [1, H, D]   (keys have loud channels)
    values  one scale per token, over its D channels            scale [B, H, 1]   (values do not)
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from nano_oasis.kernels.dispatch import select_oasis_kernels

KEYS, VALUES = -3, -1  # the axis of [..., B, H, D] that shares a scale
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
FORMATS = ("auto", "int8")

Shape = tuple[int, int, int]


class HostTierError(RuntimeError):
    """The host tier cannot be made, or cannot do what was asked. Says what was given and what to do."""


class Format(Protocol):
    name: str
    dtype: torch.dtype  # of the tensors that are encoded and decoded

    def parts(self, shape: Shape, axis: int) -> list[tuple[Shape, torch.dtype]]:
        """Shape and dtype of what encode makes of the keys or values [B, H, D] of one block, one layer."""

    def encode(self, x: Tensor, axis: int) -> list[Tensor]:
        """[..., B, H, D] -> one tensor [..., b, H, d] per part, on the same device."""

    def decode(self, parts: list[Tensor], out: Tensor) -> None:
        """Writes the values of `parts`, [n, b, H, d] each, to out [n, B, H, D]."""


class Plain:
    """The model's own dtype, bit for bit, NaN and inf included."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.name = dtype, DTYPES[dtype]

    def parts(self, shape: Shape, axis: int) -> list[tuple[Shape, torch.dtype]]:
        return [(shape, self.dtype)]

    def encode(self, x: Tensor, axis: int) -> list[Tensor]:
        return [x]

    def decode(self, parts: list[Tensor], out: Tensor) -> None:
        out.copy_(parts[0])


class Int8:
    """x ~ code * scale, code in -127..127, with |x - code * scale| <= scale / 2.

    The scale is the group's largest magnitude / 127 rounded *up* to bfloat16: half the bytes of fp32,
    all of its range, and never too small for the largest value to have a code. Rounding up costs at most
    1/128 of the step. A group of zeros decodes to exact zeros. On top of the bound comes one rounding to
    the output's dtype. NaN, inf and the last percent of the dtype's range (where x + scale / 2 could
    overflow) are refused: one of them would spoil the scale of a whole group without a trace.
    """

    name = "int8"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def parts(self, shape: Shape, axis: int) -> list[tuple[Shape, torch.dtype]]:
        b, h, d = shape
        return [(shape, torch.int8), ((1, h, d) if axis == KEYS else (b, h, 1), torch.bfloat16)]

    def encode(self, x: Tensor, axis: int) -> list[Tensor]:
        codes, scale = select_oasis_kernels(x.device.type).quantise(x, axis)
        if bool(scale.isnan().any()):
            raise HostTierError(
                "int8 KV: the block holds NaN, inf or a value beyond 99% of the range of "
                f"{DTYPES[x.dtype]}; use --host-kv-format auto to store such blocks as they are"
            )
        return [codes, scale]

    def decode(self, parts: list[Tensor], out: Tensor) -> None:
        codes, scale = parts
        select_oasis_kernels(out.device.type).dequantise(codes, scale, out)


def make_format(name: str, dtype: torch.dtype) -> Format:
    """The format called `name` for KV of this dtype. Raises HostTierError for others."""
    if dtype not in DTYPES:
        raise HostTierError(f"host KV of dtype {dtype}: allowed are {', '.join(DTYPES.values())}")
    if name not in FORMATS:
        raise HostTierError(f"host KV format {name!r}: allowed are {', '.join(FORMATS)}")
    return Plain(dtype) if name == "auto" else Int8(dtype)


def part_bytes(part: tuple[Shape, torch.dtype]) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize
