"""A layer without its attention, compiled for the CPU: two calls where there were nine.

Owns: the order of a layer's jobs and what each thread does in between. Must not know: attention, KV, where
weights come from; layer.py has the same in torch and says what is computed.

Between two products there are sums, norms, rotation and the gated activation, which for a few rows take less
time than calling them from Python one by one. For many rows they are shared out as the products are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import simd_tiles
from nano_oasis.kernels.cpu_linear import arrays_of, most_shares, multiply, scratch, supports
from nano_oasis.kernels.cpu_pointwise import add_bias, add_norm_rows, gate_rows, norm_rows, rotate_rows
from nano_oasis.kernels.matrix import Matrix
from nano_oasis.kernels.simd import jit
from nano_oasis.kernels.simd_share import begin, entry, finish, place
from nano_oasis.kernels.workers import run_shares

ALONE = 8  # rows: so few are done at once by the thread that called
TOGETHER = 192  # rows of many: what is between two products stays in the cache, and so do the weights
_NONE = np.empty(0, np.float32)


class CompiledLayer:
    """The halves of one layer. `weights` has the fields of layer.Layer. tiles: see cpu_linear.linear_rows."""

    def __init__(self, weights: Any, tiles: bool = False) -> None:
        self.tiles = tiles and simd_tiles.allowed()
        self.heads, self.kv_heads, self.head_dim = weights.heads, weights.kv_heads, weights.head_dim
        self.gelu, self.eps = weights.activation == "gelu_tanh", weights.eps
        self.hidden, self.inner = weights.qkv.shape[1], weights.down.shape[1]
        self._first = (
            _vector(weights.attn_norm), *arrays_of(weights.qkv), _vector(weights.qkv_bias),
            _vector(weights.q_norm), _vector(weights.k_norm),
        )  # fmt: skip
        self._second = (
            *arrays_of(weights.out), _vector(weights.out_bias), _vector(weights.post_attn_norm),
            _vector(weights.mlp_norm), *arrays_of(weights.gate_up), _vector(weights.gate_up_bias),
            *arrays_of(weights.down), _vector(weights.down_bias), _vector(weights.post_mlp_norm),
        )  # fmt: skip

    def before(self, x: Tensor, h: Tensor | None, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See Layer.before; x is written to."""
        rows, most = len(x), most_shares()
        qkv = np.empty((rows, self.heads + 2 * self.kv_heads, self.head_dim), np.float32)
        q = np.empty((rows, self.heads, self.head_dim), np.float32)
        k = np.empty((rows, self.kv_heads, self.head_dim), np.float32)
        residual, turns, flat = x.numpy(), angles.numpy(), qkv.reshape(rows, -1)
        added = np.empty((0, self.hidden), np.float32) if h is None else h.numpy()
        together = min(rows, TOGETHER)
        normed = np.empty((together, self.hidden), np.float32)
        room = scratch(most, together, self.hidden)
        for low in range(0, rows, TOGETHER):
            part = slice(low, low + TOGETHER)
            run_shares(
                _before, most, residual[part], added[part], turns[part], *self._first, self.eps,
                normed[: rows - low], flat[part], qkv[part], q[part], k[part], room, self.tiles,
            )  # fmt: skip
        v = torch.from_numpy(qkv)[:, self.heads + self.kv_heads :]
        return x, torch.from_numpy(q), torch.from_numpy(k), v

    def after(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """See Layer.after; x is written to."""
        rows, most, together = len(x), most_shares(), min(len(x), TOGETHER)
        out = np.empty((rows, self.hidden), np.float32)
        normed = np.empty((together, self.hidden), np.float32)
        gate_up = np.empty((together, 2 * self.inner), np.float32)
        gated = np.empty((together, self.inner), np.float32)
        room = scratch(most, together, max(self.hidden, self.inner, attended.shape[1]))
        residual, values = x.numpy(), attended.numpy()
        for low in range(0, rows, TOGETHER):
            part, n = slice(low, low + TOGETHER), rows - low
            run_shares(
                _after, most, residual[part], values[part], *self._second, self.gelu, self.eps, out[part],
                normed[:n], gate_up[:n], gated[:n], room, self.tiles,
            )  # fmt: skip
        return x, torch.from_numpy(out)


def can_compile(weights: Any) -> bool:
    """fp32 activations on the CPU, sizes of whole vectors; see cpu_linear.supports."""
    matrices: list[Matrix] = [weights.qkv, weights.out, weights.gate_up, weights.down]
    like = torch.empty(0, weights.qkv.shape[1])
    whole = all(n % 16 == 0 for n in (weights.qkv.shape[1], weights.down.shape[1], weights.head_dim))
    return whole and all(supports(like, m) for m in matrices)


def _vector(tensor: Tensor | None) -> np.ndarray:
    """A bias or a norm's weights; empty where there are none."""
    return _NONE if tensor is None else tensor.detach().float().contiguous().numpy()


# --- jobs: each on `shares` threads, or at once by this one ---------------------------------------------
@jit
def _before(box, most, args):  # type: ignore[no-untyped-def]
    (
        x, h, angles, norm, w, scales, mins, bias, q_norm, k_norm, eps, normed, flat, qkv, q, k, scratch,
        tiles,
    ) = args  # fmt: skip
    _add_norm(box, most, x, h, norm, eps, normed)
    multiply(box, most, w, scales, mins, normed, flat, scratch, tiles)
    rest = (flat, bias, qkv, angles, q_norm, k_norm, eps, q, k)
    if len(x) <= ALONE:
        _rotate_share(0, 1, flat, bias, qkv, angles, q_norm, k_norm, eps, q, k)
    else:
        begin(box, entry(_rotate_share, rest), place(rest), most)
        finish(box)


@jit
def _after(box, most, args):  # type: ignore[no-untyped-def]
    (
        x, attended, out_w, out_scales, out_mins, out_bias, post_attn, mlp_norm, up_w, up_scales, up_mins,
        up_bias, down_w, down_scales, down_mins, down_bias, post_mlp, gelu, eps, out, normed, gate_up, gated,
        scratch, tiles,
    ) = args  # fmt: skip
    multiply(box, most, out_w, out_scales, out_mins, attended, out, scratch, tiles)
    _finish_block(box, most, out, out_bias, post_attn, eps)
    _add_norm(box, most, x, out, mlp_norm, eps, normed)
    multiply(box, most, up_w, up_scales, up_mins, normed, gate_up, scratch, tiles)
    _gate(box, most, gate_up, up_bias, gelu, gated)
    multiply(box, most, down_w, down_scales, down_mins, gated, out, scratch, tiles)
    _finish_block(box, most, out, down_bias, post_mlp, eps)


@jit
def _add_norm(box, most, x, h, weight, eps, out):  # type: ignore[no-untyped-def]
    """x += h, if there is any; out = the norm of x."""
    if len(x) <= ALONE:
        _add_norm_share(0, 1, x, h, weight, eps, out)
        return
    args = (x, h, weight, eps, out)
    begin(box, entry(_add_norm_share, args), place(args), most)
    finish(box)


@jit
def _gate(box, most, gate_up, bias, gelu, out):  # type: ignore[no-untyped-def]
    if len(out) <= ALONE:
        _gate_share(0, 1, gate_up, bias, gelu, out)
        return
    args = (gate_up, bias, gelu, out)
    begin(box, entry(_gate_share, args), place(args), most)
    finish(box)


@jit
def _finish_block(box, most, out, bias, norm, eps):  # type: ignore[no-untyped-def]
    """What some families do to a block's result: a bias, a norm. In place."""
    if not len(bias) and not len(norm):
        return
    args = (out, bias, norm, eps)
    begin(box, entry(_finish_share, args), place(args), most)
    finish(box)


# --- a share of the rows --------------------------------------------------------------------------------
@jit
def _add_norm_share(share, shares, x, h, weight, eps, out):  # type: ignore[no-untyped-def]
    low, high = len(x) * share // shares, len(x) * (share + 1) // shares
    if len(h):
        add_norm_rows(x[low:high], h[low:high], weight, eps, out[low:high])
    else:
        norm_rows(x[low:high], weight, eps, out[low:high])


@jit
def _rotate_share(share, shares, flat, bias, qkv, angles, q_norm, k_norm, eps, q, k):  # type: ignore[no-untyped-def]
    low, high = len(q) * share // shares, len(q) * (share + 1) // shares
    add_bias(flat[low:high], bias)
    rotate_rows(qkv[low:high], angles[low:high], q_norm, k_norm, eps, q[low:high], k[low:high])


@jit
def _gate_share(share, shares, gate_up, bias, gelu, out):  # type: ignore[no-untyped-def]
    low, high = len(out) * share // shares, len(out) * (share + 1) // shares
    add_bias(gate_up[low:high], bias)
    gate_rows(gate_up[low:high], gelu, out[low:high])


@jit
def _finish_share(share, shares, out, bias, norm, eps):  # type: ignore[no-untyped-def]
    low, high = len(out) * share // shares, len(out) * (share + 1) // shares
    add_bias(out[low:high], bias)
    if len(norm):
        norm_rows(out[low:high], norm, eps, out[low:high])
