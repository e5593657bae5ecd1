"""Rope settings in every spelling, from config.json and GGUF keys: tables against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from make_checkpoints import hf_to_gguf, make_hf
from test_weights_config import read, write

from nano_oasis.config import ModelConfig
from nano_oasis.rope import rope_table
from nano_oasis.weights import CheckpointError, load_config

POSITIONS = torch.tensor([0, 1, 1000, 8192, 20000])


def hf_tables(folder: Path) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
    """transformers' cos and sin at POSITIONS, by layer type (None where there is one kind)."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    x, ids = torch.zeros(1), POSITIONS[None]
    if config.model_type == "gemma3_text":
        kinds = ("full_attention", "sliding_attention")
        return {k: tuple(t[0] for t in rotary(x, ids, k)) for k in kinds}  # type: ignore[misc]
    return {None: tuple(t[0] for t in rotary(x, ids))}  # type: ignore[dict-item]


def assert_tables(config: ModelConfig, wanted: dict[str | None, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for kind, (cos, sin) in wanted.items():
        rope = config.rope_local if kind == "sliding_attention" else config.rope
        assert rope is not None
        table = rope_table(rope, config.head_dim, int(POSITIONS.max()) + 1)[POSITIONS]
        # fp32 angles near 20,000 carry an error of about 1e-3 of their own.
        torch.testing.assert_close(table[:, 0], cos, rtol=0, atol=3e-3)
        torch.testing.assert_close(table[:, 1], sin, rtol=0, atol=3e-3)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-all": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
        "truncate": False,
    },
    "yarn-mscale": {
        "factor": 16.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.9,
        "mscale_all_dim": 0.5,
    },
}


def spellings(name: str, theta: float) -> list[dict[str, Any]]:
    """One rope in the three ways config.json has spelled it."""
    kind, settings_ = name.partition("-")[0], ROPES[name]
    old = {"rope_theta": theta, "rope_scaling": {"type": kind, **settings_} if settings_ else None}
    mid = {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **settings_} if settings_ else None}
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings_}}
    return [old, mid, new]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("name", ROPES)
def test_b067_rope_from_json(family: str, name: str, tmp_path: Path) -> None:
    ways = spellings(name, 50_000.0)
    configs = [read(tmp_path, family, **way) for way in ways]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rope.type == name.partition("-")[0] and configs[0].rope.theta == 50_000.0
    assert_tables(configs[0], hf_tables(write(tmp_path, family, **ways[-1])))


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_b067_rope_from_gguf(name: str, tmp_path: Path) -> None:
    make_hf("llama", tmp_path, rope_parameters=spellings(name, 50_000.0)[-1]["rope_parameters"])
    config = load_config(hf_to_gguf(tmp_path, tmp_path / "m.gguf"))
    assert (config.rope.freq_factors is not None) == (name == "llama3")
    assert_tables(config, hf_tables(tmp_path))


def test_b067_gemma3_local_and_global_rope(tmp_path: Path) -> None:
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    first, second = read(tmp_path, "gemma3", **old), read(tmp_path, "gemma3", **new)
    assert first == second == read(tmp_path, "gemma3", rope_scaling=old["rope_scaling"])
    assert second.rope_local is not None and second.rope_local.type == "default"
    assert_tables(second, hf_tables(write(tmp_path, "gemma3", **new)))
    make_hf("gemma3", tmp_path, **new)
    assert_tables(load_config(hf_to_gguf(tmp_path, tmp_path / "m.gguf")), hf_tables(tmp_path))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'; supported: default, linear, llama3, yarn"),
        ({"type": "longrope", "factor": 2.0}, "'longrope'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "'mrope'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "linear"}, "factor' is missing"),
        ({"rope_type": "linear", "factor": -1}, "factor"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"factor": 2.0}, "factor"),
        ("linear", "must be an object"),
        ({"rope_type": 3}, "must be a string"),
    ],
)
def test_b067_rope_refusals(scaling: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, "llama", rope_scaling=scaling)
    assert "config.json" in str(caught.value)


def test_context_length_under_yarn(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read(tmp_path, "qwen2", max_position_embeddings=32768, rope_scaling=yarn).max_position == 131072
    assert read(tmp_path, "qwen2", max_position_embeddings=131072, rope_scaling=yarn).max_position == 131072
    linear = {"type": "linear", "factor": 4.0}
    assert read(tmp_path, "llama", rope_scaling=linear).max_position == 4096
