"""How weights of each stored format become float32 in registers.

Owns: the decoding that compiled kernels do, by the type of the array of codes. Must not know: products,
files. Imported only where numba is.

    codes of an array                 weight                         as in
    float32                           itself
    uint16, bits of float16           itself
    int16, bits of bfloat16           itself
    int8 [O, K]                       code * scale (+ min)           Q8_0, Q5_0; with a min Q5_1, Q5_K
    uint8 [O, K / 2], two of 4 bits   code * scale + min             Q4_0, Q4_1, Q4_K

Scales and mins are [O, K / 32], float32 or bits of float16. A product and a sum stay two operations here: the
weights are then those that the file's own definition gives, bit for bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nano_oasis.kernels.packed_weight import GROUP
from nano_oasis.kernels.simd import _F32, features, splat_value

WIDE = "avx512f" in features()
LANES = 16 if WIDE else 8  # of one register
_HALF = GROUP // 2
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VEC, _IVEC = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def load_floats(b: Any, start: ir.Value, k: ir.Value) -> ir.Value:
    """A register of float32 from start[k]."""
    return b.load(b.bitcast(b.gep(start, [k]), _VEC.as_pointer()), align=4)


class Weights:
    """The arrays of one matrix in a function that is being emitted; `kinds` are their numba types."""

    def __init__(self, b: Any, kinds: Any, arrays: Any) -> None:
        (self.codes, self.scales, self.mins), self.kinds = arrays, kinds
        self.code = kinds[0].dtype
        self.packed = self.code in (types.int8, types.uint8)
        self.step = GROUP if self.packed else LANES  # weights of a row that are decoded at once
        self.width = b.extract_value(self.codes.shape, 1)  # of a row of codes
        self.columns = b.mul(self.width, _I64(2)) if self.code == types.uint8 else self.width

    def row(self, b: Any, o: ir.Value) -> Any:
        """Where row o begins: of codes, scales, mins."""
        codes = b.gep(self.codes.data, [b.mul(o, self.width)])
        if not self.packed:
            return codes, None, None
        first = b.mul(o, b.udiv(self.columns, _I64(GROUP)))
        scales = b.gep(self.scales.data, [first])
        return codes, scales, b.gep(self.mins.data, [first]) if self._has_mins() else None

    def fetch(self, b: Any, row: Any, k: ir.Value) -> ir.Value:
        """The address of the code of column k."""
        return b.gep(row[0], [b.udiv(k, _I64(2)) if self.code == types.uint8 else k])

    def load(self, b: Any, row: Any, k: ir.Value) -> list[ir.Value]:
        """Columns k .. k + step - 1 in registers of LANES float32."""
        codes, scales, mins = row
        if not self.packed:
            return [_plain(b, codes, k, self.code)]
        group = b.udiv(k, _I64(GROUP))
        scale = _factor(b, scales, group, self.kinds[1].dtype)
        low = _factor(b, mins, group, self.kinds[2].dtype) if self._has_mins() else None
        if self.code == types.uint8:
            return _nibbles(b, b.gep(codes, [b.udiv(k, _I64(2))]), scale, low)
        out = []
        for first in range(0, GROUP, LANES):
            value = b.fmul(_floats(b, codes, b.add(k, _I64(first)), signed=True), scale)
            out.append(value if low is None else b.fadd(value, low))
        return out

    def _has_mins(self) -> bool:
        return bool(self.kinds[2].ndim == 2)


def _plain(b: Any, start: ir.Value, k: ir.Value, kind: Any) -> ir.Value:
    if kind == types.float32:
        return load_floats(b, start, k)
    bits = ir.VectorType(_I16, LANES)
    value = b.load(b.bitcast(b.gep(start, [k]), bits.as_pointer()), align=2)
    if kind == types.int16:  # bfloat16 is the upper half of a float32
        return b.bitcast(b.shl(b.zext(value, _IVEC), _same(16)), _VEC)
    return _widened(b, value)


def _widened(b: Any, bits: ir.Value) -> ir.Value:
    """Float16 as uint16 to float32."""
    if "f16c" in features():
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _VEC)
    # Moved to a float32's place the exponent is 112 too small, and subnormal numbers come out right. Weights
    # and scales are finite: the loader has seen to that.
    wide = b.zext(bits, _IVEC)
    small = b.bitcast(b.shl(b.and_(wide, _same(0x7FFF)), _same(13)), _VEC)
    value = b.fmul(small, ir.Constant(_VEC, [2.0**112] * LANES))
    sign = b.shl(b.and_(wide, _same(0x8000)), _same(16))
    return b.bitcast(b.or_(b.bitcast(value, _IVEC), sign), _VEC)


def _same(value: int) -> ir.Constant:
    return ir.Constant(_IVEC, [value] * LANES)


def _factor(b: Any, start: ir.Value, group: ir.Value, kind: Any) -> ir.Value:
    """start[group], float32 or the bits of float16, in every lane."""
    one = b.load(b.gep(start, [group]))
    if kind == types.float32:
        return splat_value(b, one, LANES)
    return _widened(b, splat_value(b, one, LANES))


def _floats(b: Any, start: ir.Value, k: ir.Value, signed: bool) -> ir.Value:
    narrow = ir.VectorType(ir.IntType(8), LANES)
    codes = b.load(b.bitcast(b.gep(start, [k]), narrow.as_pointer()), align=1)
    return b.sitofp(b.sext(codes, _IVEC) if signed else b.zext(codes, _IVEC), _VEC)


def _nibbles(b: Any, start: ir.Value, scale: ir.Value, low: ir.Value) -> list[ir.Value]:
    """Sixteen bytes: in the low bits the group's first sixteen codes, in the high ones the others."""
    first, second = [], []
    for at in range(0, _HALF, LANES):
        narrow = ir.VectorType(ir.IntType(8), LANES)
        place = b.bitcast(b.gep(start, [_I64(at)]), narrow.as_pointer())
        wide = b.zext(b.load(place, align=1), _IVEC)
        first.append(wide)
        second.append(b.lshr(wide, _same(4)))
    if not WIDE:
        fours = [b.and_(x, _same(15)) for x in first] + second
        return [b.fadd(b.fmul(b.sitofp(x, _VEC), scale), low) for x in fours]
    # All sixteen values a code can stand for fit a register; looking one up is a single instruction, which
    # takes the low four bits of each lane.
    codes = ir.Constant(_VEC, [float(i) for i in range(LANES)])
    table = b.fadd(b.fmul(codes, scale), low)
    kind = ir.FunctionType(_VEC, [_VEC, _IVEC])
    look_up = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return [b.call(look_up, [table, x]) for x in first + second]
