"""The two products of attention for many queries: queries stand side by side in a register.

Owns: the blocks and the code they emit. Must not know: softmax, rows, tables of blocks. Imported only where
numba is.

As in simd_block.py a lane is one query of one head. A key's or a value's numbers are read one at a time and
multiplied with LANES queries at once; scores, maxima, sums and results stay in that order, so that nothing is
ever added up across a register. LINE queries are three registers, in memory LINE_ROOM apart.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import add_product, arrays_of, intrinsic, splat_value
from nano_oasis.kernels.simd_weights import _VEC, LANES, WIDE, load_floats

KEYS = 8 if WIDE else 4  # of a block of scores; elements of a value at a time
_REGISTERS = 3
LINE = _REGISTERS * LANES
LINE_ROOM = 48 if WIDE else 32  # whole vectors of sixteen
_I64 = ir.IntType(64)
_STEP = 4  # elements of a key at a time


def _zero_sums(b: Any) -> list[list[Any]]:
    zero = ir.Constant(_VEC, None)
    sums = [[cgutils.alloca_once_value(b, zero) for _ in range(_REGISTERS)] for _ in range(KEYS)]
    for total in (total for row in sums for total in row):
        b.store(zero, total)
    return sums


def _multiply(b: Any, numbers: list[Any], start: ir.Value, place: ir.Value, sums: list[list[Any]]) -> None:
    """sums[j] += the number at numbers[j] * the queries' numbers at start[place]."""
    values = [load_floats(b, start, b.add(place, _I64(i * LANES))) for i in range(_REGISTERS)]
    for number, row in zip(numbers, sums, strict=True):
        one = splat_value(b, b.load(number), LANES)
        for value, total in zip(values, row, strict=True):
            add_product(b, one, value, total)


def _store(b: Any, sums: list[list[Any]], start: ir.Value, first: ir.Value) -> None:
    """Rows first, first + 1 ... of an array whose rows are LINE_ROOM long."""
    for j, row in enumerate(sums):
        for i, total in enumerate(row):
            place = b.add(b.mul(b.add(first, _I64(j)), _I64(LINE_ROOM)), _I64(i * LANES))
            b.store(b.load(total), b.bitcast(b.gep(start, [place]), _VEC.as_pointer()), align=4)


def _token(b: Any, kv: Any, places: Any, i: ir.Value, h: ir.Value) -> ir.Value:
    """Where token places[i] of head h begins, in kv [N, B, H, D]."""
    heads, dim = (b.extract_value(kv.shape, i) for i in (2, 3))
    row = b.add(b.mul(b.load(b.gep(places.data, [i])), heads), h)
    return b.gep(kv.data, [b.mul(row, dim)])


@intrinsic
def score_keys(_: Any, k: Any, places: Any, at: Any, h: Any, q: Any, scores: Any) -> Any:
    """scores[at + j] = q . the key of token places[at + j], for KEYS j.

    Unchecked. k fp32 [N, B, H, D], a token's place int64, block * B + token; q fp32 [D, LINE_ROOM], scores
    fp32 [n, LINE_ROOM]; D a multiple of 4.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        k, places, at, h, q, scores = arrays_of(context, b, signature, args)
        keys = [_token(b, k, places, b.add(at, _I64(j)), h) for j in range(KEYS)]
        sums = _zero_sums(b)
        with cgutils.for_range_slice(b, _I64(0), b.extract_value(k.shape, 3), _I64(_STEP)) as (d, _):
            for i in range(_STEP):
                column = b.add(d, _I64(i))
                numbers = [b.gep(key, [column]) for key in keys]
                _multiply(b, numbers, q.data, b.mul(column, _I64(LINE_ROOM)), sums)
        _store(b, sums, scores.data, at)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(k, places, i64, i64, q, scores), emit


@intrinsic
def add_values(_: Any, v: Any, places: Any, count: Any, h: Any, w: Any, out: Any) -> Any:
    """out[d] += the sum of w[i] * v[places[i], h, d] over i < count, for all d.

    Unchecked. v and places as for score_keys, w fp32 [n, LINE_ROOM], out fp32 [D, LINE_ROOM]; D a multiple of
    KEYS.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        v, places, count, h, w, out = arrays_of(context, b, signature, args)
        with cgutils.for_range_slice(b, _I64(0), b.extract_value(v.shape, 3), _I64(KEYS)) as (d, _):
            sums = _zero_sums(b)
            with cgutils.for_range(b, count) as loop:
                start = b.gep(_token(b, v, places, loop.index, h), [d])
                numbers = [b.gep(start, [_I64(j)]) for j in range(KEYS)]
                _multiply(b, numbers, w.data, b.mul(loop.index, _I64(LINE_ROOM)), sums)
            for j, row in enumerate(sums):
                for i, total in enumerate(row):
                    place = b.add(b.mul(b.add(d, _I64(j)), _I64(LINE_ROOM)), _I64(i * LANES))
                    b.store(b.fadd(b.load(total), load_floats(b, out.data, place)), total)
            _store(b, sums, out.data, d)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(v, places, i64, i64, w, out), emit
