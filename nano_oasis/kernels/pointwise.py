"""What lies between the products of a layer: residual sums, norms, rotation, the gated activation.

Owns: these operations, and for how many rows they are compiled. Must not know: weights' names, families, KV.

One by one, in torch, they were 20% of a decode step of one stream on a small CPU: some 300 calls for hardly
any data. Compiled there are four a layer. With many rows torch's threads win.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nano_oasis.kernels.dispatch import numba_works

_COMPILED = 32  # rows: up to here

Tensor = torch.Tensor


def add_norm(x: Tensor, h: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, h [T, H] -> (x + h, its RMSNorm), both [T, H]; without h the first is x itself."""
    compiled = _compiled(x, x.shape[-1])
    if compiled is not None:
        total, out = compiled.add_norm(x, h, weight, eps)
        return total, out
    x = x if h is None else x + h
    return x, norm(x, weight, eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32 as every family's reference does."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def norm_rotate(
    qkv: Tensor, heads: int, kv_heads: int, angles: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, heads + 2 * kv_heads, D] -> q [T, heads, D], k and v [T, kv_heads, D].

    q and k are normalised if there are norms ([D] each) and then rotated; angles [T, 2, D]: cos and sin.
    v is a view of qkv.
    """
    compiled = _compiled(qkv, qkv.shape[-1])
    if compiled is not None:
        q, k = compiled.norm_rotate(qkv, heads, kv_heads, angles, norms, eps)
        return q, k, qkv[:, heads + kv_heads :]
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = norm(q, norms[0], eps), norm(k, norms[1], eps)
    cos, sin = angles[:, 0:1], angles[:, 1:2]
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2). x [T, heads, head_dim]; cos, sin [T, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * I] -> [T, I]: activation of the first half, times the second. "silu" or "gelu_tanh"."""
    compiled = _compiled(gate_up, gate_up.shape[-1] // 2)
    if compiled is not None:
        out: Tensor = compiled.gated(gate_up, activation)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _compiled(x: Tensor, width: int) -> Any:
    """The compiled versions, where they exist and are faster: fp32 on the CPU, whole vectors, few rows."""
    if len(x) > _COMPILED or width % 16 or x.dtype != torch.float32 or x.device.type != "cpu":
        return None
    if not numba_works():
        return None
    from nano_oasis.kernels import cpu_pointwise

    return cpu_pointwise
