"""Norms, rotation, activations and KV writes, compiled for the CPU: a row at a time, one thread.

Owns: the arithmetic of pointwise.py for compiled callers, and write_kv. Must not know: who calls, threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import reference
from nano_oasis.kernels.simd import LANES, add, fma, jit, load, mul, sigmoid, splat, store, sum_lanes


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See reference.write_kv."""
    if k.dtype != k_cache.dtype or k.dtype != torch.float32:
        return reference.write_kv(k, v, k_cache, v_cache, slots)
    reference.check_shapes(k, k_cache, v_cache)
    if not _write(k.numpy(), v.numpy(), k_cache.numpy(), v_cache.numpy(), slots.numpy()):
        raise IndexError(f"slots: between 0 and {k_cache.shape[0] * k_cache.shape[1] - 1}")


@jit
def _norm_row(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """x, weight, out [H]"""
    squares = splat(np.float32(0))
    for d in range(0, len(x), LANES):
        part = load(x, d)
        squares = fma(part, part, squares)
    scale = splat(np.float32(1 / np.sqrt(sum_lanes(squares) / np.float32(len(x)) + np.float32(eps))))
    for d in range(0, len(x), LANES):
        store(out, d, mul(mul(load(x, d), scale), load(weight, d)))


@jit
def norm_rows(x, weight, eps, out):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        _norm_row(x[t], weight, eps, out[t])


@jit
def add_norm_rows(x, h, weight, eps, out):  # type: ignore[no-untyped-def]
    """x += h; out = the norm of x; all [T, H]."""
    for t in range(len(x)):
        one, other = x[t], h[t]
        for d in range(0, len(one), LANES):
            store(one, d, add(load(one, d), load(other, d)))
        _norm_row(one, weight, eps, out[t])


@jit
def add_bias(x, bias):  # type: ignore[no-untyped-def]
    """x [T, W] += bias [W], if there is one."""
    if len(bias):
        for t in range(len(x)):
            row = x[t]
            for d in range(0, len(row), LANES):
                store(row, d, add(load(row, d), load(bias, d)))


@jit
def rotate_rows(qkv, angles, q_norm, k_norm, eps, q, k):  # type: ignore[no-untyped-def]
    for t in range(len(qkv)):
        for h in range(q.shape[1]):
            _rotate(qkv[t, h], angles[t, 0], angles[t, 1], q_norm, eps, q[t, h])
        for h in range(k.shape[1]):
            _rotate(qkv[t, q.shape[1] + h], angles[t, 0], angles[t, 1], k_norm, eps, k[t, h])


@jit
def _rotate(x, cos, sin, norm, eps, out):  # type: ignore[no-untyped-def]
    """x, cos, sin, out [D]: pairs (i, i + D / 2)."""
    half = len(x) // 2
    if len(norm):
        _norm_row(x, norm, eps, out)
    else:
        for d in range(len(x)):
            out[d] = x[d]
    for d in range(half):
        first, second = out[d], out[d + half]
        out[d] = first * cos[d] - second * sin[d]
        out[d + half] = second * cos[d + half] + first * sin[d + half]


@jit
def gate_rows(gate_up, gelu, out):  # type: ignore[no-untyped-def]
    """Both activations are x * sigmoid of something; tanh(u) = 2 * sigmoid(2 u) - 1."""
    cubic, factor = splat(np.float32(0.044715)), splat(np.float32(2 * np.sqrt(2 / np.pi)))
    width = out.shape[1]
    for t in range(len(out)):
        row, to = gate_up[t], out[t]
        for d in range(0, width, LANES):
            x, up = load(row, d), load(row, width + d)
            inner = x
            if gelu:
                inner = mul(factor, fma(mul(cubic, mul(x, x)), x, x))
            store(to, d, mul(mul(x, sigmoid(inner)), up))


@jit
def _write(k, v, k_cache, v_cache, slots):  # type: ignore[no-untyped-def]
    """k, v [T, Hkv, D] to the caches [N, B, Hkv, D]. False, and nothing is written: a slot does not exist."""
    blocks, size, heads, dim = k_cache.shape
    for t in range(len(slots)):
        if not 0 <= slots[t] < blocks * size:
            return False
    for t in range(len(slots)):
        block, offset = slots[t] // size, slots[t] % size
        for h in range(heads):
            for d in range(dim):
                k_cache[block, offset, h, d] = k[t, h, d]
            for d in range(dim):
                v_cache[block, offset, h, d] = v[t, h, d]
    return True
