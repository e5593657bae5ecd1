"""Linear layers compiled for the CPU: each weight is read from memory once, in the format it is stored in.

Owns: the split over threads and over tiles. Must not know: when it is the fastest choice (linear.py).
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import simd_tiles
from nano_oasis.kernels.packed_weight import PackedWeight
from nano_oasis.kernels.simd import jit
from nano_oasis.kernels.simd_block import BLOCK_OUT, MOST_PANELS, decoded, make_block, turn_rows
from nano_oasis.kernels.simd_dots import MOST_ROWS, TILE_OUT, make_tile
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.simd_tiles import (
    DEPTH,
    SIDE,
    close_tiles,
    make_product,
    open_tiles,
    split_rows,
    split_weights,
)
from nano_oasis.kernels.simd_weights import LANES
from nano_oasis.kernels.workers import run_shares

FEW_ROWS = 2 * MOST_ROWS  # of activations: up to here dot products win
SHARE_BYTES = 1 << 16  # of weights: a share has no less
# Rows of decoded weights that meet all activations before the next ones do: so many that activations need not
# come from memory often, and so few that they and the activations at work fit the second-level cache.
MOST_ROOM, ROOM_BYTES = 32, 1 << 19
_NONE = np.empty(0, np.float32)
_tile1, _tile2, _tile3, _tile4, _tile5, _tile6, _tile8, _tile12 = (
    make_tile(n) for n in (1, 2, 3, 4, 5, 6, 8, 12)
)
_block1, _block2, _block3 = (make_block(n) for n in (1, 2, 3))
_fetch2, _fetch3 = make_block(2, fetch=True), make_block(3, fetch=True)
_kept = threading.local()
_BITS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}


def supports(x: Tensor, weight: Tensor | PackedWeight) -> bool:
    """fp32 activations and weights of any stored format on the CPU, without gaps, that whole tiles cover."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    out, width = weight.shape
    if isinstance(weight, PackedWeight):
        return out % BLOCK_OUT == 0 and all(part.is_contiguous() for part in weight.parts())
    known = weight.dtype == torch.float32 or weight.dtype in _BITS
    return known and weight.is_contiguous() and width % 16 == 0 and out % BLOCK_OUT == 0


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


def linear_rows(x: Tensor, weight: Tensor | PackedWeight, tiles: bool = False) -> Tensor:
    """x fp32 [R, K], weight [O, K] -> fp32 [R, O] = x @ weight.T; see supports().

    A row's result does not depend on the others, but on whether there are more than FEW_ROWS. tiles: these
    may be multiplied as simd_tiles.py does, if it is allowed().
    """
    rows, matrix = x.detach().contiguous().numpy(), arrays_of(weight)
    out = np.empty((len(x), weight.shape[0]), np.float32)
    most = most_shares()
    run_shares(_linear, most, *matrix, rows, out, scratch(most, len(x), x.shape[1]), tiles)
    return torch.from_numpy(out)


def most_shares() -> int:
    return 4 * torch.get_num_threads()


def scratch(shares: int, rows: int, width: int) -> np.ndarray:
    """Room for turned activations and each share's decoded weights, of that width or less; float32, the same
    for this thread's next call."""
    size = 0 if rows <= FEW_ROWS else -(-rows // LANES) * LANES * width + shares * _room_size(width)
    room: np.ndarray = getattr(_kept, "room", _NONE)
    if len(room) < size:
        room = _kept.room = np.empty(size, np.float32)
    return room


@jit
def _room_size(width):  # type: ignore[no-untyped-def]
    """float32 that hold a share's decoded weights; never less for a larger width."""
    return max(min(MOST_ROOM * width, max(ROOM_BYTES // 4, BLOCK_OUT * width)), 2 * SIDE * width)


@jit
def multiply(box, most, w, scales, mins, x, out, scratch, tiles):  # type: ignore[no-untyped-def]
    """out = x @ weights.T on all threads, in `most` shares at most, scratch() for that many. tiles: as
    for linear_rows; code on disk may be from a process that was allowed to."""
    shares = max(min(most, w.size * w.itemsize // SHARE_BYTES), 1)
    if len(x) <= FEW_ROWS:
        few = (w, scales, mins, x, out)
        begin(box, entry(_dots_share, few), place(few), shares)
        finish(box)
        return
    width = x.shape[1]
    panels = (len(x) + LANES - 1) // LANES
    turned = scratch[: panels * width * LANES].reshape((panels, width, LANES))
    room = _room_size(width)
    rooms = scratch[turned.size : turned.size + shares * room].reshape((shares, room))
    if tiles and width % DEPTH == 0 and len(w) % SIDE == 0:
        # Two bfloat16 take the room of one float32.
        halves = turned.reshape(-1).view(np.int32).reshape((2, panels, width // 2, SIDE))
        parts = rooms.view(np.int16)
        both_parts = (x, halves)
        begin(box, entry(_split_share, both_parts), place(both_parts), min(panels, most))
        finish(box)
        many_parts = (w, scales, mins, halves, out, parts)
        begin(box, entry(_tiles_share, many_parts), place(many_parts), shares)
        finish(box)
        return
    both = (x, turned)
    begin(box, entry(_turn_share, both), place(both), min(panels, most))
    finish(box)
    many = (w, scales, mins, turned, out, rooms)
    begin(box, entry(_blocks_share, many), place(many), shares)
    finish(box)


@jit
def _linear(box, most, args):  # type: ignore[no-untyped-def]
    w, scales, mins, x, out, scratch, tiles = args
    multiply(box, most, w, scales, mins, x, out, scratch, tiles)


# --- a share of the weights with all rows ---------------------------------------------------------------
@jit
def _dots_share(share, shares, w, scales, mins, x, out):  # type: ignore[no-untyped-def]
    tiles = len(w) // TILE_OUT
    for tile in range(tiles * share // shares, tiles * (share + 1) // shares):
        _dots(w, scales, mins, tile * TILE_OUT, x, out)


@jit
def _dots(w, scales, mins, o, x, out):  # type: ignore[no-untyped-def]
    """Two rows of weights, decoded in registers once for up to MOST_ROWS."""
    r = 0
    while r < len(x):
        left = min(len(x) - r, MOST_ROWS)
        if left >= 12:
            _tile12(w, scales, mins, o, x, r, out)
            r += 12
        elif left >= 8:
            _tile8(w, scales, mins, o, x, r, out)
            r += 8
        elif left >= 6:
            _tile6(w, scales, mins, o, x, r, out)
            r += 6
        elif left == 5:
            _tile5(w, scales, mins, o, x, r, out)
            r += 5
        elif left == 4:
            _tile4(w, scales, mins, o, x, r, out)
            r += 4
        elif left == 3:
            _tile3(w, scales, mins, o, x, r, out)
            r += 3
        elif left == 2:
            _tile2(w, scales, mins, o, x, r, out)
            r += 2
        else:
            _tile1(w, scales, mins, o, x, r, out)
            r += 1


@jit
def _turn_share(share, shares, x, turned):  # type: ignore[no-untyped-def]
    for panel in range(len(turned) * share // shares, len(turned) * (share + 1) // shares):
        turn_rows(x, turned, panel)


@jit
def _blocks_share(share, shares, w, scales, mins, turned, out, rooms):  # type: ignore[no-untyped-def]
    """As many weights as fit the second-level cache with all rows, MOST_PANELS of them at a time."""
    blocks, plain, width = len(w) // BLOCK_OUT, w.itemsize == 4, turned.shape[1]
    held = BLOCK_OUT  # rows of weights
    if len(turned) > MOST_PANELS:  # they are needed again
        held *= rooms.shape[1] // (BLOCK_OUT * width)
    room = rooms[share][: held * width].reshape((held, width))
    first, last = blocks * share // shares * BLOCK_OUT, blocks * (share + 1) // shares * BLOCK_OUT
    for low in range(first, last, held):
        panel = 0
        while panel < len(turned):
            left = len(turned) - panel
            count = 2 if left == 4 else min(left, MOST_PANELS)
            for o in range(low, min(low + held, last), BLOCK_OUT):
                rows = decoded(w, scales, mins, o, room[o - low : o - low + BLOCK_OUT], panel > 0)
                if plain and panel == 0 and count == 3:
                    _fetch3(rows, turned, panel, out, o)
                elif plain and panel == 0:
                    _fetch2(rows, turned, panel, out, o)
                elif count == 3:
                    _block3(rows, turned, panel, out, o)
                elif count == 2:
                    _block2(rows, turned, panel, out, o)
                else:
                    _block1(rows, turned, panel, out, o)
            panel += count


# --- the same on the matrix unit --------------------------------------------------------------------------
if simd_tiles.COMPILED:
    _product11, _product12, _product21, _product22 = (make_product(a, b) for a in (1, 2) for b in (1, 2))

    @jit
    def _split_share(share, shares, x, halves):  # type: ignore[no-untyped-def]
        panels = halves.shape[1]
        for panel in range(panels * share // shares, panels * (share + 1) // shares):
            split_rows(x, panel, halves)

    @jit
    def _tiles_share(share, shares, w, scales, mins, halves, out, rooms):  # type: ignore[no-untyped-def]
        """Two tiles of weights at a time with all rows, two panels of them at a time."""
        blocks, panels, width = len(w) // SIDE, halves.shape[1], 2 * halves.shape[2]
        last = blocks * (share + 1) // shares
        open_tiles()
        for block in range(blocks * share // shares, last, 2):
            o, two = block * SIDE, block + 1 < last
            count = 2 * SIDE if two else SIDE
            parts = rooms[share][: 2 * count * width].reshape((2, count, width))
            split_weights(w, scales, mins, o, count, parts)
            for panel in range(0, panels - 1, 2):
                if two:
                    _product22(parts, halves, panel, out, o)
                else:
                    _product12(parts, halves, panel, out, o)
            if panels % 2 and two:
                _product21(parts, halves, panels - 1, out, o)
            elif panels % 2:
                _product11(parts, halves, panels - 1, out, o)
        close_tiles()

else:  # never called

    @jit
    def _split_share(share, shares, x, halves):  # type: ignore[no-untyped-def]
        pass

    @jit
    def _tiles_share(share, shares, w, scales, mins, halves, out, rooms):  # type: ignore[no-untyped-def]
        pass
