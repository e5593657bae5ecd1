"""Linear layers on the CPU: which product is fastest for how many rows.

Owns: the choice, and the table it rests on. Must not know: the model, or what the rows are.

All 121 linear layers of SmolLM2 in fp32 (538 MB), ms, torch 2.13 (MKL), 2 threads, Zen 4, medians of 7:

    rows               1     2     3     4     6     8    12    16    24    32    64
    F.linear        45.9  90.7 113.2  72.9  68.0  63.5  70.5  76.2 106.6 127.6 184.7
    (W @ x.T).T     46.0  29.1  38.0  38.2  49.3  51.6  84.5  68.6  95.4  94.6 139.2

One row alone takes a matrix-vector path that uses one thread; a second row of zeros avoids it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_FEW = 8  # rows: up to here the transposed product wins clearly; the padded single row too
_SOME = range(16, 129)  # and here by a little


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in], weight [out, in], bias [out] -> [n, out], contiguous. Equals F.linear up to rounding."""
    rows = len(x)
    if x.device.type != "cpu" or x.dtype != torch.float32 or not (rows <= _FEW or rows in _SOME):
        return F.linear(x, weight, bias)
    if rows == 1:
        x = F.pad(x, (0, 0, 0, 1))
    out = torch.mm(weight, x.T)[:, :rows].T.contiguous()
    return out if bias is None else out.add_(bias)
