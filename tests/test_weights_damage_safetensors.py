"""Damaged, incomplete and dangerous safetensors folders: a precise error within a second, in flat memory."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage_helpers import EDITS, HUGE, QUICK, loads_or_refuses, refused, u64
from hypothesis import given
from hypothesis import strategies as st
from make_checkpoints import hf_state, make_hf
from safetensors.torch import save_file

from nano_oasis.weights import load_checkpoint, resolve_model


@pytest.fixture(scope="module")
def safetensors_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hf")
    make_hf("llama", folder)
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def write_hf(folder: Path, files: dict[str, bytes], **changed: bytes) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if "model" in changed:
        (folder / "model.safetensors").write_bytes(changed["model"])
    return folder


def split_header(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def apply(raw: bytes) -> bytes:
        header, body = split_header(raw)
        change(header)
        text = json.dumps(header).encode()
        return u64(len(text)) + text + body

    return apply


def _swap_range(header: dict[str, Any], name: str, like: str) -> None:
    header[name]["data_offsets"] = header[like]["data_offsets"]


UP0, UP1 = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
SAFETENSORS_DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda r: b"", "header of 0 bytes in a file of 0"),
    "seven bytes": (lambda r: r[:7], "file of 7 bytes"),
    "header length 2^60": (lambda r: u64(HUGE) + r[8:], f"header of {HUGE} bytes"),
    "header length too small": (lambda r: u64(20) + r[8:], "not valid JSON"),
    "header of brackets": (lambda r: u64(100_000) + b"[" * 100_000, "not valid JSON"),
    "header is a list": (lambda r: u64(2) + b"[]", "not a JSON object"),
    "not UTF-8": (lambda r: u64(4) + b'"\xff"' + b" ", "not valid JSON"),
    "cut by one byte": (lambda r: r[:-1], "would end at byte.*cut"),
    "cut in the header": (lambda r: r[:100], "cut"),
    "one byte too many": (lambda r: r + b"\0", "1 bytes after its last tensor"),
    "overlap": (edited(lambda h: _swap_range(h, UP0, UP1)), "mlp.up_proj.weight' overlaps"),
    "hole": (edited(lambda h: h.pop(UP0)), "bytes of no tensor before"),
    "range outside": (edited(lambda h: h[UP0].update(data_offsets=[HUGE, HUGE + 24576])), f"{UP0}' would"),
    "range backwards": (edited(lambda h: h[UP0].update(data_offsets=[24576, 0])), f"{UP0}' has a damaged"),
    "range negative": (edited(lambda h: h[UP0].update(data_offsets=[-24576, 0])), f"{UP0}' has a damaged"),
    "shape 2^60": (edited(lambda h: h[UP0].update(shape=[HUGE, HUGE])), f"{UP0}.*needs"),
    "shape does not fit the range": (edited(lambda h: h[UP0].update(shape=[96, 63])), f"{UP0}.*needs"),
    "shape of text": (edited(lambda h: h[UP0].update(shape="96")), f"{UP0}' has a damaged"),
    "unknown dtype": (edited(lambda h: h[UP0].update(dtype="F12")), f"{UP0}.*'F12'"),
    "integer dtype": (edited(lambda h: h[UP0].update(dtype="I32")), f"{UP0}' has type I32.*F32, F16, BF16"),
    "entry of null": (edited(lambda h: h.update({UP0: None})), f"{UP0}' has a damaged"),
    "wrong shape": (edited(lambda h: h[UP0].update(shape=[64, 96])), rf"{UP0}.*\[64, 96\].*\[96, 64\]"),
    "renamed": (edited(lambda h: h.update({"x": h.pop(NORM)})), f"lacks 1 of its tensors: {NORM}"),
    "name twice": (lambda r: r.replace(UP0.encode(), UP1.encode()), "appears twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFETENSORS_DAMAGE)
def test_b071_damaged_safetensors(name: str, safetensors_files: dict[str, bytes], tmp_path: Path) -> None:
    damage, message = SAFETENSORS_DAMAGE[name]
    write_hf(tmp_path, safetensors_files, model=damage(safetensors_files["model.safetensors"]))
    refused(lambda: load_checkpoint(tmp_path, None), str(tmp_path), message)


def test_extra_tensors_are_refused(safetensors_files: dict[str, bytes], tmp_path: Path) -> None:
    write_hf(tmp_path, safetensors_files)
    extra = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
        "model.layers.3.mlp.gate.weight": torch.ones(2),
    }
    save_file(hf_state(tmp_path) | extra, tmp_path / "model.safetensors")
    refused(lambda: load_checkpoint(tmp_path, None), "2 tensors", *extra)


def test_shards(tmp_path: Path) -> None:
    make_hf("llama", tmp_path, max_shard_size="60KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    lost = tmp_path / shards[1]
    content = lost.read_bytes()

    lost.unlink()
    refused(lambda: load_checkpoint(tmp_path, None), f"{shards[1]}: is missing")
    lost.write_bytes(content[:-100])
    refused(lambda: load_checkpoint(tmp_path, None), shards[1], "would end at byte")
    lost.write_bytes((tmp_path / shards[2]).read_bytes())
    refused(lambda: load_checkpoint(tmp_path, None), f"is also in {shards[1]}")
    lost.write_bytes(content)
    load_checkpoint(tmp_path, None)

    good = index_path.read_text()
    for wrong, message in (
        ("[]", "must hold a JSON object"),
        ("{}", "weight_map"),
        ("{", "not valid JSON"),
        (json.dumps({"weight_map": {NORM: "../model.safetensors"}}), "not a safetensors file beside it"),
        (json.dumps({"weight_map": {NORM: "pytorch_model.bin"}}), "not a safetensors file beside it"),
        (json.dumps({"weight_map": index["weight_map"] | {"ghost": shards[0]}}), "'ghost' is missing"),
    ):
        index_path.write_text(wrong)
        refused(lambda: load_checkpoint(tmp_path, None), message)
    index_path.write_text(good)
    index_path.unlink()
    refused(lambda: load_checkpoint(tmp_path, None), "index.json is missing")


class Bomb:
    """Unpickling this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_b071_pickles_are_never_opened(
    name: str, safetensors_files: dict[str, bytes], tmp_path: Path
) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    write_hf(folder, {"config.json": safetensors_files["config.json"]})
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    refused(lambda: load_checkpoint(resolve_model(str(folder)), None), "pickle", name)
    refused(lambda: resolve_model(str(folder / name)), "pickle", name)
    refused(lambda: load_checkpoint(folder / name, None), "not a GGUF file|too short")
    assert not marker.exists()


def test_folders_without_a_model(tmp_path: Path, safetensors_files: dict[str, bytes]) -> None:
    refused(lambda: load_checkpoint(tmp_path, None), "has no weights", "model.safetensors")
    refused(lambda: load_checkpoint(tmp_path / "no", None), "does not exist")
    (tmp_path / "model.safetensors").write_bytes(safetensors_files["model.safetensors"])
    refused(lambda: load_checkpoint(tmp_path, None), "config.json: is missing")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused(lambda: load_checkpoint(tmp_path, None), "config.json: is not valid JSON")


@QUICK
@given(edits=EDITS, cut=st.none() | st.integers(0, 6000))
def test_fuzz_safetensors_header(
    safetensors_files: dict[str, bytes], edits: list[tuple[int, bytes]], cut: int | None, tmp_path: Path
) -> None:
    raw = safetensors_files["model.safetensors"]
    for at, new in edits:
        at %= struct.unpack("<Q", raw[:8])[0]
        raw = raw[:at] + new + raw[at + len(new) :]
    write_hf(tmp_path, safetensors_files, model=raw[:cut])
    loads_or_refuses(tmp_path)
