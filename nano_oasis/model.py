"""The decoder: one forward pass for every supported family.

Owns: where each weight goes, and the way through the layers (layer.py). The families differ only in
ModelConfig's fields:

    | family       | bias on q,k,v | q/k norm | norms after blocks | windows | activation | embed scale |
    | llama        | config        | no       | no                 | none    | silu       | 1           |
    | mistral      | no            | no       | no                 | all     | silu       | 1           |
    | qwen2        | yes           | no       | no                 | some    | silu       | 1           |
    | qwen3        | config        | yes      | no                 | some    | silu       | 1           |
    | gemma3       | config        | yes      | yes                | 5 of 6  | gelu_tanh  | sqrt(H)     |

Must not know: requests, sampling, files. What to attend to is an argument, never a global.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nano_oasis.config import ModelConfig
from nano_oasis.kernels.linear import linear
from nano_oasis.kernels.matrix import Matrix, join, parts_of, rebuilt, rows_of
from nano_oasis.kernels.pointwise import add_norm
from nano_oasis.layer import Layer
from nano_oasis.memory.dense_kv import KVView
from nano_oasis.memory.huge_pages import on_huge_pages
from nano_oasis.rope import rope_table


def _take_layer(config: ModelConfig, w: dict[str, Any], i: int) -> Layer:
    """Move layer i's tensors out of `w`, fusing as it goes, so no layer exists twice for long."""

    def take(name: str) -> torch.Tensor | None:
        return w.pop(f"layers.{i}.{name}", None)

    def fuse(*names: str) -> Matrix:
        return join([w.pop(f"layers.{i}.{n}") for n in names])

    def fuse_bias(wanted: bool, *names: str) -> torch.Tensor | None:
        return torch.cat([w.pop(f"layers.{i}.{n}") for n in names]) if wanted else None

    window = config.window(i)
    qkv, out, gate_up, down = _side_by_side(
        [fuse("q", "k", "v"), w.pop(f"layers.{i}.o"), fuse("gate", "up"), w.pop(f"layers.{i}.down")]
    )
    return Layer(
        attn_norm=w.pop(f"layers.{i}.attn_norm"),
        qkv=qkv,
        qkv_bias=fuse_bias(config.qkv_bias, "q_bias", "k_bias", "v_bias"),
        out=out,
        out_bias=take("o_bias"),
        q_norm=take("q_norm"),
        k_norm=take("k_norm"),
        post_attn_norm=take("post_attn_norm"),
        mlp_norm=w.pop(f"layers.{i}.mlp_norm"),
        gate_up=gate_up,
        gate_up_bias=fuse_bias(config.mlp_bias, "gate_bias", "up_bias"),
        down=down,
        down_bias=take("down_bias"),
        post_mlp_norm=take("post_mlp_norm"),
        window=window,
        local_rope=config.rope_local is not None and window is not None,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        activation=config.activation,
        eps=config.rms_eps,
    )


def _side_by_side(matrices: list[Matrix]) -> list[Matrix]:
    """Where a layer's matrices lie in memory decides how fast a step of few rows can read them."""
    placed = iter(on_huge_pages([part for m in matrices for part in parts_of(m)]))
    return [rebuilt(m, [next(placed) for _ in parts_of(m)]) for m in matrices]


class Model:
    """Weights on one device, ready to run."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Any],
        max_len: int,
        dtype: torch.dtype | None = None,
        rounded: bool = False,
    ) -> None:
        """weights: by canonical name, see weights.Checkpoint; emptied. max_len: the longest position plus
        one. dtype: of activations; matrices may be kept in another format. Default: the embedding's.
        rounded: see Layer.compile; for weights that are not the file's own numbers anyway."""
        embed, head = weights.pop("embed"), weights.pop("lm_head")
        self.config = config
        self.dtype = dtype or (embed.dtype if isinstance(embed, torch.Tensor) else torch.float32)
        (self.embed,) = _side_by_side([embed])  # [V, H]
        self.lm_head = self.embed if head is embed else _side_by_side([head])[0]  # [V, H]
        self.final_norm = weights.pop("final_norm")
        self.layers = [_take_layer(config, weights, i) for i in range(config.num_layers)]
        if weights:
            raise ValueError(f"tensors left over after loading: {', '.join(sorted(weights)[:5])}")
        for layer in self.layers:
            layer.compile(self.dtype, rounded)
        self.device = device = self.embed.device
        self.rope = rope_table(config.rope, config.head_dim, max_len).to(device)
        self.rope_local = (
            rope_table(config.rope_local, config.head_dim, max_len).to(device) if config.rope_local else None
        )
        # What a decode step reads: of the embedding table only what is also the output head.
        self.weight_bytes = sum(t.nbytes for t in self._read())
        self.num_weights = sum(t.numel() for t in self._read())
        # The reference rounds the scale to the weights' dtype before multiplying.
        self.embed_scale = float(torch.tensor(config.embed_scale).to(self.dtype))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KVView,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Write this step's KV and return final hidden states.

        token_ids, positions: [T] int64, the rows of the step one after another. layers: those to run, for
        drafts; default: all. Returns [T, H].
        """
        x = rows_of(self.embed, token_ids, self.dtype)  # [T, H]
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        h: torch.Tensor | None = None  # what the block before adds to x
        angles = self.rope[positions].to(x.dtype)  # [T, 2, D]
        local = angles if self.rope_local is None else self.rope_local[positions].to(x.dtype)
        for i in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[i]
            x, q, k, v = layer.before(x, h, local if layer.local_rope else angles)
            kv.write(i, k, v)
            out = kv.attend(i, q, self.config.scale, layer.window)  # [T, heads, D]
            x, h = layer.after(x, out.reshape(len(x), -1))
        return add_norm(x, h, self.final_norm, self.config.rms_eps)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> fp32 [N, V]."""
        return linear(hidden, self.lm_head).float()

    def _read(self) -> list[Matrix]:
        tensors: list[Matrix] = [self.lm_head, self.final_norm]
        for layer in self.layers:
            tensors += [t for t in vars(layer).values() if isinstance(t, Matrix)]
        return tensors
