"""Linear layers for a few rows, compiled for the CPU: each weight is read from memory once.

Owns: the split over threads and over tiles. Must not know: when it is the fastest choice (linear.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels.simd import jit
from nano_oasis.kernels.simd_dots import MOST_ROWS, TILE_OUT, make_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

SHARE_WEIGHTS = 1 << 15  # of which a share has no less: 128 KiB of fp32
_NO_SCALES = np.empty(0, np.float32)
_tile1, _tile2, _tile3, _tile4, _tile5 = (make_tile(n) for n in range(1, 6))
_tile_most, _tile_again = make_tile(MOST_ROWS), make_tile(MOST_ROWS, fetch=False)


def supports(x: Tensor, weight: Tensor) -> bool:
    """fp32 on the CPU, weights without gaps that whole tiles cover; these may be int8."""
    fp32 = x.dtype == torch.float32 and weight.dtype in (torch.float32, torch.int8)
    out, width = weight.shape
    whole = weight.is_contiguous() and width % 16 == 0 and out % TILE_OUT == 0
    return fp32 and whole and x.device.type == "cpu"


def linear_rows(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """x fp32 [R, K], weight fp32 [O, K] -> fp32 [R, O] = x @ weight.T; see supports().

    weight int8: each of its rows is multiplied with its scale, fp32 [O]."""
    out = np.empty((len(x), len(weight)), np.float32)
    w, rows = weight.detach().numpy(), x.detach().contiguous().numpy()
    each = _NO_SCALES if scales is None else scales.numpy()
    shares = max(1, min(4 * torch.get_num_threads(), w.size // SHARE_WEIGHTS))
    run_shares(_linear, shares, w, each, rows, out)
    return torch.from_numpy(out)


@jit
def _linear(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_share, args), place(args), shares)
    finish(box)


@jit
def _share(share, shares, w, scales, x, out):  # type: ignore[no-untyped-def]
    """A share of the weights with all rows: a tile's weights stay in the first-level cache."""
    tiles = len(w) // TILE_OUT
    for tile in range(tiles * share // shares, tiles * (share + 1) // shares):
        o, r = tile * TILE_OUT, 0
        while len(x) - r >= MOST_ROWS:
            if r == 0:
                _tile_most(w, scales, o, x, r, out)
            else:
                _tile_again(w, scales, o, x, r, out)
            r += MOST_ROWS
        left = len(x) - r
        if left == 1:
            _tile1(w, scales, o, x, r, out)
        elif left == 2:
            _tile2(w, scales, o, x, r, out)
        elif left == 3:
            _tile3(w, scales, o, x, r, out)
        elif left == 4:
            _tile4(w, scales, o, x, r, out)
        elif left == 5:
            _tile5(w, scales, o, x, r, out)
