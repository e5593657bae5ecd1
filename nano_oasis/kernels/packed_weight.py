"""Weights of a linear layer in eight or four bits, with a scale for each 32 of a row.

Owns: the encoding, its inverse, and how rows are taken and joined. Must not know: products (linear.py),
files (weights/stored.py), which layers are encoded.

Weights only: activations stay fp32. docs/04-weights.md has what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # weights of a row that share a scale
_MOST = 127


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """weight[o, i] = codes[o, i] * scales[o, i // 32] (+ mins[o, i // 32]), computed in fp32.

    codes int8 [out, in], or uint8 [out, in / 2] with two codes of four bits: byte c of a group's sixteen has
    code c in its low bits and code 16 + c in its high ones, as in GGUF. scales, mins [out, in / 32], fp16 or
    fp32; four bits always have mins.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        """weight [out, in] in eight bits, without mins: a group's largest weight becomes 127."""
        groups = weight.float().unflatten(1, (-1, GROUP))  # [out, in / 32, 32]
        scales = (groups.abs().amax(2) / _MOST).half()
        steps = torch.where(scales > 0, scales, torch.ones_like(scales)).float()
        codes = (groups / steps[:, :, None]).round().clamp_(-_MOST, _MOST)
        return cls(codes.to(torch.int8).flatten(1), scales)

    @classmethod
    def joined(cls, parts: Sequence[PackedWeight]) -> PackedWeight:
        """The rows of all, one after another; with different formats all take the widest."""
        if len({p._format() for p in parts}) > 1:
            parts = [p._widest() for p in parts]
        mins = [p.mins for p in parts if p.mins is not None]
        return cls(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scales for p in parts]),
            torch.cat(mins) if mins else None,
        )

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Those rows as fp32 [n, in]."""
        codes = self.codes[rows]
        if self.four_bits:
            halves = codes.unflatten(1, (-1, GROUP // 2))
            codes = torch.cat([halves & 15, halves >> 4], 2).flatten(1)
        groups = codes.float().unflatten(1, (-1, GROUP)) * self.scales[rows].float()[:, :, None]
        if self.mins is not None:
            groups += self.mins[rows].float()[:, :, None]
        return groups.flatten(1)

    def take(self, rows: Tensor) -> PackedWeight:
        """Those rows, as they are."""
        return PackedWeight(*(part[rows] for part in self.parts()))

    def parts(self) -> list[Tensor]:
        """Codes, scales and, if there are any, mins."""
        return [self.codes, self.scales] + ([] if self.mins is None else [self.mins])

    @property
    def four_bits(self) -> bool:
        return self.codes.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.scales.shape[1] * GROUP))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.parts())

    def __len__(self) -> int:
        return len(self.codes)

    def numel(self) -> int:
        return self.shape.numel()

    def _format(self) -> tuple[object, ...]:
        return self.codes.dtype, self.scales.dtype, self.mins is None or self.mins.dtype

    def _widest(self) -> PackedWeight:
        """Eight bits, with mins, in fp32: the same weights."""
        codes = self.codes
        if self.four_bits:
            halves = codes.unflatten(1, (-1, GROUP // 2))
            codes = torch.cat([halves & 15, halves >> 4], 2).flatten(1).to(torch.int8)
        scales = self.scales.float()
        return PackedWeight(
            codes, scales, torch.zeros_like(scales) if self.mins is None else self.mins.float()
        )
