"""GGUF metadata to ModelConfig.

Owns: the keys of each architecture in GGUF files and the values llama.cpp assumes when they are absent.
Must not know: the file layout, config.json.
"""

from __future__ import annotations

import math

from nano_oasis.config import ModelConfig, RopeConfig
from nano_oasis.weights.config_json import check_config
from nano_oasis.weights.errors import CheckpointError
from nano_oasis.weights.fields import Fields
from nano_oasis.weights.gguf_scan import GGUFHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral files say llama
# Features of other models under the same architecture names; 0 and false mean "not used".
_REFUSED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attention.shared_kv_layers",
    "rope.dimension_sections",
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_from_gguf(header: GGUFHeader, freq_factors: tuple[float, ...] | None = None) -> ModelConfig:
    """What the metadata says; biases and the tied head follow from which tensors there are.

    `freq_factors` is the content of the tensor rope_freqs, if the file has one. Raises CheckpointError
    naming the file and the key.
    """
    f = _fields(header)
    arch = f.prefix.removesuffix(".")
    gemma = arch == "gemma3"
    num_layers = f.integer("block_count", high=10_000)
    hidden = f.integer("embedding_length")
    heads = f.integer("attention.head_count")
    head_dim = f.integer("attention.key_length", hidden // heads)
    if f.integer("attention.value_length", head_dim) != head_dim:
        raise f.fail("attention.value_length", f"must equal attention.key_length ({head_dim})")
    if f.integer("rope.dimension_count", head_dim) != head_dim:
        raise f.fail("rope.dimension_count", f"must equal the head size ({head_dim}): no partial rotation")
    attn_scale = f.maybe_number("attention.scale") or 0.0
    if (
        gemma and num_layers == 62 and not attn_scale
    ):  # Gemma 3 27B scales by hidden size / heads; no key says so
        attn_scale = (hidden / heads) ** -0.5
    rope, max_position = _rope(f, arch, freq_factors)
    tokenizer = Fields(header.path, header.metadata, "tokenizer.ggml.")
    names = header.tensors
    return check_config(
        header.path,
        ModelConfig(
            family=arch,
            vocab_size=_vocab_size(header, f),
            hidden_size=hidden,
            intermediate_size=f.integer("feed_forward_length"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=f.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position=max_position,
            rms_eps=f.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            rope_local=RopeConfig(theta=f.number("rope.freq_base_swa", 1e4)) if gemma else None,
            windows=_windows(f, gemma, num_layers),
            tie_embeddings="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            o_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
            qk_norm=arch in ("qwen3", "gemma3"),
            sandwich_norms=gemma,
            activation="gelu_tanh" if gemma else "silu",
            embed_scale=hidden**0.5 if gemma else 1.0,
            attn_scale=attn_scale,
            bos_token_id=tokenizer.maybe_integer("bos_token_id", low=0, high=2**32 - 1),
            eos_token_ids=tuple(dict.fromkeys(i for key in _END_KEYS for i in tokenizer.token_ids(key))),
        ),
    )


def _fields(header: GGUFHeader) -> Fields:
    """The architecture's own keys. Refuses architectures and features that are not supported."""
    general = Fields(header.path, header.metadata, "general.")
    arch = general.text("architecture", "")
    if arch not in ARCHITECTURES or general.text("type", "model") != "model":
        raise CheckpointError.at(
            header.path,
            f"architecture {arch!r} (type {general.raw('type') or 'model'!r}) is not supported; "
            f"supported GGUF architectures: {', '.join(ARCHITECTURES)}",
        )
    f = Fields(header.path, header.metadata, f"{arch}.")
    for name in _REFUSED:
        f.refuse(name, 0)
    f.refuse("attention.causal", True)
    return f


def _vocab_size(header: GGUFHeader, f: Fields) -> int:
    """Rows of the embedding, which a padded vocabulary makes more than there are tokens."""
    embed = header.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError.at(header.path, "tensor 'token_embd.weight' is missing or is not a matrix")
    stated = f.maybe_integer("vocab_size")
    if stated is not None and stated > embed.shape[0]:
        raise f.fail("vocab_size", f"is {stated}, but tensor 'token_embd.weight' has {embed.shape[0]} rows")
    return embed.shape[0]


def _rope(f: Fields, arch: str, freq_factors: tuple[float, ...] | None) -> tuple[RopeConfig, int]:
    """Rope of the (full-attention) layers, and the context length with its scaling."""
    max_position = f.integer("context_length")
    theta = f.number("rope.freq_base", 1e6 if arch == "gemma3" else 1e4)
    keys = ("rope.scaling.factor", "rope.scale_linear")  # the second is from old files; 0 means "no scaling"
    factor = next((f.number(key) for key in keys if f.raw(key) not in (None, 0)), None)
    kind = f.text("rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise f.fail("rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn")
    if kind == "none" or not factor or factor == 1:
        return RopeConfig(theta, freq_factors=freq_factors), max_position
    if kind == "linear":
        return RopeConfig(theta, "linear", factor, freq_factors=freq_factors), max_position
    original = f.integer("rope.scaling.original_context_length", max_position)
    # llama.cpp multiplies the derived factor of cos and sin by this key.
    scale = f.maybe_number("rope.scaling.yarn_attn_factor") or f.maybe_number("rope.scaling.attn_factor")
    rope = RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=f.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=f.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if scale is None else scale * (1 + 0.1 * math.log(max(factor, 1.0))),
        freq_factors=freq_factors,
    )
    f.refuse("rope.scaling.yarn_ext_factor", 1, -1)
    f.refuse("rope.scaling.yarn_log_multiplier", 0)
    return rope, max(max_position, int(original * factor))


def _windows(f: Fields, gemma: bool, num_layers: int) -> tuple[int | None, ...]:
    """Per layer the sliding window in tokens, None = full attention; () when all layers are full."""
    size = f.maybe_integer("attention.sliding_window", low=0)
    if not size:
        if gemma:
            raise f.fail("attention.sliding_window", "is missing")
        return ()
    if not f.has("attention.sliding_window_pattern"):
        return tuple(None if gemma and (i + 1) % 6 == 0 else size for i in range(num_layers))
    pattern = f.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(p in (0, 1) for p in pattern):
            raise f.fail(
                "attention.sliding_window_pattern", f"must be {num_layers} flags, got {pattern!r:.80}"
            )
        return tuple(size if sliding else None for sliding in pattern)
    every = f.integer("attention.sliding_window_pattern")
    return tuple(None if (i + 1) % every == 0 else size for i in range(num_layers))
