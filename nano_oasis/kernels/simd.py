"""Sixteen float32 in a register, as a type for compiled functions, and how kernels are compiled.

Owns: jit, the vector type and its operations. Must not know: attention or sketches. Imported only where
numba is. Left to itself the compiler sums up each dot product on its own and keeps running sums in memory;
written with vectors the kernels run about twice as fast. Where registers are shorter LLVM splits a vector.

An operation is an `intrinsic`: it says its type and emits LLVM instructions. `array` is a contiguous 1-D
array and `i` an index into it; neither is checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model

intrinsic: Any = numba_intrinsic  # its stub does not know that the first parameter is not an argument

LANES = 16
_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VEC, _IVEC = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_POWERS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1, 1)  # of exp
_FUSE = ("contract",)  # a product and a sum may be one instruction; nothing else may be reordered


def jit(function: Callable[..., Any]) -> Any:
    """njit without the GIL, kept on disk where the disk allows it (NUMBA_CACHE_DIR says where)."""
    # Without numba's runtime: no reference is counted, atomically, for every row looked at, and nothing can
    # be allocated, so callers bring the scratch memory.
    options: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}
    try:
        compiled = njit(function, cache=True, **options)
    except RuntimeError:  # no directory that can be written: each process compiles anew
        return njit(function, **options)
    # What is on disk is valid for the file the function is in, and for these operations too.
    file = compiled._cache._cache_file  # type: ignore[attr-defined]
    file._source_stamp = (file._source_stamp, _operations())
    return compiled


@cache
def _operations() -> int:
    here = Path(__file__).parent
    files = sorted([*here.glob("simd*.py"), *here.glob("cpu_*.py")])  # compiled functions call one another
    return hash(tuple(zlib.crc32(f.read_bytes()) for f in files))


@cache
def features() -> frozenset[str]:
    """What the code is compiled for, as LLVM names it."""
    flags: str = cpu_target.target_context.codegen()._tm_features
    return frozenset(f[1:] for f in flags.split(",") if f.startswith("+"))


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VEC)


# --- what the operations are made of ----------------------------------------------------------------
def _all(value: float) -> ir.Constant:
    return ir.Constant(_VEC, [ir.Constant(_F32, value)] * LANES)


def _all_int(value: int) -> ir.Constant:
    return ir.Constant(_IVEC, [ir.Constant(_I32, value)] * LANES)


def _shuffle(b: Any, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    """Lanes of x (0 to n - 1) and y (n to 2n - 1)."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _halve(b: Any, x: ir.Value, combine: Callable[..., ir.Value], until: int) -> ir.Value:
    """Combine the upper half of a vector with the lower one until `until` lanes are left."""
    n = x.type.count
    while n > until:
        n //= 2
        x = combine(_shuffle(b, x, x, list(range(n))), _shuffle(b, x, x, list(range(n, 2 * n))))
    return x


def _larger(b: Any) -> Callable[..., ir.Value]:
    return lambda x, y: b.select(b.fcmp_unordered(">", x, y), x, y)


def _pointer(context: Any, b: Any, signature: Any, args: Any, element: ir.Type) -> ir.Value:
    """Where element i is, for arguments (array, i, ...)."""
    array, i = args[:2]
    data = context.make_array(signature.args[0])(context, b, array).data
    return b.bitcast(b.gep(data, [i]), element.as_pointer())


def arrays_of(context: Any, b: Any, signature: Any, args: Any) -> list[Any]:
    """The arguments, arrays as structs with .data and .shape."""
    return [
        context.make_array(kind)(context, b, value) if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, args, strict=True)
    ]


def splat_value(b: Any, value: ir.Value, lanes: int = LANES) -> ir.Value:
    """A float or an int32 in every lane."""
    kind = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return _shuffle(b, one, one, [0] * lanes)


def add_product(b: Any, x: ir.Value, y: ir.Value, total: ir.Value) -> None:
    """total, a place in memory that becomes a register, += x * y."""
    b.store(b.fadd(b.fmul(x, y, flags=_FUSE), b.load(total), flags=_FUSE), total)


def prefetch_at(b: Any, address: ir.Value) -> None:
    """Begin to load that cache line, into the second-level cache.

    There more loads can be under way than in the first level: scattered blocks come half as fast again.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(function, [b.bitcast(address, byte), _I32(0), _I32(2), _I32(1)])  # to read, second level, data


def _four(b: Any, vectors: Sequence[ir.Value], combine: Callable[..., ir.Value]) -> ir.Value:
    """Four vectors -> <4 x float>, each vector's lanes combined."""

    def neighbours(x: ir.Value, y: ir.Value) -> ir.Value:
        return combine(_shuffle(b, x, y, [0, 2, 4, 6]), _shuffle(b, x, y, [1, 3, 5, 7]))

    w, x, y, z = (_halve(b, v, combine, 4) for v in vectors)
    return neighbours(neighbours(w, x), neighbours(y, z))


def _eight(b: Any, vectors: Sequence[ir.Value], combine: Callable[..., ir.Value]) -> ir.Value:
    """Four vectors -> <8 x float>, the lanes of each half of a vector combined."""

    def halves(x: ir.Value, y: ir.Value, run: int) -> ir.Value:
        """Runs of so many lanes, of both vectors in turn, half as long each."""
        first = [at + i for at in range(0, 2 * LANES, run) for i in range(run // 2)]
        return combine(_shuffle(b, x, y, first), _shuffle(b, x, y, [i + run // 2 for i in first]))

    w, x, y, z = vectors
    fours = halves(halves(w, x, 8), halves(y, z, 8), 4)  # two lanes of each half
    return combine(
        _shuffle(b, fours, fours, [*range(0, 16, 2)]), _shuffle(b, fours, fours, [*range(1, 16, 2)])
    )


# --- operations ---------------------------------------------------------------------------------------
@intrinsic
def splat(_: Any, x: Any) -> Any:
    """x in every lane."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return splat_value(b, args[0])

    return vector(types.float32), emit


@intrinsic
def load(_: Any, array: Any, i: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(_pointer(context, b, signature, args, _VEC), align=4)

    return vector(array, i), emit


@intrinsic
def store(_: Any, array: Any, i: Any, x: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[2], _pointer(context, b, signature, args, _VEC), align=4)
        return context.get_dummy_value()

    return types.void(array, i, vector), emit


@intrinsic
def add(_: Any, x: Any, y: Any) -> Any:
    return vector(vector, vector), lambda context, b, signature, args: b.fadd(*args, flags=_FUSE)


@intrinsic
def mul(_: Any, x: Any, y: Any) -> Any:
    return vector(vector, vector), lambda context, b, signature, args: b.fmul(*args, flags=_FUSE)


@intrinsic
def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fadd(b.fmul(args[0], args[1], flags=_FUSE), args[2], flags=_FUSE)

    return vector(vector, vector, vector), emit


@intrinsic
def larger(_: Any, x: Any, y: Any) -> Any:
    return vector(vector, vector), lambda context, b, signature, args: _larger(b)(*args)


@intrinsic
def sum_lanes(_: Any, x: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.extract_element(_halve(b, args[0], b.fadd, 1), _I32(0))

    return types.float32(vector), emit


@intrinsic
def largest_lane(_: Any, x: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.extract_element(_halve(b, args[0], _larger(b), 1), _I32(0))

    return types.float32(vector), emit


@intrinsic
def store_sums(_: Any, array: Any, i: Any, w: Any, x: Any, y: Any, z: Any) -> Any:
    """array[i : i + 4] = the sums of four vectors' lanes, which together cost little more than one."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        four = _four(b, args[2:], b.fadd)
        b.store(four, _pointer(context, b, signature, args, ir.VectorType(_F32, 4)), align=4)
        return context.get_dummy_value()

    return types.void(array, i, vector, vector, vector, vector), emit


@intrinsic
def store_half_sums(_: Any, array: Any, i: Any, w: Any, x: Any, y: Any, z: Any) -> Any:
    """array[i : i + 8] = the sums of the lower and of the upper lanes of each of four vectors."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        eight = _eight(b, args[2:], b.fadd)
        b.store(eight, _pointer(context, b, signature, args, ir.VectorType(_F32, 8)), align=4)
        return context.get_dummy_value()

    return types.void(array, i, vector, vector, vector, vector), emit


@intrinsic
def exp(_: Any, x: Any) -> Any:
    """e**x for x <= 0, within 3e-7 of it; below -87 as at -87, which is 1.6e-38. NaN gives NaN."""
    return _exp(_POWERS)


@intrinsic
def rough_exp(_: Any, x: Any) -> Any:
    """As exp, within 2e-4 of it: enough for ranking, and a quarter faster."""
    return _exp((0.16778198, 0.50430453, 0.99997126, 0.99994823))


def _exp(powers: Sequence[float]) -> Any:
    """e**x, powers: a polynomial for it between -ln 2 / 2 and ln 2 / 2, highest first."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def scaled_add(p: ir.Value, q: ir.Value, r: ir.Value) -> ir.Value:
            return b.fadd(b.fmul(p, q, flags=_FUSE), r, flags=_FUSE)

        x = args[0]
        x = b.select(b.fcmp_ordered("<", x, _all(-87.0)), _all(-87.0), x)
        # x = n ln 2 + r with |r| <= ln 2 / 2. n is rounded by truncation, as x is not positive.
        n = b.fptosi(scaled_add(x, _all(1.4426950408889634), _all(-0.5)), _IVEC)
        f = b.sitofp(n, _VEC)
        r = scaled_add(f, _all(-0.693359375), x)  # ln 2 in two parts: n times the first is exact
        r = scaled_add(f, _all(2.12194440e-4), r)
        p = _all(powers[0])
        for power in powers[1:]:
            p = scaled_add(p, r, _all(power))
        two_to_n = b.shl(b.add(n, _all_int(127)), _all_int(23))
        return b.fmul(p, b.bitcast(two_to_n, _VEC))

    return vector(vector), emit


@intrinsic
def sigmoid(_: Any, x: Any) -> Any:
    """1 / (1 + e**-x), as exact as exp. NaN gives NaN."""
    signature, exponential = _exp(_POWERS)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        below = b.fcmp_ordered("<", args[0], _all(0.0))
        t = exponential(context, b, signature, [b.select(below, args[0], b.fneg(args[0]))])
        return b.fdiv(b.select(below, t, _all(1.0)), b.fadd(t, _all(1.0)))

    return signature, emit
