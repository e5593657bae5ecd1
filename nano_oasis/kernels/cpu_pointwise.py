"""Norms, rotation, activations and KV writes of a few rows, compiled for the CPU.

Owns: the compiled versions of pointwise.py, which has the contracts, and of reference.write_kv. Must not
know: when they are used.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import reference
from nano_oasis.kernels.simd import LANES, add, fma, jit, load, mul, sigmoid, splat, store, sum_lanes

_NONE = np.empty(0, np.float32)


def add_norm(x: Tensor, h: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See pointwise.add_norm."""
    out = np.empty(x.shape, np.float32)
    rows = _array(x)
    if h is None:
        _norm_rows(rows, _array(weight), eps, out)
        return x, torch.from_numpy(out)
    total = np.empty(x.shape, np.float32)
    _add_norm_rows(rows, _array(h), _array(weight), eps, total, out)
    return torch.from_numpy(total), torch.from_numpy(out)


def norm_rotate(
    qkv: Tensor, heads: int, kv_heads: int, angles: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See pointwise.norm_rotate."""
    size = qkv.shape[-1]
    q = np.empty((len(qkv), heads, size), np.float32)
    k = np.empty((len(qkv), kv_heads, size), np.float32)
    q_norm, k_norm = (_NONE, _NONE) if norms is None else map(_array, norms)
    _rotate_all(_array(qkv), _array(angles), q_norm, k_norm, eps, q, k)
    return torch.from_numpy(q), torch.from_numpy(k)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See pointwise.gated."""
    out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
    _gate_rows(_array(gate_up), activation == "gelu_tanh", out)
    return torch.from_numpy(out)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See reference.write_kv."""
    if k.dtype != k_cache.dtype or k.dtype != torch.float32:
        return reference.write_kv(k, v, k_cache, v_cache, slots)
    reference.check_shapes(k, k_cache, v_cache)
    if not _write(k.numpy(), v.numpy(), k_cache.numpy(), v_cache.numpy(), slots.numpy()):
        raise IndexError(f"slots: between 0 and {k_cache.shape[0] * k_cache.shape[1] - 1}")


def _array(x: Tensor) -> np.ndarray:
    return x.numpy() if x.is_contiguous() else x.contiguous().numpy()


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
def _norm_rows(x, weight, eps, out):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        _norm_row(x[t], weight, eps, out[t])


@jit
def _add_norm_rows(x, h, weight, eps, total, out):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        one, other, both = x[t], h[t], total[t]
        for d in range(0, len(both), LANES):
            store(both, d, add(load(one, d), load(other, d)))
        _norm_row(both, weight, eps, out[t])


@jit
def _rotate_all(qkv, angles, q_norm, k_norm, eps, q, k):  # type: ignore[no-untyped-def]
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
def _gate_rows(gate_up, gelu, out):  # type: ignore[no-untyped-def]
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
