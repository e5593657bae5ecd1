"""Dot products as tiles: two rows of weights times several rows of activations, kept in registers.

Owns: the tile and the code it emits. Must not know: linear layers, threads. Imported only where numba is.

A tile of 2 x n holds 2n running sums: 24 of the 32 registers of AVX-512 for n = 12, 12 of 16 elsewhere for
n = 6. Each step decodes a few weights of both rows and multiplies them with every row of activations, so that
a weight is read and decoded once for up to n rows. With four rows of weights and half as many activations
there are as many sums, but the weights are decoded twice as often: 8 rows of int8 took a third longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import _four, _shuffle, add_product, arrays_of, intrinsic, prefetch_at
from nano_oasis.kernels.simd_weights import _VEC, LANES, WIDE, Weights, load_floats

TILE_OUT = 2  # rows of weights
MOST_ROWS = 12 if WIDE else 6  # rows of activations
AHEAD = 1 << 14  # bytes of weights that are fetched meanwhile
_I64, _BYTE = ir.IntType(64), ir.IntType(8).as_pointer()


def make_tile(rows: int) -> Callable[..., Any]:
    """tile(w, scales, mins, o, x, r, out): two rows of weights from o with `rows` of activations from r.

    out[r + i, o + j] = x[r + i] . weights[o + j]. Unchecked. w, scales, mins as in simd_weights.py (those
    not used: empty, 1-D), x fp32 [R, K], out fp32 [R, O]; all contiguous, K a multiple of 16, of packed
    weights of 32.
    """

    @intrinsic
    def tile(_: Any, w: Any, scales: Any, mins: Any, o: Any, x: Any, r: Any, out: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            *matrix, o, x, r, out = arrays_of(context, b, signature, args)
            weights = Weights(b, signature.args[:3], matrix)
            width, outs = (b.extract_value(array.shape, 1) for array in (x, out))
            starts = [weights.row(b, b.add(o, _I64(j))) for j in range(TILE_OUT)]
            inputs = [b.gep(x.data, [b.mul(b.add(r, _I64(i)), width)]) for i in range(rows)]
            zero = ir.Constant(_VEC, None)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in starts] for _ in inputs]
            for row in sums:
                for total in row:
                    b.store(zero, total)
            with cgutils.for_range_slice(b, _I64(0), width, _I64(weights.step)) as (k, _):
                for start in starts:
                    fetch(b, weights, start, k)
                decoded = zip(*(weights.load(b, start, k) for start in starts), strict=True)
                for i, vectors in enumerate(decoded):
                    place = b.add(k, _I64(i * LANES))
                    for start, row in zip(inputs, sums, strict=True):
                        value = load_floats(b, start, place)
                        for vector, total in zip(vectors, row, strict=True):
                            add_product(b, vector, value, total)
            for i in range(0, rows, 2):
                pair = sums[i : i + 2]
                four = _four(b, [b.load(total) for row in (pair * 2)[:2] for total in row], b.fadd)
                for j in range(len(pair)):
                    two = _shuffle(b, four, four, [TILE_OUT * j, TILE_OUT * j + 1])
                    place = b.gep(out.data, [b.add(b.mul(b.add(r, _I64(i + j)), outs), o)])
                    b.store(two, b.bitcast(place, two.type.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(w, scales, mins, i64, x, i64, out), emit

    return tile


def fetch(b: Any, weights: Weights, start: Any, k: ir.Value) -> None:
    """Begin to read what lies AHEAD of column k of that row."""
    prefetch_at(b, b.gep(b.bitcast(weights.fetch(b, start, k), _BYTE), [_I64(AHEAD)]))
