"""Tiny random checkpoints of every family, as safetensors folders and as GGUF files, for the tests.

Owns: what such a checkpoint looks like. Must not use nano_oasis: it is the other side of the comparison.
Safetensors come from transformers' own save_pretrained; GGUF names, row order, norm offsets and keys are
those of llama.cpp's converter, written with the gguf package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
_ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_TINY: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_TINY_OF: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 16},
}


def make_hf(
    family: str,
    folder: Path | None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Any:
    """Save a random model of `family` in `folder` (None: do not save) and return the transformers model.

    The model is in eval mode and holds the saved weights in float32. Overrides are fields of the
    family's transformers config; `max_shard_size="100KB"` makes several shards and an index. Unlike a
    fresh transformers model, norms and biases are random too and logits spread widely, so that a mistake
    in any of them changes the output.
    """
    config_class, model_class = _CLASSES[family]
    fields = {**_TINY, **_TINY_OF[family], **overrides}
    if family == "qwen2":
        fields.pop("head_dim")  # the family has no such field
    config = config_class(**fields, attn_implementation="eager")
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.copy_(0.2 * torch.randn_like(p) + (0.0 if family == "gemma3" else 1.0))
            elif name.endswith("bias"):
                p.copy_(0.2 * torch.randn_like(p))
            elif "embed_tokens" in name:
                p.copy_(torch.randn_like(p) * 0.3)
            else:
                p.copy_(torch.randn_like(p) * (1.5 / math.sqrt(p.shape[-1])))
            p.copy_(p.to(dtype).float())
    if folder is not None:
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float()


def hf_state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors folder, as stored."""
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state |= load_file(shard)
    return state


def hf_to_gguf(
    folder: Path,
    out_path: Path,
    quant: str = "F32",
    *,
    state: dict[str, torch.Tensor] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write the GGUF that llama.cpp's converter would make of a safetensors folder; returns `out_path`.

    quant: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1 for matrices (vectors stay F32). `state` replaces
    the folder's tensors. `extra(writer)` adds metadata, such as a vocabulary. One addition to the
    converter: Mistral's sliding window is written, which llama.cpp would drop.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    state = hf_state(folder) if state is None else state
    arch = _ARCHS[config.model_type]
    writer = gguf.GGUFWriter(out_path, gguf.MODEL_ARCH_NAMES[arch])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _write_keys(writer, config, head_dim)
    if extra is not None:
        extra(writer)
    kind = gguf.GGMLQuantizationType[quant]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in state.items():
        data = tensor.float().numpy()
        if config.model_type in ("llama", "mistral") and ".q_proj." in name:
            data = _permute(data, config.num_attention_heads)
        if config.model_type in ("llama", "mistral") and ".k_proj." in name:
            data = _permute(data, config.num_key_value_heads)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            data = data + 1
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, f"no GGUF name for {name}"
        _write_tensor(writer, new_name, data, kind)
    factors = _llama3_factors(_rope_of(config), head_dim)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out_path


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if data.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
    elif kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, data.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def _permute(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from halves (i, i + d/2) to neighbours (2i, 2i + 1), per head: the order of GGUF."""
    per_head = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(data.shape)


def _rope_of(config: Any) -> dict[str, Any]:
    """Rope parameters of the full-attention layers."""
    rope = config.rope_parameters
    return rope.get("full_attention", rope)


def _write_keys(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    assert not getattr(config, "use_sliding_window", False), "GGUF has no field for Qwen's sliding window"
    if config.model_type != "gemma3_text":
        writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    rope = _rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] not in ("default", "llama3"):
        raise ValueError(f"no GGUF form for rope type {rope['rope_type']}")
    for name in ("bos", "eos"):
        value = getattr(config, f"{name}_token_id")
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            getattr(writer, f"add_{name}_token_id")(value)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray | None:
    """The divisors of each rope frequency under Llama 3 scaling, [head_dim / 2]; None for other types."""
    if rope["rope_type"] != "llama3":
        return None
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    freqs = rope["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * freqs / (2 * math.pi)  # within the trained context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
