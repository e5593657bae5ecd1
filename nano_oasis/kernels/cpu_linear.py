"""Linear layers for a few rows, compiled for the CPU: each weight is read from memory once.

Owns: the split over threads and over tiles. Must not know: when it is the fastest choice (linear.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels.simd import LANES, jit
from nano_oasis.kernels.simd_dots import MOST_ROWS, TILE_OUT, make_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

SHARE_WEIGHTS = 1 << 15  # of which a share has no less: 128 KiB
_tile1, _tile2, _tile3, _tile4, _tile5 = (make_tile(n) for n in range(1, 6))
_tile_most, _tile_again = make_tile(MOST_ROWS), make_tile(MOST_ROWS, fetch=False)


def supports(x: Tensor, weight: Tensor) -> bool:
    """fp32 on the CPU, weights without gaps that whole tiles cover."""
    fp32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    out, width = weight.shape
    return fp32 and weight.is_contiguous() and width % LANES == 0 and out % TILE_OUT == 0


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x fp32 [R, K], weight fp32 [O, K] -> fp32 [R, O] = x @ weight.T; see supports()."""
    out = np.empty((len(x), len(weight)), np.float32)
    w, rows = weight.detach().numpy(), x.detach().contiguous().numpy()
    shares = max(1, min(4 * torch.get_num_threads(), w.size // SHARE_WEIGHTS))
    run_shares(_linear, shares, w, rows, out)
    return torch.from_numpy(out)


@jit
def _linear(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(_share, args), place(args), shares)
    finish(box)


@jit
def _share(share, shares, w, x, out):  # type: ignore[no-untyped-def]
    """A share of the weights with all rows: a tile's weights stay in the first-level cache."""
    tiles = len(w) // TILE_OUT
    for tile in range(tiles * share // shares, tiles * (share + 1) // shares):
        o, r = tile * TILE_OUT, 0
        while len(x) - r >= MOST_ROWS:
            if r == 0:
                _tile_most(w, o, x, r, out)
            else:
                _tile_again(w, o, x, r, out)
            r += MOST_ROWS
        left = len(x) - r
        if left == 1:
            _tile1(w, o, x, r, out)
        elif left == 2:
            _tile2(w, o, x, r, out)
        elif left == 3:
            _tile3(w, o, x, r, out)
        elif left == 4:
            _tile4(w, o, x, r, out)
        elif left == 5:
            _tile5(w, o, x, r, out)
