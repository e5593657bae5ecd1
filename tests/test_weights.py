"""Loading good checkpoints: every family and format against the transformers model that wrote them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from make_checkpoints import FAMILIES, hf_state, hf_to_gguf, make_hf
from safetensors.torch import save_file

from nano_oasis.weights import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_config,
    read_gguf_metadata,
    resolve_model,
)
from nano_oasis.weights.gguf_scan import scan_gguf
from nano_oasis.weights.stored import QUANTISED, map_file, read_tensor


def expected_tensors(model: Any, family: str) -> dict[str, torch.Tensor]:
    """Canonical tensors read off the transformers module itself, not off tensor names."""
    plus = 1.0 if family == "gemma3" else 0.0
    base = model.model
    out = {"embed": base.embed_tokens.weight, "final_norm": base.norm.weight + plus}
    out["lm_head"] = model.lm_head.weight
    for i, layer in enumerate(base.layers):
        attn, mlp = layer.self_attn, layer.mlp
        for name, linear in (
            ("q", attn.q_proj),
            ("k", attn.k_proj),
            ("v", attn.v_proj),
            ("o", attn.o_proj),
            ("gate", mlp.gate_proj),
            ("up", mlp.up_proj),
            ("down", mlp.down_proj),
        ):
            out[f"layers.{i}.{name}"] = linear.weight
            if linear.bias is not None:
                out[f"layers.{i}.{name}_bias"] = linear.bias
        norms = {"attn_norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm}
        if family == "gemma3":
            norms["post_attn_norm"] = layer.post_attention_layernorm
            norms["mlp_norm"] = layer.pre_feedforward_layernorm
            norms["post_mlp_norm"] = layer.post_feedforward_layernorm
        if family in ("qwen3", "gemma3"):
            norms |= {"q_norm": attn.q_norm, "k_norm": attn.k_norm}
        out |= {f"layers.{i}.{name}": norm.weight + plus for name, norm in norms.items()}
    return {name: tensor.detach() for name, tensor in out.items()}


def assert_same(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in checkpoint.tensors.items():
        wanted = expected[name].to(torch.float32 if name.endswith("norm") else checkpoint.dtype)
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_single_and_sharded(family: str, tmp_path: Path) -> None:
    model = make_hf(family, tmp_path / "one")
    make_hf(family, tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    expected = expected_tensors(model, family)
    for folder in ("one", "many"):
        loaded = load_checkpoint(tmp_path / folder, None)
        assert loaded.dtype == torch.float32 and loaded.config.family == family
        assert_same(loaded, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf(family: str, tmp_path: Path) -> None:
    model = make_hf(family, tmp_path)
    loaded = load_checkpoint(hf_to_gguf(tmp_path, tmp_path / "m.gguf"), None)
    assert_same(loaded, expected_tensors(model, family))
    from_json = load_config(tmp_path)
    for field in ("windows", "scale", "embed_scale", "activation", "tie_embeddings", "qk_norm", "qkv_bias"):
        assert getattr(loaded.config, field) == getattr(from_json, field), field
    assert loaded.config.rope == from_json.rope and loaded.config.rope_local == from_json.rope_local


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_biases_everywhere(family: str, tmp_path: Path) -> None:
    extra = {"mlp_bias": True} if family == "llama" else {}
    model = make_hf(family, tmp_path, attention_bias=True, **extra)
    expected = expected_tensors(model, family)
    assert "layers.0.o_bias" in expected
    assert_same(load_checkpoint(tmp_path, None), expected)
    assert_same(load_checkpoint(hf_to_gguf(tmp_path, tmp_path / "m.gguf"), None), expected)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_files(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model = make_hf("llama", tmp_path, dtype=stored)
    assert next(iter(hf_state(tmp_path).values())).dtype == stored
    loaded = load_checkpoint(tmp_path, wanted)
    assert loaded.dtype == wanted
    assert_same(loaded, expected_tensors(model, "llama"))
    quant = "F16" if stored == torch.float16 else "BF16"
    assert_same(
        load_checkpoint(hf_to_gguf(tmp_path, tmp_path / "m.gguf", quant), wanted),
        expected_tensors(model, "llama"),
    )


def test_safetensors_at_odd_offsets(tmp_path: Path) -> None:
    """Mixed types with odd element counts leave later tensors unaligned."""
    make_hf("llama", tmp_path)
    state = hf_state(tmp_path)
    half = {n: t.half() if "norm" in n else t for n, t in state.items()}
    half["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(7).to(torch.float16)
    save_file(half, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    body, new, end = (
        b"",
        {},
        0,
    )  # the seven halves first: everything after them starts at an odd multiple of 2
    for name, entry in sorted(header.items(), key=lambda e: "inv_freq" not in e[0]):
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        body += raw[8 + length + first : 8 + length + last]
        new[name] = {**entry, "data_offsets": [end, end + last - first]}
        end += last - first
    text = json.dumps(new).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    loaded = load_checkpoint(tmp_path, None)
    assert torch.equal(loaded.tensors["embed"], state["model.embed_tokens.weight"])
    assert torch.equal(loaded.tensors["layers.2.down"], state["model.layers.2.mlp.down_proj.weight"])


def test_b063_tied_embeddings_safetensors(tmp_path: Path) -> None:
    make_hf("llama", tmp_path / "tied", tie_word_embeddings=True)
    make_hf("llama", tmp_path / "untied", tie_word_embeddings=False)
    tied = load_checkpoint(tmp_path / "tied", None)
    assert tied.config.tie_embeddings and tied.tensors["lm_head"] is tied.tensors["embed"]
    spare = hf_state(tmp_path / "tied") | {"lm_head.weight": torch.randn(128, 64)}
    save_file(spare, tmp_path / "tied" / "model.safetensors")
    again = load_checkpoint(tmp_path / "tied", None)
    assert again.tensors["lm_head"] is again.tensors["embed"]
    assert torch.equal(again.tensors["embed"], tied.tensors["embed"])

    untied = load_checkpoint(tmp_path / "untied", None)
    assert not torch.equal(untied.tensors["lm_head"], untied.tensors["embed"])
    state = hf_state(tmp_path / "untied")
    assert torch.equal(untied.tensors["lm_head"], state.pop("lm_head.weight"))
    save_file(state, tmp_path / "untied" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_checkpoint(tmp_path / "untied", None)


def test_b063_tied_embeddings_gguf(tmp_path: Path) -> None:
    """A GGUF has no field for it: the head is the embedding exactly when there is no output tensor."""
    for tie in (True, False):
        folder = tmp_path / str(tie)
        model = make_hf("llama", folder, tie_word_embeddings=tie)
        loaded = load_checkpoint(hf_to_gguf(folder, folder / "m.gguf"), None)
        assert (loaded.tensors["lm_head"] is loaded.tensors["embed"]) == tie
        assert_same(loaded, expected_tensors(model, "llama"))


def test_b066_gemma_norms_are_offset_once(tmp_path: Path) -> None:
    make_hf("gemma3", tmp_path, dtype=torch.bfloat16)
    stored = hf_state(tmp_path)["model.norm.weight"]
    for path in (tmp_path, hf_to_gguf(tmp_path, tmp_path / "m.gguf")):
        loaded = load_checkpoint(path, torch.bfloat16)
        norm = loaded.tensors["final_norm"]
        assert norm.dtype == torch.float32 and torch.equal(norm, stored.float() + 1)
        assert loaded.config.embed_scale == 8.0  # sqrt(64); the stored embedding itself is not scaled
        assert torch.equal(loaded.tensors["embed"], hf_state(tmp_path)["model.embed_tokens.weight"])
        with pytest.raises(CheckpointError, match="float16"):
            load_checkpoint(path, torch.float16)


def _write_blocks(path: Path, kind: gguf.GGMLQuantizationType, rows: int, per_row: int) -> np.ndarray:
    raw = np.random.default_rng(7).integers(
        1, 256, (rows, per_row * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.ones(5, np.float32))
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


def test_scan_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "é", "龜 b", ""])
        writer.add_token_scores([0.5, -1.0, 2.0, 0.0])
        writer.add_token_types([1, 2, 3, 6])
        writer.add_array("x.flags", [True, False])
        writer.add_uint64("x.u64", 2**40)
        writer.add_int64("x.i64", -(2**40))
        writer.add_float64("x.f64", 0.1)
        writer.add_int8("x.i8", -3)
        writer.add_bool("x.yes", True)
        writer.add_chat_template("{{ messages }} ü")

    make_hf("llama", tmp_path)
    path = hf_to_gguf(tmp_path, tmp_path / "m.gguf", "Q5_1", extra=extra)
    ours, theirs = scan_gguf(path), gguf.GGUFReader(path)
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == {k: f.contents() for k, f in fields.items()}
    assert [type(v) for v in ours.metadata.values()] == [type(f.contents()) for f in fields.values()]
    assert read_gguf_metadata(path) == ours.metadata
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.kind == tensor.tensor_type.name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes hold NaN and infinite scales too
@pytest.mark.parametrize("name", QUANTISED)
def test_b065_block_types_on_random_bytes(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    # The second size crosses a chunk boundary in the middle of a row.
    for rows, per_row in ((25, 4), (5, 300_000 // block // 5 + 1)):
        raw = _write_blocks(tmp_path / "q.gguf", kind, rows, per_row)
        stored = scan_gguf(tmp_path / "q.gguf").tensors["w"]
        assert stored.shape == (rows, per_row * block)
        wanted = torch.from_numpy(gguf.quants.dequantize(raw, kind))
        got = read_tensor(map_file(stored.path), stored, torch.float32)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        half = read_tensor(map_file(stored.path), stored, torch.bfloat16)
        torch.testing.assert_close(half, wanted.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_model_is_near_the_original(quant: str, tmp_path: Path) -> None:
    """The whole way: quantised, renamed, permuted back. Wrong rows would be off by the weights' own size."""
    model = make_hf("llama", tmp_path, hidden_size=64)
    loaded = load_checkpoint(hf_to_gguf(tmp_path, tmp_path / "m.gguf", quant), None)
    for name, wanted in expected_tensors(model, "llama").items():
        error = (loaded.tensors[name] - wanted).norm() / wanted.norm()
        assert error < (0.01 if quant == "Q8_0" else 0.13), (name, error)


def test_split_gguf(tmp_path: Path) -> None:
    model = make_hf("qwen3", tmp_path)
    one = scan_gguf(hf_to_gguf(tmp_path, tmp_path / "one.gguf"))
    names = list(one.tensors)
    for i, part in enumerate((names[:10], names[10:20], names[20:])):
        writer = gguf.GGUFWriter(tmp_path / f"m-{i + 1:05d}-of-00003.gguf", "qwen3")
        if i == 0:
            for key, value in one.metadata.items():
                if key != "general.architecture":
                    add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
                    add(key, value)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 3)
        for name in part:
            writer.add_tensor(name, read_tensor(map_file(one.path), one.tensors[name], torch.float32).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = tmp_path / "m-00001-of-00003.gguf"
    assert_same(load_checkpoint(first, None), expected_tensors(model, "qwen3"))
    with pytest.raises(CheckpointError, match="give the first part"):
        load_checkpoint(tmp_path / "m-00002-of-00003.gguf", None)
    folder = tmp_path / "alone"
    folder.mkdir()
    for part in tmp_path.glob("m-*.gguf"):
        part.rename(folder / part.name)
    assert resolve_model(str(folder)) == folder / first.name
    (folder / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match="m-00003-of-00003"):
        load_checkpoint(folder / first.name, None)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_vision_wrapper_loads_its_text_part(prefix: str, tmp_path: Path) -> None:
    model = make_hf("gemma3", tmp_path)
    outside = prefix.partition("language_model.")[0]
    state = {prefix + n.removeprefix("model."): t for n, t in hf_state(tmp_path).items()}
    state[f"{outside}vision_tower.patch.weight"] = torch.randn(3, 3)
    state[f"{outside}multi_modal_projector.w"] = torch.randn(3)
    save_file(state, tmp_path / "model.safetensors")
    inner = json.loads((tmp_path / "config.json").read_text())
    inner.pop("architectures")
    inner.pop("tie_word_embeddings")
    inner.pop("eos_token_id")
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 32},
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    loaded = load_checkpoint(tmp_path, None)
    assert_same(loaded, expected_tensors(model, "gemma3"))
    assert loaded.config.eos_token_ids == (1, 106, 2)  # wrapper, then generation_config.json


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    make_hf("llama", tmp_path, max_shard_size="60KB")
    seen: list[tuple[int, int]] = []
    load_checkpoint(tmp_path, None, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len({total for _, total in seen}) == 1 and seen[-1][0] == seen[-1][1]
    assert seen[-1][1] == sum(t.nbytes for t in hf_state(tmp_path).values())


def test_packaged_smollm2() -> None:
    path = resolve_model("smollm2")
    loaded = load_checkpoint(path, None)
    config = loaded.config
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert config.rope.theta == 100000.0 and config.eos_token_ids == (2,) and config.tie_embeddings
    # One tensor the long way, with the row order undone by hand.
    stored = scan_gguf(path).tensors["blk.3.attn_k.weight"]
    raw = np.memmap(path)[stored.offset : stored.offset + stored.nbytes].reshape(192, -1)
    rows = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored.kind]))
    rows = rows.reshape(3, 32, 2, 576)
    wanted = torch.cat((rows[:, :, 0], rows[:, :, 1]), dim=1).reshape(192, 576)
    assert torch.equal(loaded.tensors["layers.3.k"], wanted)
