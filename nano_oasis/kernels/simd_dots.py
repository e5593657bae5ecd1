"""Dot products as tiles: several rows of weights times several rows of activations, kept in registers.

Owns: the tile and the code it emits. Must not know: linear layers, threads. Imported only where numba is.

A tile of 4 x n holds 4n running sums: 24 of the 32 registers of AVX-512 for n = 6, 12 of 16 elsewhere for
n = 3. Each step loads n vectors of activations and multiplies each vector of weights with them in turn, so
that a weight is read from memory once and the units for products are what limits. The other way round, four
of weights held and one of activations at a time, takes one register more than there are without AVX-512:
16 rows then took half as long again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import _four, add_product, arrays_of, intrinsic, prefetch_at
from nano_oasis.kernels.simd_weights import _VEC, LANES, WIDE, Weights, load_floats

TILE_OUT = 4  # rows of weights
MOST_ROWS = 6 if WIDE else 3  # rows of activations
AHEAD = 1 << 14  # bytes of weights that are fetched meanwhile
_I64, _BYTE = ir.IntType(64), ir.IntType(8).as_pointer()


def make_tile(rows: int, fetch: bool = True) -> Callable[..., Any]:
    """tile(w, scales, mins, o, x, r, out, at): four rows of weights from o with `rows` of activations from r.

    out[r + i, at + j] = x[r + i] . weights[o + j]. Unchecked. w, scales, mins as in simd_weights.py (those
    not used: empty, 1-D), x fp32 [R, K], out fp32 [R, O]; all contiguous, K a multiple of 16, of packed
    weights of 32. fetch: what lies AHEAD in w is fetched meanwhile.
    """

    @intrinsic
    def tile(_: Any, w: Any, scales: Any, mins: Any, o: Any, x: Any, r: Any, out: Any, at: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            *matrix, o, x, r, out, at = arrays_of(context, b, signature, args)
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
                places = [b.add(k, _I64(at)) for at in range(0, weights.step, LANES)]
                loaded = [[load_floats(b, p, place) for p in inputs] for place in places]
                for j, start in enumerate(starts):
                    if fetch:
                        _fetch(b, weights, start, k)
                    for vector, values in zip(weights.load(b, start, k), loaded, strict=True):
                        for value, row in zip(values, sums, strict=True):
                            add_product(b, vector, value, row[j])
            for i, row in enumerate(sums):
                four = _four(b, [b.load(total) for total in row], b.fadd)
                place = b.gep(out.data, [b.add(b.mul(b.add(r, _I64(i)), outs), at)])
                b.store(four, b.bitcast(place, four.type.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(w, scales, mins, i64, x, i64, out, i64), emit

    return tile


@intrinsic
def decoded(_: Any, w: Any, scales: Any, mins: Any, o: Any, scratch: Any) -> Any:
    """weights[o : o + 4] as fp32 [4, K]: in scratch, of that shape, or where they lie. See make_tile."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        *matrix, o, out = arrays_of(context, b, signature, args)
        weights, width = Weights(b, signature.args[:3], matrix), b.extract_value(out.shape, 1)
        starts = [weights.row(b, b.add(o, _I64(j))) for j in range(TILE_OUT)]
        if weights.code == types.float32:
            out.data = starts[0][0]
            return out._getvalue()
        with cgutils.for_range_slice(b, _I64(0), width, _I64(weights.step)) as (k, _):
            for j, start in enumerate(starts):
                _fetch(b, weights, start, k)
                for i, vector in enumerate(weights.load(b, start, k)):
                    to = b.gep(out.data, [b.add(b.add(k, _I64(i * LANES)), b.mul(_I64(j), width))])
                    b.store(vector, b.bitcast(to, _VEC.as_pointer()), align=4)
        return out._getvalue()

    return scratch(w, scales, mins, types.int64, scratch), emit


def _fetch(b: Any, weights: Weights, start: Any, k: ir.Value) -> None:
    prefetch_at(b, b.gep(b.bitcast(weights.fetch(b, start, k), _BYTE), [_I64(AHEAD)]))
