"""Linear layers: on the CPU which product is fastest for how many rows.

Owns: the choice; benchmarks/linear.py measures it. Must not know: the model, or what the rows are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nano_oasis.kernels.dispatch import numba_works
from nano_oasis.kernels.matrix import Matrix, rows_of
from nano_oasis.kernels.packed_weight import PackedWeight

# Rows, without the compiled product:
_FEW = 8  # up to here the transposed product wins clearly; the padded single row too
_SOME = range(16, 129)  # and here by a little
_DECODED = 512  # rows of weights that are fp32 at once


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in], weight [out, in], bias [out] -> [n, out], contiguous. Equals F.linear up to rounding.

    Weights may be in another format than x: they are decoded. Where the compiled product is used a row's
    result does not depend on the others, but on whether there are more than cpu_linear.FEW_ROWS.
    """
    rows = len(x)
    compiled = _compiled() if rows and x.device.type == "cpu" else None
    if compiled is not None and compiled.supports(x, weight):
        out: torch.Tensor = compiled.linear_rows(x, weight)
    elif isinstance(weight, PackedWeight) or weight.dtype != x.dtype:
        out = _decoded(x, weight)
    elif x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    elif rows <= _FEW or rows in _SOME:
        if rows == 1:
            x = F.pad(x, (0, 0, 0, 1))
        out = torch.mm(weight, x.T)[:, :rows].T.contiguous()
    else:
        return F.linear(x, weight, bias)
    return out if bias is None else out.add_(bias)


def _decoded(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """A part of the weights at a time, that stays cached."""
    out = x.new_empty(len(x), weight.shape[0])
    for low in range(0, weight.shape[0], _DECODED):
        part = slice(low, low + _DECODED)
        out[:, part] = F.linear(x, rows_of(weight, part, x.dtype))
    return out


def _compiled() -> Any:
    if not numba_works():
        return None
    from nano_oasis.kernels import cpu_linear

    return cpu_linear
