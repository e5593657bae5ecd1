"""What lies between the products of a layer, in torch: residual sums, norms, rotation, the gated activation.

Owns: these operations. Must not know: weights' names, families, KV. cpu_pointwise.py has them compiled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def add_norm(x: Tensor, h: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, h [T, H] -> (x + h, its RMSNorm), both [T, H]; without h the first is x itself."""
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
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
