"""Linear layers: on the CPU which product is fastest for how many rows.

Owns: the choice, and the table it rests on. Must not know: the model, or what the rows are.

All 121 linear layers of SmolLM2 in fp32 (538 MB), ms, torch 2.13 (MKL), 2 threads, shared Xeon with AVX-512,
2026-11-30, `python benchmarks/linear.py`, the best of three runs of each; the floor of the bytes is 27 ms:

    rows               1     2     3     4     6     8    12    16    24    32    64
    F.linear        28.1  32.6  37.3  55.7  63.8  72.7  86.4  53.3  68.1  75.0 107.0
    (W @ x.T).T     25.6  61.6  65.3  63.8  62.1  63.9  62.4  68.3  80.9 101.1 139.2
    compiled        30.5  28.2  29.4  28.8  30.6  31.3  37.1  46.6  60.6  69.0 137.6

One row alone takes a matrix-vector path of torch's that uses one thread; a second row of zeros avoids it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nano_oasis.kernels.dispatch import numba_works
from nano_oasis.kernels.int8_weight import Int8Weight

_COMPILED = 32  # rows: up to here the compiled product wins
_FEW = 8  # without it: up to here the transposed product wins clearly; the padded single row too
_SOME = range(16, 129)  # and here by a little
_DECODED = 512  # rows of int8 weights that are fp32 at once

Matrix = torch.Tensor | Int8Weight  # of a linear layer, [out, in]


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in], weight [out, in], bias [out] -> [n, out], contiguous. Equals F.linear up to rounding.

    Where the compiled product is used (up to 32 rows, numba) a row's result does not depend on the others.
    """
    rows = len(x)
    compiled = _compiled() if rows <= _COMPILED and x.device.type == "cpu" else None
    if isinstance(weight, Int8Weight):
        if compiled is not None and compiled.supports(x, weight.codes):
            out: torch.Tensor = compiled.linear_rows(x, weight.codes, weight.scales)
        else:
            out = _decoded(x, weight)
    elif x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    elif compiled is not None and compiled.supports(x, weight):
        out = compiled.linear_rows(x, weight)
    elif rows <= _FEW or rows in _SOME:
        if rows == 1:
            x = F.pad(x, (0, 0, 0, 1))
        out = torch.mm(weight, x.T)[:, :rows].T.contiguous()
    else:
        return F.linear(x, weight, bias)
    return out if bias is None else out.add_(bias)


def _decoded(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Many rows: the products cost more than decoding, a part of the weights at a time that stays cached."""
    out = x.new_empty(len(x), len(weight.codes))
    for low in range(0, len(weight.codes), _DECODED):
        part = slice(low, low + _DECODED)
        out[:, part] = F.linear(x, weight[part])
    return out


def _compiled() -> Any:
    if not numba_works():
        return None
    from nano_oasis.kernels import cpu_linear

    return cpu_linear
