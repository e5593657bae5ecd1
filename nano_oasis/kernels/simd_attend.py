"""The two products of attention as tiles: a few query heads against tokens of one block, kept in registers.

Owns: the tiles and the code they emit. Must not know: softmax, rows, tables. Imported only where numba is.

The query heads that share a KV head use each key and value as it is loaded, once. A tile's running sums fit
the CPU's registers, and are enough of them to keep its units for products busy: one that waits for its own
last sum would take four times as long. Addresses are computed here, from whole arrays and indices: taking
slices apart in the compiled functions costs more than the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import _F32, _four, add_product, arrays_of, intrinsic, prefetch_at, splat_value
from nano_oasis.kernels.simd_weights import LANES, WIDE, load_floats

TOKENS = 4  # of a tile of scores
MOST_HEADS = 4
_LINE = 16  # float32 of a cache line; D is a multiple of it
_I64, _VEC = ir.IntType(64), ir.VectorType(_F32, LANES)


def _token(b: Any, kv: Any, block: ir.Value, t: ir.Value, h: ir.Value) -> ir.Value:
    """Where kv[block, t, h] begins, kv [N, B, H, D]."""
    size, heads, dim = (b.extract_value(kv.shape, i) for i in (1, 2, 3))
    place = b.add(b.mul(b.add(b.mul(block, size), t), heads), h)
    return b.gep(kv.data, [b.mul(place, dim)])


def make_score_tile(heads: int) -> Callable[..., Any]:
    """tile(q, g, k, block, ahead, t, last, h, scores, at) scores 4 tokens with `heads` queries.

    scores[g + i, at + j] = q[g + i] . k[block, t + j, h] for i < heads, j < 4; a token past `last` is the
    last one again. The same tokens of block `ahead` are fetched. q fp32 [Hq, D], k fp32 [N, B, H, D], scores
    fp32 [Hq, W]; D a multiple of 16.
    """

    @intrinsic
    def tile(
        _: Any,
        q: Any,
        g: Any,
        k: Any,
        block: Any,
        ahead: Any,
        t: Any,
        last: Any,
        h: Any,
        scores: Any,
        at: Any,
    ) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, g, k, block, ahead, t, last, h, scores, at = arrays_of(context, b, signature, args)
            dim, width = b.extract_value(k.shape, 3), b.extract_value(scores.shape, 1)
            tokens = [b.add(t, _I64(j)) for j in range(TOKENS)]
            tokens = [b.select(b.icmp_signed("<", x, last), x, last) for x in tokens]
            keys, then = ([_token(b, k, which, x, h) for x in tokens] for which in (block, ahead))
            queries = [b.gep(q.data, [b.mul(b.add(g, _I64(i)), dim)]) for i in range(heads)]
            zero = ir.Constant(_VEC, None)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in keys] for _ in queries]
            for total in (total for row in sums for total in row):
                b.store(zero, total)
            with cgutils.for_range_slice(b, _I64(0), dim, _I64(_LINE)) as (line, _):
                for x in then:
                    prefetch_at(b, b.gep(x, [line]))
                for part in range(0, _LINE, LANES):
                    d = b.add(line, _I64(part))
                    asked = [load_floats(b, x, d) for x in queries]
                    for j, start in enumerate(keys):
                        key = load_floats(b, start, d)
                        for query, row in zip(asked, sums, strict=True):
                            add_product(b, key, query, row[j])
            for i, row in enumerate(sums):
                four = _four(b, [b.load(total) for total in row], b.fadd)
                place = b.gep(scores.data, [b.add(b.mul(b.add(g, _I64(i)), width), at)])
                b.store(four, b.bitcast(place, four.type.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(q, i64, k, i64, i64, i64, i64, i64, scores, i64), emit

    return tile


def make_value_tile(heads: int) -> Callable[..., Any]:
    """tile(weights, g, at, v, block, ahead, begin, end, h, acc) adds up a block's values for `heads` queries.

    acc[g + i] += the sum of weights[g + i, at + j] * v[block, begin + j, h] until token `end`, for i < heads.
    The same tokens of block `ahead` are fetched. weights fp32 [Hq, W], v fp32 [N, B, H, D], acc fp32 [Hq, D];
    D a multiple of 16.
    """
    wide = LANES * (4 if WIDE or heads < MOST_HEADS else 2)  # elements that are added up at once

    @intrinsic
    def tile(
        _: Any, weights: Any, g: Any, at: Any, v: Any, block: Any, ahead: Any, begin: Any, end: Any, h: Any,
        acc: Any,
    ) -> Any:  # fmt: skip
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            weights, g, at, v, block, ahead, begin, end, h, acc = arrays_of(context, b, signature, args)
            heads_in_all, dim = (b.extract_value(v.shape, i) for i in (2, 3))
            stride, width = b.mul(heads_in_all, dim), b.extract_value(weights.shape, 1)
            values, then = (_token(b, v, which, begin, h) for which in (block, ahead))
            rows = [b.gep(acc.data, [b.mul(b.add(g, _I64(i)), dim)]) for i in range(heads)]
            shares = [b.gep(weights.data, [b.add(b.mul(b.add(g, _I64(i)), width), at)]) for i in range(heads)]
            count = b.sub(end, begin)

            def columns(first: ir.Value, stop: ir.Value, width: int) -> None:
                """Elements [first, stop), so many at a time."""
                places = range(0, width, LANES)
                sums = [[cgutils.alloca_once(b, _VEC) for _ in places] for _ in rows]
                with cgutils.for_range_slice(b, first, stop, _I64(width)) as (d, _):
                    for row, totals in zip(rows, sums, strict=True):
                        for part, total in zip(places, totals, strict=True):
                            b.store(load_floats(b, row, b.add(d, _I64(part))), total)
                    with cgutils.for_range(b, count) as loop:
                        offset = b.add(b.mul(loop.index, stride), d)
                        for line in range(0, width, _LINE):
                            prefetch_at(b, b.gep(then, [b.add(offset, _I64(line))]))
                        loaded = [load_floats(b, values, b.add(offset, _I64(part))) for part in places]
                        for share, totals in zip(shares, sums, strict=True):
                            weight = splat_value(b, b.load(b.gep(share, [loop.index])), LANES)
                            for value, total in zip(loaded, totals, strict=True):
                                add_product(b, weight, value, total)
                    for row, totals in zip(rows, sums, strict=True):
                        for part, total in zip(places, totals, strict=True):
                            at = b.bitcast(b.gep(row, [b.add(d, _I64(part))]), _VEC.as_pointer())
                            b.store(b.load(total), at, align=4)

            whole = b.mul(b.sdiv(dim, _I64(wide)), _I64(wide))
            columns(_I64(0), whole, wide)
            if wide > _LINE:
                columns(whole, dim, _LINE)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(weights, i64, i64, v, i64, i64, i64, i64, i64, acc), emit

    return tile
