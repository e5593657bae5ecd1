"""Products for many rows on the CPU's own matrix unit (AMX), as exact as needed: each number is two bfloat16.

Owns: the tiles, the code they emit, the layout of what they read, and whether this machine has them. Must not
know: linear layers, threads. Imported only where numba is.

The unit multiplies 16 rows of 32 bfloat16 with 16 others sixteen times as fast as float32 are multiplied. A
bfloat16 has 8 bits of a float32's 24. So x = high + low, both bfloat16, and

    x * y = high * high + high * low + low * high      the rest, low * low, is less than 2^-16 of it

which is what torch.set_float32_matmul_precision("high") stands for. Weights lie as they are, row by row;
activations as in simd_block.py, a row in a lane, but two neighbouring columns in each lane's 32 bits.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.simd import _shuffle, arrays_of, features, intrinsic
from nano_oasis.kernels.simd_block import turned
from nano_oasis.kernels.simd_dots import fetch
from nano_oasis.kernels.simd_weights import _VEC, Weights, load_floats

COMPILED = {"amx-bf16", "amx-tile", "avx512f"} <= features()  # the instructions exist
SIDE = 16  # rows of a tile
DEPTH = 32  # bfloat16 of a row of a tile
_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_BYTE = _I8.as_pointer()
_PAIRS, _HALVES = ir.VectorType(_I32, 16), ir.VectorType(_I16, 16)
_A, _B = 4, 6  # the first tile of weights, of activations; before them the sums


@cache
def allowed() -> bool:
    """Whether this process may use the unit: Linux wants to be asked, as it enlarges a thread's state."""
    if not COMPILED or not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _call(b: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), args)


@intrinsic
def open_tiles(_: Any) -> Any:
    """Prepare this thread: eight tiles of 16 rows of 64 bytes."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        setting = bytearray(64)
        setting[0] = 1  # the only layout there is
        setting[16:32] = (64).to_bytes(2, "little") * 8  # bytes of a row
        setting[48:56] = bytes([SIDE] * 8)
        data = ir.Constant(ir.ArrayType(_I8, 64), setting)
        _call(b, "ldtilecfg", b.bitcast(cgutils.global_constant(b, "tile_setting", data), _BYTE))
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def close_tiles(_: Any) -> Any:
    """A thread without tiles is cheaper to switch."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


def make_product(outs: int, panels: int) -> Callable[..., Any]:
    """product(w, x, first, out, at): SIDE * outs rows of weights with panels of activations; one or two each.

    out[SIDE * first + i, at + j] = w[j] . row i of panels first, first + 1, for those rows that out has.
    Unchecked. w int16 [2, SIDE * outs, K] as split_weights() makes it, x int32 [2, n, K / 2, SIDE] as
    split_rows() does, out fp32 [R, O]; all contiguous, K a multiple of DEPTH.
    """

    @intrinsic
    def product(_: Any, w: Any, x: Any, first: Any, out: Any, at: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, x, first, out, at = arrays_of(context, b, signature, args)
            _, held, width = cgutils.unpack_tuple(b, w.shape, 3)
            _, count, pairs, _ = cgutils.unpack_tuple(b, x.shape, 4)
            rows, row_size = cgutils.unpack_tuple(b, out.shape, 2)

            def load_weights(k: ir.Value, low: int) -> None:
                for i in range(outs):
                    row = b.add(b.mul(_I64(low), held), _I64(i * SIDE))
                    place = b.gep(w.data, [b.add(b.mul(row, width), k)])
                    _call(b, "tileloadd64", _I8(_A + i), b.bitcast(place, _BYTE), b.mul(width, _I64(2)))

            def load_rows(k: ir.Value, low: int) -> None:
                for j in range(panels):
                    panel = b.add(b.mul(_I64(low), count), b.add(first, _I64(j)))
                    row = b.add(b.mul(panel, pairs), b.udiv(k, _I64(2)))
                    place = b.gep(x.data, [b.mul(row, _I64(SIDE))])
                    _call(b, "tileloadd64", _I8(_B + j), b.bitcast(place, _BYTE), _I64(64))

            def add_products() -> None:
                for i in range(outs):
                    for j in range(panels):
                        _call(b, "tdpbf16ps", _I8(2 * i + j), _I8(_A + i), _I8(_B + j))

            for i in range(outs):
                for j in range(panels):
                    _call(b, "tilezero", _I8(2 * i + j))
            with cgutils.for_range_slice(b, _I64(0), width, _I64(DEPTH)) as (k, _):
                load_weights(k, 0)
                load_rows(k, 1)
                add_products()
                load_rows(k, 0)
                add_products()
                load_weights(k, 1)
                add_products()
            room = cgutils.alloca_once(b, ir.ArrayType(_VEC, SIDE))
            for i in range(outs):
                for j in range(panels):
                    _call(b, "tilestored64", _I8(2 * i + j), b.bitcast(room, _BYTE), _I64(64))
                    sums = [b.load(b.gep(room, [_I32(0), _I32(n)]), align=4) for n in range(SIDE)]
                    row = b.mul(b.add(first, _I64(j)), _I64(SIDE))
                    for numbers in turned(b, sums):
                        with b.if_then(b.icmp_signed("<", row, rows)):
                            place = b.gep(out.data, [b.add(b.mul(row, row_size), b.add(at, _I64(i * SIDE)))])
                            b.store(numbers, b.bitcast(place, _VEC.as_pointer()), align=4)
                        row = b.add(row, _I64(1))
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(w, x, i64, out, i64), emit

    return product


def _split(b: Any, value: ir.Value) -> list[ir.Value]:
    """float32 -> its high and its low part, rounded to bfloat16, whose bits are <16 x i16>.

    Cut off instead, all products of low parts would have their number's sign, and add up. NaN stays NaN,
    infinity becomes NaN.
    """

    def constant(bits: int) -> ir.Constant:
        return ir.Constant(_PAIRS, [bits] * 16)

    def nearest(bits: ir.Value) -> ir.Value:
        odd = b.and_(b.lshr(bits, constant(16)), constant(1))
        return b.and_(b.add(b.add(bits, constant(0x7FFF)), odd), constant(0xFFFF0000))

    high = nearest(b.bitcast(value, _PAIRS))
    low = nearest(b.bitcast(b.fsub(value, b.bitcast(high, _VEC)), _PAIRS))
    return [b.trunc(b.lshr(part, constant(16)), _HALVES) for part in (high, low)]


@intrinsic
def split_weights(_: Any, w: Any, scales: Any, mins: Any, o: Any, count: Any, room: Any) -> Any:
    """room[0, j], room[1, j] = the parts of row o + j of the weights, for j < count.

    Unchecked. w, scales, mins as for simd_dots.make_tile, room int16 [2, >= count, K], contiguous.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        *matrix, o, count, room = arrays_of(context, b, signature, args)
        weights = Weights(b, signature.args[:3], matrix)
        _, held, width = cgutils.unpack_tuple(b, room.shape, 3)
        with cgutils.for_range(b, count) as row:
            start = weights.row(b, b.add(o, row.index))
            with cgutils.for_range_slice(b, _I64(0), width, _I64(weights.step)) as (k, _):
                fetch(b, weights, start, k)
                for i, value in enumerate(weights.load(b, start, k)):
                    column = b.add(k, _I64(16 * i))
                    for low, part in enumerate(_split(b, value)):
                        line = b.add(b.mul(_I64(low), held), row.index)
                        place = b.gep(room.data, [b.add(b.mul(line, width), column)])
                        b.store(part, b.bitcast(place, _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(w, scales, mins, types.int64, types.int64, room), emit


@intrinsic
def split_rows(_: Any, x: Any, panel: Any, out: Any) -> Any:
    """out[0 or 1, panel, k, i] = that part of x[SIDE * panel + i, 2 k] and, in the upper bits, [.., 2 k + 1].

    Behind the last row zeros. Unchecked. x fp32 [R, K], out int32 [2, n, K / 2, SIDE]; contiguous, K a
    multiple of DEPTH.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, panel, out = arrays_of(context, b, signature, args)
        rows, width = cgutils.unpack_tuple(b, x.shape, 2)
        _, count, pairs, _ = cgutils.unpack_tuple(b, out.shape, 4)
        starts, exists = [], []
        for i in range(SIDE):
            row = b.add(b.mul(panel, _I64(SIDE)), _I64(i))
            there = b.icmp_signed("<", row, rows)
            starts.append(b.gep(x.data, [b.mul(b.select(there, row, _I64(0)), width)]))
            exists.append(there)
        zero = ir.Constant(_VEC, None)
        with cgutils.for_range_slice(b, _I64(0), width, _I64(DEPTH)) as (k, _):
            parts: list[list[ir.Value]] = [[], []]
            for start, there in zip(starts, exists, strict=True):
                loaded = [load_floats(b, start, b.add(k, _I64(n))) for n in (0, 16)]
                split = [_split(b, b.select(there, value, zero)) for value in loaded]
                for part, halves in zip(parts, zip(*split, strict=True), strict=True):
                    part.append(b.bitcast(_shuffle(b, halves[0], halves[1], list(range(DEPTH))), _PAIRS))
            for low, part in enumerate(parts):
                line = b.add(b.mul(b.add(b.mul(_I64(low), count), panel), pairs), b.udiv(k, _I64(2)))
                for j, column in enumerate(turned(b, part)):
                    place = b.gep(out.data, [b.mul(b.add(line, _I64(j)), _I64(SIDE))])
                    b.store(column, b.bitcast(place, _PAIRS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, out), emit
