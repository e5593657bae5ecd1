"""Products for many rows of activations: their numbers stand side by side in a register.

Owns: the block, the code it emits, the layout of its activations. Must not know: linear layers, threads.
Imported only where numba is.

A dot product (simd_dots.py) ends in a sum over a register's lanes, which for hundreds of rows is a third
of the work. Here a lane is a row of activations: each weight is read as one number and multiplied with LANES
rows at once, and nothing is left to add up. The activations are turned for it first, the results turned back.
8 weights x 3 registers are 24 running sums of the 32 registers of AVX-512, 4 x 3 are 12 of 16 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import _shuffle, add_product, arrays_of, intrinsic, prefetch_at, splat_value
from nano_oasis.kernels.simd_dots import fetch as fetch_row
from nano_oasis.kernels.simd_weights import _VEC, LANES, WIDE, Weights, load_floats

BLOCK_OUT = 8 if WIDE else 4  # rows of weights
MOST_PANELS = 3  # registers of activations
_I64 = ir.IntType(64)
_STEP = 4  # columns
_LINE = 16  # float32 of a cache line


def make_block(panels: int, fetch: bool = False) -> Callable[..., Any]:
    """block(w, x, first, out, at): BLOCK_OUT rows of weights with so many panels of activations.

    out[LANES * first + i, at + j] = w[j] . row i of panels first, first + 1 ..., for those rows that out has.
    Unchecked. w fp32 [BLOCK_OUT, K], x fp32 [n, K, LANES] as turn_rows() makes it, out fp32 [R, O]; all
    contiguous, K a multiple of 16. fetch: the rows behind w are fetched meanwhile.
    """

    @intrinsic
    def block(_: Any, w: Any, x: Any, first: Any, out: Any, at: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, x, first, out, at = arrays_of(context, b, signature, args)
            width, (rows, outs) = b.extract_value(w.shape, 1), cgutils.unpack_tuple(b, out.shape, 2)
            weights = [b.gep(w.data, [b.mul(_I64(j), width)]) for j in range(BLOCK_OUT)]
            panel = b.mul(width, _I64(LANES))
            inputs = [b.gep(x.data, [b.mul(b.add(first, _I64(i)), panel)]) for i in range(panels)]
            zero = ir.Constant(_VEC, None)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in weights] for _ in inputs]
            for group in sums:
                for total in group:
                    b.store(zero, total)
            with cgutils.for_range_slice(b, _I64(0), width, _I64(_STEP)) as (k, _):
                if fetch:
                    _fetch_next(b, w.data, width, k)
                for i in range(_STEP):
                    column = b.add(k, _I64(i))
                    values = [load_floats(b, start, b.mul(column, _I64(LANES))) for start in inputs]
                    for j, start in enumerate(weights):
                        weight = splat_value(b, b.load(b.gep(start, [column])), LANES)
                        for value, group in zip(values, sums, strict=True):
                            add_product(b, weight, value, group[j])
            row = b.mul(first, _I64(LANES))
            for group in sums:
                for numbers in turned(b, [b.load(total) for total in group]):
                    with b.if_then(b.icmp_signed("<", row, rows)):
                        place = b.gep(out.data, [b.add(b.mul(row, outs), at)])
                        b.store(numbers, b.bitcast(place, numbers.type.as_pointer()), align=4)
                    row = b.add(row, _I64(1))
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(w, x, i64, out, i64), emit

    return block


def _fetch_next(b: Any, start: ir.Value, width: ir.Value, k: ir.Value) -> None:
    """Each step begins to read a part of the line that each of the next BLOCK_OUT rows has for 16 columns."""
    count = BLOCK_OUT * _STEP // _LINE
    first = b.mul(b.udiv(b.urem(k, _I64(_LINE)), _I64(_STEP)), _I64(count))
    for i in range(count):
        row = b.add(first, _I64(BLOCK_OUT + i))
        prefetch_at(b, b.gep(start, [b.add(b.mul(row, width), k)]))


def turned(b: Any, vectors: list[ir.Value]) -> list[ir.Value]:
    """n vectors of m lanes -> m vectors of n lanes; n <= m, powers of two."""
    count, lanes = len(vectors), vectors[0].type.count
    both = [
        [x for i in half for x in (i, lanes + i)] for half in (range(lanes // 2), range(lanes // 2, lanes))
    ]
    # Of a number's place in all vectors (its vector, its lane) the highest bit becomes the lowest, until the
    # vector's bits are all behind the lane's.
    for _ in range(count.bit_length() - 1):
        pairs = zip(vectors[: count // 2], vectors[count // 2 :], strict=True)
        vectors = [_shuffle(b, x, y, order) for x, y in pairs for order in both]
    parts = [list(range(at, at + count)) for at in range(0, lanes, count)]
    return [_shuffle(b, x, x, part) for x in vectors for part in parts]


@intrinsic
def turn_rows(_: Any, x: Any, out: Any, panel: Any) -> Any:
    """out[panel, k, i] = x[LANES * panel + i, k] for all k; behind the last row zeros.

    Unchecked. x fp32 [R, K], out fp32 [n, K, LANES]; contiguous, K a multiple of 16.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, out, panel = arrays_of(context, b, signature, args)
        rows, width = cgutils.unpack_tuple(b, x.shape, 2)
        first, starts, exists = b.mul(panel, _I64(LANES)), [], []
        for i in range(LANES):
            row = b.add(first, _I64(i))
            there = b.icmp_signed("<", row, rows)
            starts.append(b.gep(x.data, [b.mul(b.select(there, row, _I64(0)), width)]))
            exists.append(there)
        with cgutils.for_range_slice(b, _I64(0), width, _I64(LANES)) as (k, _):
            zero = ir.Constant(_VEC, None)
            loaded = [load_floats(b, start, k) for start in starts]
            kept = [b.select(there, value, zero) for there, value in zip(exists, loaded, strict=True)]
            base = b.add(b.mul(panel, width), k)
            for j, column in enumerate(turned(b, kept)):
                place = b.gep(out.data, [b.mul(b.add(base, _I64(j)), _I64(LANES))])
                b.store(column, b.bitcast(place, _VEC.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, out, types.int64), emit


@intrinsic
def decoded(_: Any, w: Any, scales: Any, mins: Any, o: Any, room: Any, again: Any) -> Any:
    """weights[o : o + BLOCK_OUT] as fp32 [BLOCK_OUT, K]: where they lie or, if that is another format, in
    room, an array of that shape; `again`: they are there already. w, scales, mins as for make_tile."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        *matrix, o, out, again = arrays_of(context, b, signature, args)
        weights = Weights(b, signature.args[:3], matrix)
        starts = [weights.row(b, b.add(o, _I64(j))) for j in range(BLOCK_OUT)]
        if weights.code == types.float32:
            out.data = starts[0][0]
            return out._getvalue()
        width = b.extract_value(out.shape, 1)
        with (
            b.if_then(b.not_(again)),
            cgutils.for_range_slice(b, _I64(0), width, _I64(weights.step)) as (k, _),
        ):
            for j, start in enumerate(starts):
                fetch_row(b, weights, start, k)
                for i, vector in enumerate(weights.load(b, start, k)):
                    to = b.gep(out.data, [b.add(b.add(k, _I64(i * LANES)), b.mul(_I64(j), width))])
                    b.store(vector, b.bitcast(to, _VEC.as_pointer()), align=4)
        return out._getvalue()

    return room(w, scales, mins, types.int64, room, types.boolean), emit
