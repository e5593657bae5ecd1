"""Compiled kernels on several threads: how a job is handed over without the interpreter.

Owns: the mailbox, and the operations a kernel starts its shares with. Must not know: what a kernel computes,
the threads themselves (workers.py). Imported only where numba is.

A job is a kernel's address, its arguments' address and a number of shares. It is posted into a mailbox that
the workers watch. Whoever is free takes the next share, the poster too: nobody waits for a thread that has
not begun, so a busy neighbour or a sleeping worker costs speed and nothing else. Waking a thread through
Python takes 50 microseconds; a worker that watches needs one.

    word = job number << 32 | next share: one compare-and-swap takes a share, and fails if the job has changed
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from nano_oasis.kernels.simd import intrinsic, jit

_I32, _I64, _I8P = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
_LINE = 8  # int64 per cache line: what several threads write lies apart
WORD, ENTRY, DATA, SHARES, DONE = 0, 1 * _LINE, 1 * _LINE + 1, 1 * _LINE + 2, 2 * _LINE
_NEXT = np.int64(2**32 - 1)


def make_mailbox() -> np.ndarray:
    return np.zeros(3 * _LINE, np.int64)


# --- operations ---------------------------------------------------------------------------------------
def _element(context: Any, b: Any, signature: Any, args: Any) -> ir.Value:
    return b.gep(context.make_array(signature.args[0])(context, b, args[0]).data, [args[1]])


@intrinsic
def peek(_: Any, box: Any, i: Any) -> Any:
    """box[i], read anew each time, and nothing after it is read before it."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(_element(context, b, signature, args), "seq_cst", 8)

    return types.int64(box, types.intp), emit


@intrinsic
def poke(_: Any, box: Any, i: Any, value: Any) -> Any:
    """box[i] = value, after everything written before it."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[2], _element(context, b, signature, args), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(box, types.intp, types.int64), emit


@intrinsic
def _swap(_: Any, box: Any, i: Any, old: Any, new: Any) -> Any:
    """box[i] = new if it is still old; whether it was."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        at = _element(context, b, signature, args)
        return b.extract_value(b.cmpxchg(at, args[2], args[3], "seq_cst"), 1)

    return types.boolean(box, types.intp, types.int64, types.int64), emit


@intrinsic
def _increment(_: Any, box: Any, i: Any) -> Any:
    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.atomic_rmw("add", _element(context, b, signature, args), _I64(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(box, types.intp), emit


@intrinsic
def _call(_: Any, entry: Any, data: Any, share: Any, shares: Any) -> Any:
    """Call what `entry` returned, here or on another thread."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I8P, _I64, _I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [b.inttoptr(args[1], _I8P), *args[2:]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def entry(typing: Any, kernel: Any, args: Any) -> Any:
    """The address of a function that calls kernel(share, shares, *args), args being where `place` put it."""
    inner = typing.resolve_function_type(kernel, (types.int64, types.int64, *args.types), {})

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I8P, _I64, _I64])
        name = f"{b.function.name}.share"
        function = ir.Function(b.module, kind, b.module.get_unique_name(name))
        function.linkage = "internal"
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        data, share, shares = function.args
        packed = inside.load(inside.bitcast(data, values[1].type.as_pointer()))
        members = [inside.extract_value(packed, i) for i in range(len(args.types))]
        compiled = kernel.dispatcher.get_compile_result(inner)
        context.add_linking_libs([compiled.library])
        callee = context.declare_function(b.module, compiled.fndesc)
        context.call_conv.call_function(inside, callee, types.none, inner.args, [share, shares, *members])
        inside.ret(_I32(0))
        return b.ptrtoint(function, _I64)

    return types.int64(kernel, args), emit


@intrinsic
def place(_: Any, args: Any) -> Any:
    """The address of a copy of args, good until the function that called this returns."""

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        with b.goto_entry_block():
            room = b.alloca(values[0].type)
        b.store(values[0], room)
        return b.ptrtoint(room, _I64)

    return types.int64(args), emit


@intrinsic
def _pause(_: Any) -> Any:
    """Tell the core that this is a waiting loop, where it has a word for that."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if b.module.triple.startswith("x86"):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), emit


# --- the poster's side --------------------------------------------------------------------------------
@jit
def begin(box, entry, data, shares):  # type: ignore[no-untyped-def]
    """Post a job. The one before is over: finish() has returned. But a worker may still look at it, so the
    word is closed first: with a share beyond all, and no longer what that worker has read."""
    job = peek(box, WORD) >> 32
    poke(box, WORD, job << 32 | _NEXT)
    poke(box, ENTRY, entry)
    poke(box, DATA, data)
    poke(box, SHARES, shares)
    poke(box, DONE, 0)
    poke(box, WORD, (job + 1) << 32)


@jit
def finish(box):  # type: ignore[no-untyped-def]
    """Take shares while there are any, then wait for those that others took."""
    _help(box, peek(box, WORD) >> 32)
    while peek(box, DONE) < box[SHARES]:
        _pause()


@jit
def _help(box, job):  # type: ignore[no-untyped-def]
    while True:
        word = peek(box, WORD)
        share = word & _NEXT
        address, data, shares = peek(box, ENTRY), peek(box, DATA), peek(box, SHARES)
        if word >> 32 != job or share >= shares:
            return
        if _swap(box, WORD, word, word + 1):
            _call(address, data, share, shares)
            _increment(box, DONE)


# --- a worker's side ------------------------------------------------------------------------------------
@jit
def watch(box, job, patience):  # type: ignore[no-untyped-def]
    """Help with every new job; the last one's number, once none has come for `patience` looks."""
    looks = 0
    while looks < patience:
        now = peek(box, WORD) >> 32
        if now != job:
            job, looks = now, 0
            _help(box, job)
        looks += 1
        _pause()
    return job
