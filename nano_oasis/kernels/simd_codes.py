"""Logits of four-bit keys: sixteen tokens against a few queries of eight bits, in integers.

Owns: the tile and the code it emits for what the CPU has. Must not know: sketches' meaning, rows, tables.
Imported only where numba is.

Four channels of a token are multiplied and added in one instruction: products of 4 and 8 bits fit. Where the
CPU lacks that (VNNI: Intel since Ice Lake, AMD since Zen 4) AVX2's two instructions do; elsewhere LLVM writes
it out, which is slow and right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import (
    _FUSE,
    _I32,
    _IVEC,
    _VEC,
    LANES,
    arrays_of,
    features,
    intrinsic,
    prefetch_at,
    splat_value,
)

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_BYTES = ir.VectorType(_I8, 4 * LANES)
MOST_HEADS = 4  # query heads of a tile; twice as many sums are kept, and must stay in registers


def _dot4(b: Any, total: ir.Value, codes: ir.Value, query: ir.Value, has: Set[str]) -> ir.Value:
    """total [16] i32 + the products of each lane's four bytes: codes [64] u8 below 16, query [64] i8."""
    if "avx512vnni" in has and "avx512f" in has:
        kind = ir.FunctionType(_IVEC, [_IVEC] * 3)
        dot = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return b.call(dot, [total, b.bitcast(codes, _IVEC), b.bitcast(query, _IVEC)])
    if "avx2" in has:
        parts = [_dot4_avx2(b, codes, query, half) for half in (0, 32)]
        lanes = ir.Constant(_IVEC, list(range(LANES)))
        return b.add(total, b.shuffle_vector(*parts, lanes))
    wide = ir.VectorType(_I32, 4 * LANES)
    products = b.mul(b.zext(codes, wide), b.sext(query, wide))
    for j in range(4):
        every = ir.Constant(_IVEC, [4 * t + j for t in range(LANES)])
        total = b.add(total, b.shuffle_vector(products, products, every))
    return total


def _dot4_avx2(b: Any, codes: ir.Value, query: ir.Value, first: int) -> ir.Value:
    """Eight lanes of _dot4. Pairs of products fit 16 bits: 2 * 15 * 127."""
    i16x16, i32x8, i8x32 = (ir.VectorType(t, n) for t, n in ((_I16, 16), (_I32, 8), (_I8, 32)))
    half = ir.Constant(ir.VectorType(_I32, 32), list(range(first, first + 32)))
    pairs = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(i16x16, [i8x32, i8x32]), "llvm.x86.avx2.pmadd.ub.sw"
    )
    fours = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(i32x8, [i16x16, i16x16]), "llvm.x86.avx2.pmadd.wd"
    )
    x, y = (b.shuffle_vector(v, v, half) for v in (codes, query))
    return b.call(fours, [b.call(pairs, [x, y]), ir.Constant(i16x16, [1] * 16)])


def _halves(b: Any, places: Sequence[ir.Value], has: Set[str]) -> ir.Value:
    """Sixteen float16, given as uint16 at one place or half of them at each of two, as float32."""
    kind = ir.VectorType(_I16, LANES // len(places)).as_pointer()
    bits = _joined(b, [b.load(b.bitcast(at, kind), align=2) for at in places])
    if "f16c" in has:
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _VEC)
    # Moved to a float32's place the exponent is 112 too small, and subnormal numbers come out right.
    wide = b.zext(bits, _IVEC)

    def each(value: int) -> ir.Constant:
        return ir.Constant(_IVEC, [value] * LANES)

    small = b.bitcast(b.shl(b.and_(wide, each(0x7FFF)), each(13)), _VEC)
    value = b.fmul(small, ir.Constant(_VEC, [2.0**112] * LANES))
    special = b.or_(b.shl(b.and_(wide, each(0x3FF)), each(13)), each(0x7F800000))
    exponent = b.and_(wide, each(0x7C00))
    value = b.select(b.icmp_signed("==", exponent, each(0x7C00)), b.bitcast(special, _VEC), value)
    sign = b.shl(b.and_(wide, each(0x8000)), each(16))
    return b.bitcast(b.or_(b.bitcast(value, _IVEC), sign), _VEC)


def _joined(b: Any, parts: Sequence[ir.Value]) -> ir.Value:
    """One vector, or two as one of twice the length."""
    if len(parts) == 1:
        return parts[0]
    both = list(range(2 * parts[0].type.count))
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(_I32, len(both)), both))


def make_code_tile(
    heads: int, pair: bool = False, forced_features: Set[str] | None = None
) -> Callable[..., Any]:
    """tile(codes, base, step, block, other, ahead, h, t, query, factors, g, out, at): logits of 16 tokens.

    out[i, at : at + 16] = base * factors[0, g + i] + step * factors[1, g + i] * (query[g + i] . codes),
    i < heads, for tokens t .. t + 15 of KV head h of `block`, or if `pair`, with blocks of 8 tokens, for
    those of `block` and of `other`; the same of block `ahead` is fetched, as the hardware cannot know where
    it is. codes uint8 [N, H, D / 2, B] (channel c in the low bits of row c,
    c + D / 2 in the high ones), base and step float16 as uint16 [N, H, B], query [Hq, D] int8 as int32
    [Hq, D / 4], factors fp32 [2, Hq] (the sum of the query; its scale), out fp32 [heads, ...]. D a multiple
    of 8, B of 16 or, if `pair`, 8.
    """

    @intrinsic
    def tile(
        _: Any, codes: Any, base: Any, step: Any, block: Any, other: Any, ahead: Any, h: Any, t: Any,
        query: Any, factors: Any, g: Any, out: Any, at: Any,
    ) -> Any:  # fmt: skip
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            has = features() if forced_features is None else forced_features
            codes, base, step, block, other, ahead, h, t, query, factors, g, out, at = arrays_of(
                context, b, signature, args
            )
            kv_heads, half, size = (b.extract_value(codes.shape, i) for i in (1, 2, 3))
            quads = b.udiv(half, _I64(4))
            then, *here = (
                b.mul(b.add(b.mul(x, kv_heads), h), size)  # [., ., 0]
                for x in ((ahead, block, other) if pair else (ahead, block))
            )
            for x in (base, step):
                prefetch_at(b, b.gep(x.data, [b.add(then, t)]))
            words = b.extract_value(query.shape, 1)
            queries = [b.gep(query.data, [b.mul(b.add(g, _I64(i)), words)]) for i in range(heads)]
            zero = ir.Constant(_IVEC, None)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in range(2)] for _ in range(heads)]
            for total in (total for pair in sums for total in pair):
                b.store(zero, total)
            with cgutils.for_range(b, quads) as loop:
                row = b.add(b.mul(b.mul(loop.index, _I64(4)), size), t)
                prefetch_at(b, b.gep(codes.data, [b.add(b.mul(then, half), row)]))
                starts = [b.gep(codes.data, [b.add(b.mul(x, half), row)]) for x in here]
                four = _four_rows_of_two(b, starts) if pair else _four_rows(b, starts[0], size)
                low = b.and_(four, ir.Constant(_BYTES, [15] * 64))
                high = b.lshr(four, ir.Constant(_BYTES, [4] * 64))
                for at_query, (low_sum, high_sum) in zip(queries, sums, strict=True):
                    for part, total, word in (
                        (low, low_sum, loop.index),
                        (high, high_sum, b.add(loop.index, quads)),
                    ):
                        four_channels = splat_value(b, b.load(b.gep(at_query, [word])))
                        value = _dot4(b, b.load(total), part, b.bitcast(four_channels, _BYTES), has)
                        b.store(value, total)
            base_of, step_of = (
                _halves(b, [b.gep(x.data, [b.add(at, t)]) for at in here], has) for x in (base, step)
            )
            width = b.extract_value(factors.shape, 1)
            for i, (low_sum, high_sum) in enumerate(sums):
                head = b.add(g, _I64(i))
                q_sum, scale = (
                    splat_value(b, b.load(b.gep(factors.data, [b.add(head, offset)])))
                    for offset in (_I64(0), width)
                )
                dots = b.sitofp(b.add(b.load(low_sum), b.load(high_sum)), _VEC)
                logits = b.fadd(
                    b.fmul(b.fmul(step_of, scale, flags=_FUSE), dots, flags=_FUSE),
                    b.fmul(base_of, q_sum, flags=_FUSE),
                    flags=_FUSE,
                )
                stride = b.extract_value(out.shape, 1)
                place = b.gep(out.data, [b.add(b.mul(_I64(i), stride), at)])
                b.store(logits, b.bitcast(place, _VEC.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        kind = types.void(codes, base, step, i64, i64, i64, i64, i64, query, factors, i64, out, i64)
        return kind, emit

    return tile


def _four_rows(b: Any, start: ir.Value, size: ir.Value) -> ir.Value:
    """Four rows' sixteen bytes [4, 16] as [16, 4]: a token's four channels together."""
    row = ir.VectorType(_I8, LANES)
    rows = [
        b.load(b.bitcast(b.gep(start, [b.mul(_I64(j), size)]), row.as_pointer()), align=1) for j in range(4)
    ]
    thirty_two = ir.Constant(ir.VectorType(_I32, 32), list(range(32)))
    pairs = [b.shuffle_vector(rows[i], rows[i + 1], thirty_two) for i in (0, 2)]
    turned = [16 * j + token for token in range(LANES) for j in range(4)]
    return b.shuffle_vector(*pairs, ir.Constant(ir.VectorType(_I32, 64), turned))


def _four_rows_of_two(b: Any, starts: Sequence[ir.Value]) -> ir.Value:
    """Of two blocks four rows' eight bytes, which follow one another, as [16, 4]; see _four_rows."""
    rows = ir.VectorType(_I8, 32).as_pointer()
    both = [b.load(b.bitcast(start, rows), align=1) for start in starts]
    turned = [32 * block + 8 * j + token for block in range(2) for token in range(8) for j in range(4)]
    return b.shuffle_vector(*both, ir.Constant(ir.VectorType(_I32, 64), turned))
