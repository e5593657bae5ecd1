"""`--weights`: what a model's matrices are kept as, and that it serves with them.

Owns: these checks. Must not know: how the formats are laid out (test_weights_packed.py), how good a real
model is with them (docs/04-weights.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_checkpoints import hf_to_gguf, make_hf

from nano_oasis import LLM, ConfigError, SamplingParams
from nano_oasis.kernels.matrix import join, rows_of, take
from nano_oasis.kernels.packed_weight import PackedWeight
from nano_oasis.model import Layer, Model
from nano_oasis.weights import CheckpointError, load_checkpoint

MATRICES = ("qkv", "out", "gate_up", "down")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The sun rises in the east", "one two one two one two one"]


def load(path: Path, matrices: str) -> Model:
    checkpoint = load_checkpoint(path, torch.float32, matrices=matrices)
    return Model(checkpoint.config, checkpoint.tensors, 64, checkpoint.dtype)


def all_matrices(model: Model) -> list:
    return [model.embed, model.lm_head] + [getattr(x, name) for x in model.layers for name in MATRICES]


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16", "F32"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_the_file_holds_is_kept_and_is_the_same_numbers(family, quant, tmp_path) -> None:
    make_hf(family, tmp_path / "hf")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", quant)
    full, stored = load(path, "full"), load(path, "stored")
    for a, b in zip(all_matrices(full), all_matrices(stored), strict=True):
        assert torch.equal(a, b[:].float())
        if quant[0] == "Q":
            assert isinstance(b, PackedWeight) or a.shape[1] % 32
        else:
            assert b.dtype == {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[quant]
    assert (stored.weight_bytes < 0.7 * full.weight_bytes) == (quant != "F32")
    assert stored.dtype == torch.float32 and stored.num_weights == full.num_weights
    assert (stored.embed is stored.lm_head) == (full.embed is full.lm_head)


@pytest.mark.parametrize(("matrices", "most"), [("int8", 0.3), ("float16", 0.51)])
def test_every_matrix_is_rounded_to_what_is_asked_for(folder, matrices, most) -> None:
    full, rounded = load(folder, "full"), load(folder, matrices)
    for a, b in zip(all_matrices(full), all_matrices(rounded), strict=True):
        assert torch.equal(b[:].float(), (PackedWeight.of(a)[:] if matrices == "int8" else a.half().float()))
    assert rounded.weight_bytes < most * full.weight_bytes
    assert all(x.attn_norm.dtype == torch.float32 for x in rounded.layers if isinstance(x, Layer))


def test_rows_that_no_format_holds_together_become_fp32() -> None:
    packed, half, full = PackedWeight.of(torch.randn(4, 64)), torch.randn(3, 64).half(), torch.randn(2, 64)
    joined = join([packed, half, full])
    assert isinstance(joined, torch.Tensor) and joined.dtype == torch.float32
    assert torch.equal(joined, torch.cat([packed[:], half.float(), full]))
    ids = torch.tensor([2, 0])
    assert torch.equal(take(packed, ids)[:], rows_of(packed, ids, torch.float32))
    assert rows_of(half, ids, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("weights", ["int8", "float16"])
def test_an_engine_serves_with_it_the_same_in_every_mode_and_with_drafts(folder, weights) -> None:
    outputs = []
    for options in ({}, {"draft": "ngram", "num_draft_tokens": 3}, {"kv_mode": "lossless"}):
        with LLM(str(folder), weights=weights, max_model_len=128, max_num_seqs=4, **options) as llm:
            outputs.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)])
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_default_model_is_read_in_the_four_bits_of_its_file_with_the_tokens_of_fp32() -> None:
    pytest.importorskip("numba")
    outputs = []
    for weights in ("auto", "float32"):
        with LLM("smollm2", weights=weights, max_model_len=128) as llm:
            model = llm.engine.runner.model
            assert isinstance(model.layers[0].qkv, PackedWeight) == (weights == "auto")
            assert (model.weight_bytes < 1e8) == (weights == "auto")
            outputs.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)])
    assert outputs[0] == outputs[1]


def test_it_is_refused_where_it_would_not_be_used(folder) -> None:
    for weights in ("int8", "float16", "float32"):
        with pytest.raises(ConfigError, match=f"weights: {weights} needs device=cpu and dtype=float32; got"):
            LLM(str(folder), weights=weights, dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights"):
        LLM(str(folder), weights="int3")


def test_weights_too_large_for_float16_are_refused(tmp_path) -> None:
    hf = make_hf("llama", tmp_path / "hf")
    with torch.no_grad():
        hf.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    hf.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"up_proj.*too large for float16"):
        load_checkpoint(tmp_path / "hf", torch.float32, matrices="float16")
