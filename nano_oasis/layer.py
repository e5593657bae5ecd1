"""One layer of the decoder without its attention: what comes before, and what comes after.

Owns: a layer's weights and its arithmetic. Must not know: where weights come from, KV, what is attended to.

    before:  x += h;  q, k, v = rotated (x's norm through qkv)
    after:   h = attended through out;  x += h;  h = x's norm through gate and up, activation, down

x is the residual stream, h what the last block gives and the next step adds: sum and norm are then one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nano_oasis.kernels.dispatch import numba_works
from nano_oasis.kernels.linear import linear
from nano_oasis.kernels.matrix import Matrix
from nano_oasis.kernels.pointwise import add_norm, gated, norm, norm_rotate

if TYPE_CHECKING:
    from nano_oasis.kernels.cpu_layer import CompiledLayer

Tensor = torch.Tensor


@dataclass
class Layer:
    """Matrices are [out, in], fused where one product serves several."""

    attn_norm: Tensor  # [H]
    qkv: Matrix  # [(heads + 2 kv_heads) * D, H]
    qkv_bias: Tensor | None
    out: Matrix  # [H, heads * D]
    out_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix  # [2 * I, H]
    gate_up_bias: Tensor | None
    down: Matrix  # [H, I]
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    window: int | None
    local_rope: bool
    heads: int
    kv_heads: int
    head_dim: int
    activation: str  # "silu" or "gelu_tanh"
    eps: float
    compiled: CompiledLayer | None = field(
        default=None, repr=False
    )  # the same in two calls, where that exists

    def compile(self, dtype: torch.dtype, rounded: bool = False) -> None:
        """Use the compiled halves, if there are any for such weights and activations of that type.

        rounded: products of many rows may treat a float32 as the sum of two bfloat16, where the CPU has a
        unit for these. So they may after torch.set_float32_matmul_precision("high").
        """
        if dtype != torch.float32 or self.qkv.device.type != "cpu" or not numba_works():
            return
        from nano_oasis.kernels.cpu_layer import CompiledLayer, can_compile

        if can_compile(self):
            rounded = rounded or torch.get_float32_matmul_precision() != "highest"
            self.compiled = CompiledLayer(self, tiles=rounded)

    def before(self, x: Tensor, h: Tensor | None, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, h [T, H], angles [T, 2, D] -> x + h, q [T, heads, D], k, v [T, kv_heads, D]. May write to x."""
        if self.compiled is not None:
            return self.compiled.before(x, h, angles)
        x, normed = add_norm(x, h, self.attn_norm, self.eps)
        qkv = linear(normed, self.qkv, self.qkv_bias).view(len(x), -1, self.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm, self.k_norm
        return x, *norm_rotate(qkv, self.heads, self.kv_heads, angles, norms, self.eps)

    def after(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], attended [T, heads * D] -> x with attention's part, the MLP's part. May write to x."""
        if self.compiled is not None:
            return self.compiled.after(x, attended)
        h = linear(attended, self.out, self.out_bias)
        if self.post_attn_norm is not None:
            h = norm(h, self.post_attn_norm, self.eps)
        x, normed = add_norm(x, h, self.mlp_norm, self.eps)
        gate_up = linear(normed, self.gate_up, self.gate_up_bias)
        h = linear(gated(gate_up, self.activation), self.down, self.down_bias)
        return x, h if self.post_mlp_norm is None else norm(h, self.post_mlp_norm, self.eps)
