"""config.json and generation_config.json to ModelConfig.

Owns: the fields of each family in Hugging Face checkpoints, their spellings over the years, and the
defaults transformers gives to absent ones. Must not know: tensors, GGUF.
"""

from __future__ import annotations

from pathlib import Path

from nano_oasis.config import ROPE_TYPES, ModelConfig, RopeConfig
from nano_oasis.weights.errors import CheckpointError
from nano_oasis.weights.fields import Fields, read_json

# model_type -> family, and the classes that are the plain text model with a language-model head
_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",  # the vision model: its text part is loaded
}
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
)
MAX_POSITION = 2**24  # as for --max-model-len
# What transformers assumes when config.json does not say.
_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "gemma3": 131072}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma3": 4}  # llama: as many as heads
_HEAD_DIM = {"qwen3": 128, "gemma3": 256}  # the others: hidden size / heads
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
_ROPE_KEYS |= {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast"}
_ROPE_KEYS |= {"beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}


def config_from_folder(folder: Path) -> ModelConfig:
    """Read config.json and, if there, generation_config.json. CheckpointErrors name file and field."""
    path = folder / "config.json"
    outer = Fields(path, read_json(path))
    f, family = _text_part(outer)
    gemma = family == "gemma3"
    num_layers = f.integer("num_hidden_layers", high=10_000)
    hidden = f.integer("hidden_size")
    heads = f.integer("num_attention_heads", 8 if gemma else None)
    # An absent number of KV heads has the family's default; an explicit null means "as many as heads".
    kv_default = heads if f.has("num_key_value_heads") else _KV_HEADS.get(family, heads)
    max_position = f.integer("max_position_embeddings", _MAX_POSITION[family])
    rope, rope_local = _ropes(f, family, max_position)
    if rope.type == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    bias = f.flag("attention_bias", False) if family in ("llama", "qwen3", "gemma3") else False
    activation = f.text(
        "hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu"
    )
    if activation not in _ACTIVATIONS:
        raise f.fail("hidden_act", f"is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    return check_config(
        path,
        ModelConfig(
            family=family,
            vocab_size=f.integer("vocab_size", 262_208 if gemma else None),
            hidden_size=hidden,
            intermediate_size=f.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=f.integer("num_key_value_heads", kv_default),
            head_dim=f.integer("head_dim", _HEAD_DIM.get(family, hidden // heads)),
            max_position=max_position,
            rms_eps=f.number("rms_norm_eps", 1e-6),
            rope=rope,
            rope_local=rope_local,
            windows=_windows(f, family, num_layers),
            tie_embeddings=f.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", gemma)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=f.flag("mlp_bias", False) if family == "llama" else False,
            qk_norm=family in ("qwen3", "gemma3"),
            sandwich_norms=gemma,
            activation=_ACTIVATIONS[activation],
            embed_scale=hidden**0.5 if gemma else 1.0,
            attn_scale=f.number("query_pre_attn_scalar", 256) ** -0.5 if gemma else 0.0,
            bos_token_id=next(iter(f.token_ids("bos_token_id") or outer.token_ids("bos_token_id")), None),
            eos_token_ids=_end_tokens(folder, f, outer),
        ),
    )


def check_config(path: Path, c: ModelConfig) -> ModelConfig:
    """Refuse shapes that no decoder could have; returns `c`. Used for GGUF files too."""
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError.at(
            path, f"{c.num_heads} attention heads cannot share {c.num_kv_heads} KV heads: not a multiple"
        )
    if c.head_dim < 2 or c.head_dim % 2:
        raise CheckpointError.at(path, f"head size {c.head_dim} is not even; rotary embedding turns pairs")
    if c.max_position > MAX_POSITION:
        raise CheckpointError.at(path, f"context length {c.max_position} is above {MAX_POSITION} (damaged?)")
    return c


def _text_part(outer: Fields) -> tuple[Fields, str]:
    """The fields of the text model, and its family. Refuses what is not supported."""
    model_type = outer.text("model_type", "")
    architectures = outer.raw("architectures")
    named = architectures if isinstance(architectures, list) and architectures else [None]
    if model_type not in _MODEL_TYPES or named[0] not in (None, *ARCHITECTURES):
        raise CheckpointError.at(
            outer.path,
            f"architecture {named[0]!r} with model_type {model_type!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)} (model_type {', '.join(_MODEL_TYPES)})",
        )
    f = (outer.section("text_config") if model_type == "gemma3" else None) or outer
    for name in ("quantization_config", "attn_logit_softcapping", "final_logit_softcapping"):
        f.refuse(name)
        outer.refuse(name)
    for name in ("num_experts", "num_local_experts", "use_bidirectional_attention"):
        f.refuse(name, 0)
    f.refuse("partial_rotary_factor", 1)
    return f, _MODEL_TYPES[model_type]


def _ropes(f: Fields, family: str, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rope of the (full-attention) layers, and of the sliding layers where it differs in kind (Gemma 3).

    Until transformers 5: rope_theta beside rope_scaling. Since then: rope_parameters holds both, for
    Gemma 3 one object per layer type. rope_scaling wins where both are present, as in transformers.
    """
    theta = f.number("rope_theta", 1e6 if family == "gemma3" else 1e4)
    scaling, parameters = f.section("rope_scaling"), f.section("rope_parameters")
    if family != "gemma3":
        return _rope(scaling or parameters, f, theta, max_position), None
    local_theta = f.number("rope_local_base_freq", 1e4)
    full, local = parameters, None
    if parameters is not None and (parameters.has(_FULL) or parameters.has(_SLIDING)):
        full, local = parameters.section(_FULL), parameters.section(_SLIDING)
    return _rope(scaling or full, f, theta, max_position), _rope(local, f, local_theta, max_position)


def _rope(given: Fields | None, f: Fields, theta: float, max_position: int) -> RopeConfig:
    if given is None:
        return RopeConfig(theta=theta)
    kind = given.text("rope_type", given.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise given.fail("rope_type", f"is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    for name in given.data:
        if name not in _ROPE_KEYS:
            raise given.fail(name, f"is not a known rope setting; known: {', '.join(sorted(_ROPE_KEYS))}")
    given.refuse("partial_rotary_factor", 1)
    theta = given.number("rope_theta", theta)
    original = given.integer(
        "original_max_position_embeddings", f.integer("original_max_position_embeddings", max_position)
    )
    if kind == "default":
        given.refuse("factor", 1)
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta, kind, given.number("factor"))
    if kind == "llama3":
        low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
        if low >= high:
            raise given.fail("low_freq_factor", f"({low}) must be below high_freq_factor ({high})")
        return RopeConfig(theta, kind, given.number("factor"), original, low, high)
    return RopeConfig(
        theta,
        kind,
        given.number("factor", max_position / original),
        original,
        beta_fast=given.number("beta_fast", 32.0),
        beta_slow=given.number("beta_slow", 1.0),
        attention_factor=given.maybe_number("attention_factor"),
        mscale=given.maybe_number("mscale"),
        mscale_all_dim=given.maybe_number("mscale_all_dim"),
        truncate=given.flag("truncate", True),
    )


def _windows(f: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Per layer the sliding window in tokens, None = full attention; () when all layers are full."""
    size = f.maybe_integer("sliding_window") if f.has("sliding_window") else 4096
    if family in ("qwen2", "qwen3") and not f.flag("use_sliding_window", False):
        size = None
    if family == "mistral" and size is None:
        return ()
    types = _layer_types(f, family, num_layers, size)
    if _SLIDING in types and size is None:
        raise f.fail("layer_types", "has sliding-window layers, but no sliding window is set")
    return tuple(size if t == _SLIDING else None for t in types) if _SLIDING in types else ()


def _layer_types(f: Fields, family: str, num_layers: int, window: int | None) -> list[str]:
    given = f.raw("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != num_layers:
            raise f.fail("layer_types", f"must be a list of {num_layers} layer types, got {given!r:.80}")
        for kind in given:
            if kind not in (_SLIDING, _FULL):
                raise f.fail("layer_types", f"has {kind!r}; supported: {_FULL}, {_SLIDING}")
        return given
    if family == "gemma3":  # every sixth layer is full
        pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
        return [_FULL if (i + 1) % pattern == 0 else _SLIDING for i in range(num_layers)]
    if family == "mistral":
        return [_SLIDING] * num_layers
    if family in ("qwen2", "qwen3") and window is not None:
        first = f.integer("max_window_layers", 28, low=0)
        return [_SLIDING if i >= first else _FULL for i in range(num_layers)]
    return [_FULL] * num_layers  # transformers ignores sliding_window in a llama config


def _end_tokens(folder: Path, f: Fields, outer: Fields) -> tuple[int, ...]:
    """Union of the end tokens in config.json and generation_config.json, in that order."""
    ids = list(f.token_ids("eos_token_id") + outer.token_ids("eos_token_id"))
    path = folder / "generation_config.json"
    if path.exists():
        ids += Fields(path, read_json(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
