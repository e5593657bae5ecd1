"""Linear layers compiled for the CPU: each weight is read from memory once, in the format it is stored in.

Owns: the split over threads and over tiles. Must not know: when it is the fastest choice (linear.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels.packed_weight import PackedWeight
from nano_oasis.kernels.simd import jit
from nano_oasis.kernels.simd_dots import MOST_ROWS, TILE_OUT, decoded, make_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.simd_weights import WIDE
from nano_oasis.kernels.workers import run_shares

SHARE_BYTES = 1 << 16  # of weights: a share has no less
ROWS_BYTES = (
    1 << 18
)  # of activations that all weights meet before the next: what the second-level cache holds
FEW_ROWS = 4 if WIDE else 2  # of activations: so many leave registers for decoding weights in
_NONE = np.empty(0, np.float32)
_tile1, _tile2, _tile3, _tile4, _tile5 = (make_tile(n) for n in range(1, 6))
_tile_most, _tile_again = make_tile(MOST_ROWS), make_tile(MOST_ROWS, fetch=False)
_BITS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}


def supports(x: Tensor, weight: Tensor | PackedWeight) -> bool:
    """fp32 activations and weights of any stored format on the CPU, without gaps, that whole tiles cover."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    out, width = weight.shape
    if isinstance(weight, PackedWeight):
        return out % TILE_OUT == 0 and all(part.is_contiguous() for part in weight.parts())
    known = weight.dtype == torch.float32 or weight.dtype in _BITS
    return known and weight.is_contiguous() and width % 16 == 0 and out % TILE_OUT == 0


def arrays_of(weight: Tensor | PackedWeight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, mins as simd_weights.py wants them."""
    if not isinstance(weight, PackedWeight):
        return _bits(weight), _NONE, _NONE
    return _bits(weight.codes), _bits(weight.scales), _NONE if weight.mins is None else _bits(weight.mins)


def _bits(tensor: Tensor) -> np.ndarray:
    """numba does not know the 16-bit floats: their bits."""
    tensor = tensor.detach()
    kind = _BITS.get(tensor.dtype)
    return (tensor if kind is None else tensor.view(kind)).numpy()


def linear_rows(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """x fp32 [R, K], weight [O, K] -> fp32 [R, O] = x @ weight.T; see supports()."""
    rows, matrix = x.detach().contiguous().numpy(), arrays_of(weight)
    out = np.empty((len(x), weight.shape[0]), np.float32)
    shares = num_shares(matrix[0].nbytes)
    run_shares(_linear, shares, *matrix, rows, out, scratch_for(shares, x.shape[1]))
    return torch.from_numpy(out)


def num_shares(nbytes: int) -> int:
    """For a matrix of so many bytes."""
    return max(1, min(4 * torch.get_num_threads(), nbytes // SHARE_BYTES))


def scratch_for(shares: int, width: int) -> np.ndarray:
    """Where a share decodes a tile's weights."""
    return np.empty((shares, TILE_OUT, width), np.float32)


@jit
def _linear(box, shares, args):  # type: ignore[no-untyped-def]
    begin(box, entry(linear_share, args), place(args), shares)
    finish(box)


@jit
def linear_share(share, shares, w, scales, mins, x, out, scratch):  # type: ignore[no-untyped-def]
    """A share of the weights with all rows: a tile's weights stay in the first-level cache."""
    tiles = len(w) // TILE_OUT
    first, last = tiles * share // shares, tiles * (share + 1) // shares
    if w.itemsize < 4 and len(x) <= 3 * FEW_ROWS:
        for tile in range(first, last):
            _few(w, scales, mins, x, out, tile * TILE_OUT)
        return
    most = max(ROWS_BYTES // (4 * x.shape[1]) // MOST_ROWS, 1) * MOST_ROWS
    for low in range(0, len(x), most):
        high = min(low + most, len(x))
        for tile in range(first, last):
            o = tile * TILE_OUT
            _rows(decoded(w, scales, mins, o, scratch[share]), x, low, high, out, o)


@jit
def _few(w, scales, mins, x, out, o):  # type: ignore[no-untyped-def]
    """All rows of x with four rows of weights that are decoded in registers, once for every few rows."""
    for r in range(0, len(x), FEW_ROWS):
        left = len(x) - r
        if left == 1:
            _tile1(w, scales, mins, o, x, r, out, o)
        elif left == 2 or FEW_ROWS == 2:
            _tile2(w, scales, mins, o, x, r, out, o)
        elif left == 3:
            _tile3(w, scales, mins, o, x, r, out, o)
        else:
            _tile4(w, scales, mins, o, x, r, out, o)


@jit
def _rows(w, x, low, high, out, at):  # type: ignore[no-untyped-def]
    """Rows [low, high) of x with fp32 weights [4, K]."""
    r = low
    while high - r >= MOST_ROWS:
        if r == low:
            _tile_most(w, _NONE, _NONE, 0, x, r, out, at)
        else:
            _tile_again(w, _NONE, _NONE, 0, x, r, out, at)
        r += MOST_ROWS
    left = high - r
    if left == 1:
        _tile1(w, _NONE, _NONE, 0, x, r, out, at)
    elif left == 2:
        _tile2(w, _NONE, _NONE, 0, x, r, out, at)
    elif left == 3:
        _tile3(w, _NONE, _NONE, 0, x, r, out, at)
    elif left == 4:
        _tile4(w, _NONE, _NONE, 0, x, r, out, at)
    elif left == 5:
        _tile5(w, _NONE, _NONE, 0, x, r, out, at)
