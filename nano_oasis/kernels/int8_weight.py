"""Weights of a linear layer in eight bits, with one scale for each row.

Owns: the encoding and its inverse. Must not know: products (linear.py), which layers are encoded.

Symmetric, per output channel, weights only: activations stay fp32. A row's largest weight becomes 127, so
each weight is off by at most half a step of that size. docs/04-weights.md has what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 127


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """codes int8 [out, in], scales fp32 [out]: weight[o, i] = codes[o, i] * scales[o]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """weight fp32 [out, in]. A row of zeros stays one."""
        scales = weight.abs().amax(1) / _MOST
        steps = torch.where(scales > 0, scales, torch.ones_like(scales))
        return cls((weight / steps[:, None]).round().to(torch.int8), scales)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Those rows as fp32 [n, in]."""
        return self.codes[rows].float() * self.scales[rows, None]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.codes.numel()
