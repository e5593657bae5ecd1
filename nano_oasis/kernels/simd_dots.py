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

from nano_oasis.kernels.simd import (
    _F32,
    _four,
    add_product,
    arrays_of,
    features,
    intrinsic,
    prefetch_at,
)

TILE_OUT = 4  # rows of weights
WIDE = "avx512f" in features()
LANES = 16 if WIDE else 8  # of one register
MOST_ROWS = 6 if WIDE else 3  # rows of activations
AHEAD = 8  # rows of weights, counted from the first of the tile, that are fetched meanwhile
_I64, _VEC = ir.IntType(64), ir.VectorType(_F32, LANES)


def make_tile(rows: int, fetch: bool = True) -> Callable[..., Any]:
    """tile(w, scales, o, x, r, out): out[r + i, o + j] = x[r + i] . w[o + j], i < rows, j < 4. Unchecked.

    w fp32 [O, K], or int8, and then the sum is multiplied with scales[o + j] (fp32 [O]; else not looked at);
    x fp32 [R, K], out fp32 [R, O]; all contiguous, K a multiple of 16. fetch: the rows of w that the tile
    after the next needs are fetched meanwhile.
    """

    @intrinsic
    def tile(_: Any, w: Any, scales: Any, o: Any, x: Any, r: Any, out: Any) -> Any:
        coded = w.dtype == types.int8

        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, scales, o, x, r, out = arrays_of(context, b, signature, args)
            width = b.extract_value(w.shape, 1)
            outs = b.extract_value(out.shape, 1)
            weights = [b.gep(w.data, [b.mul(b.add(o, _I64(j)), width)]) for j in range(TILE_OUT)]
            ahead = [b.gep(w.data, [b.mul(b.add(o, _I64(j + AHEAD)), width)]) for j in range(TILE_OUT)]
            inputs = [b.gep(x.data, [b.mul(b.add(r, _I64(i)), width)]) for i in range(rows)]
            zero = ir.Constant(_VEC, None)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in weights] for _ in inputs]
            for row in sums:
                for total in row:
                    b.store(zero, total)
            with cgutils.for_range_slice(b, _I64(0), width, _I64(LANES)) as (k, _):
                for p in ahead if fetch else ():
                    prefetch_at(b, b.gep(p, [k]))
                loaded = [_load(b, p, k) for p in inputs]
                for j, p in enumerate(weights):
                    weight = _codes(b, p, k) if coded else _load(b, p, k)
                    for value, row in zip(loaded, sums, strict=True):
                        add_product(b, weight, value, row[j])
            for i, row in enumerate(sums):
                four = _four(b, [b.load(total) for total in row], b.fadd)
                if coded:
                    each = b.bitcast(b.gep(scales.data, [o]), four.type.as_pointer())
                    four = b.fmul(four, b.load(each, align=4))
                at = b.gep(out.data, [b.add(b.mul(b.add(r, _I64(i)), outs), o)])
                b.store(four, b.bitcast(at, four.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(w, scales, types.int64, x, types.int64, out), emit

    return tile


def _codes(b: Any, start: ir.Value, k: ir.Value) -> ir.Value:
    """A vector of int8 as fp32."""
    narrow, wide = (ir.VectorType(ir.IntType(bits), LANES) for bits in (8, 32))
    codes = b.load(b.bitcast(b.gep(start, [k]), narrow.as_pointer()), align=1)
    return b.sitofp(b.sext(codes, wide), _VEC)


def _load(b: Any, start: ir.Value, k: ir.Value) -> ir.Value:
    return b.load(b.bitcast(b.gep(start, [k]), _VEC.as_pointer()), align=4)
