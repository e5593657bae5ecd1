"""config.json, generation_config.json and GGUF keys to ModelConfig, against what transformers understands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_checkpoints import FAMILIES, hf_to_gguf, make_hf

from nano_oasis.config import ModelConfig
from nano_oasis.weights import CheckpointError, load_config
from nano_oasis.weights.config_json import config_from_folder

BASE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}


def write(folder: Path, family: str, drop: tuple[str, ...] = (), **fields: Any) -> Path:
    config = {"model_type": MODEL_TYPES[family], **BASE, **fields}
    for name in drop:
        config.pop(name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, family: str, drop: tuple[str, ...] = (), **fields: Any) -> ModelConfig:
    return config_from_folder(write(folder, family, drop, **fields))


def test_b067_explicit_head_dim(tmp_path: Path) -> None:
    """head_dim x heads need not be the hidden size."""
    assert read(tmp_path, "qwen3", head_dim=32).head_dim == 32
    assert read(tmp_path, "llama", ("head_dim",)).head_dim == 16
    assert read(tmp_path, "llama", head_dim=None).head_dim == 16
    make_hf("llama", tmp_path, head_dim=24)
    assert load_config(tmp_path).head_dim == 24
    assert load_config(hf_to_gguf(tmp_path, tmp_path / "m.gguf")).head_dim == 24


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*BASE, "rope_theta", "tie_word_embeddings", "hidden_act", "sliding_window"])
def test_b067_absent_fields_have_the_default_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    """Dropping a field gives what transformers' default spelled out gives, or an error that names it."""
    values = {**BASE, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096}
    if family == "gemma3":  # its default of 8 heads must fit
        values["num_key_value_heads"] = 4
    values.pop(name, None)
    values["model_type"] = MODEL_TYPES[family]
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    try:
        absent = config_from_folder(tmp_path)
    except CheckpointError as error:
        assert name in str(error) and name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        return
    heads = hf.num_attention_heads
    assert absent.num_heads == heads and absent.num_kv_heads == hf.num_key_value_heads
    assert absent.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // heads)
    assert absent.max_position == hf.max_position_embeddings and absent.rms_eps == hf.rms_norm_eps
    assert absent.tie_embeddings == hf.tie_word_embeddings
    rope = hf.rope_parameters
    assert absent.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    act = getattr(hf, "hidden_act", None) or hf.hidden_activation
    assert absent.activation == {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[act]
    if family == "mistral":
        assert absent.windows == (hf.sliding_window,) * hf.num_hidden_layers


def test_windows_per_family(tmp_path: Path) -> None:
    assert read(tmp_path, "llama").windows == ()
    assert read(tmp_path, "mistral", sliding_window=None).windows == ()
    assert read(tmp_path, "mistral", sliding_window=100).windows == (100,) * 8
    qwen = {"sliding_window": 64, "max_window_layers": 5}
    for family in ("qwen2", "qwen3"):
        assert read(tmp_path, family, **qwen, use_sliding_window=False).windows == ()
        assert read(tmp_path, family, **qwen, use_sliding_window=True).windows == (None,) * 5 + (64,) * 3
        types = ["sliding_attention", "full_attention"] * 4
        explicit = read(tmp_path, family, **qwen, use_sliding_window=True, layer_types=types)
        assert explicit.windows == (64, None) * 4
        with pytest.raises(CheckpointError, match="no sliding window is set"):
            read(tmp_path, family, **qwen, use_sliding_window=False, layer_types=types)
    assert read(tmp_path, "gemma3", sliding_window=32).windows == (32,) * 5 + (None,) + (32,) * 2
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        assert read(tmp_path, "gemma3", sliding_window=32, **{name: 2}).windows == (32, None) * 4
    types = ["full_attention"] * 7 + ["sliding_attention"]
    assert read(tmp_path, "gemma3", sliding_window=32, layer_types=types).windows == (None,) * 7 + (32,)
    for bad in (types[:3], [*types[:7], "chunked_attention"], "full_attention"):
        with pytest.raises(CheckpointError, match="layer_types"):
            read(tmp_path, "gemma3", layer_types=bad)


def test_windows_from_gguf(tmp_path: Path) -> None:
    make_hf("mistral", tmp_path, sliding_window=40)
    assert load_config(hf_to_gguf(tmp_path, tmp_path / "m.gguf")).windows == (40,) * 3
    make_hf("gemma3", tmp_path)
    for extra, wanted in (
        (None, (24,) * 5 + (None, 24)),
        (lambda w: w.add_sliding_window_pattern(3), (24, 24, None, 24, 24, None, 24)),
        (lambda w: w.add_sliding_window_pattern([True, False] * 3 + [True]), (24, None) * 3 + (24,)),
    ):
        assert load_config(hf_to_gguf(tmp_path, tmp_path / "m.gguf", extra=extra)).windows == wanted


def test_gemma3_scales(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma3", query_pre_attn_scalar=168)
    assert config.scale == 168**-0.5 and config.embed_scale == 8.0
    assert config.activation == "gelu_tanh" and config.sandwich_norms and config.qk_norm
    make_hf("gemma3", tmp_path, num_hidden_layers=62, head_dim=16, num_attention_heads=2)
    config = load_config(hf_to_gguf(tmp_path, tmp_path / "m.gguf"))  # the 27B model has 62 layers
    assert config.scale == 32**-0.5


def test_b069_end_tokens_are_a_union(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", eos_token_id=2, bos_token_id=1).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    config = read(tmp_path, "llama", eos_token_id=2, bos_token_id=0)
    assert config.eos_token_ids == (2, 7) and config.bos_token_id == 0
    assert read(tmp_path, "llama", eos_token_id=[5, 6], bos_token_id=None).eos_token_ids == (5, 6, 2, 7)
    assert read(tmp_path, "llama", eos_token_id=-1).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*eos_token_id"):
        read(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink()
    make_hf("llama", tmp_path)
    path = hf_to_gguf(tmp_path, tmp_path / "m.gguf", extra=lambda w: w.add_eot_token_id(9))
    assert load_config(path).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen3Model"]}, "Qwen3Model.*supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"model_type": None}, "supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "hidden_act.*'relu'"),
        ({"hidden_size": "64"}, "hidden_size' must be an integer"),
        ({"hidden_size": True}, "hidden_size' must be an integer"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers' must be between"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 15}, "head size 15"),
        ({"max_position_embeddings": 2**31 - 1}, "context length"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e29}}, "context length"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1.5]}, "eos_token_id"),
    ],
)
def test_refusals_name_file_and_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, "llama", **fields)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), None),
        (
            lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), w.add_rope_scaling_factor(2)),
            "longrope",
        ),
        (lambda w: w.add_final_logit_softcapping(30.0), "softcapping"),
        (lambda w: w.add_type("adapter"), "adapter"),
    ],
)
def test_gguf_refusals(add: Callable[[gguf.GGUFWriter], Any], message: str | None, tmp_path: Path) -> None:
    make_hf("llama", tmp_path)
    path = hf_to_gguf(tmp_path, tmp_path / "m.gguf", extra=add)
    with pytest.raises(CheckpointError, match=message or "longrope"):
        load_config(path)


def test_b071_unknown_gguf_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'falcon'.*llama, qwen2, qwen3, gemma3"):
        load_config(tmp_path / "m.gguf")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    *BASE,
    *("model_type", "architectures", "rope_scaling", "rope_parameters", "rope_theta", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings", "eos_token_id"),
    *("bos_token_id", "hidden_act", "attention_bias", "text_config", "query_pre_attn_scalar"),
    *("sliding_window_pattern", "quantization_config", "num_experts"),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(family=st.sampled_from(FAMILIES), fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3))
def test_any_json_value_is_accepted_or_refused_by_name(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    try:
        config = read(tmp_path, family, **fields)
    except CheckpointError as error:
        assert "config.json" in str(error)
    else:
        assert config.num_heads % config.num_kv_heads == 0 and len(config.windows) in (0, config.num_layers)
