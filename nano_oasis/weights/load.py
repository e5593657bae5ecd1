"""A checkpoint on disk to tensors under canonical names.

Owns: the order of checking (everything is checked before the first byte of data is read), and what has to
be done to the stored numbers. Must not know: file layouts, the decoder, where models come from.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nano_oasis.config import ModelConfig
from nano_oasis.kernels.matrix import Matrix, take
from nano_oasis.kernels.packed_weight import GROUP, PackedWeight
from nano_oasis.weights.config_gguf import config_from_gguf
from nano_oasis.weights.config_json import config_from_folder
from nano_oasis.weights.errors import CheckpointError, some
from nano_oasis.weights.gguf_scan import scan_gguf_parts
from nano_oasis.weights.names import HF_PREFIXES, gguf_name, hf_name, is_norm, parameter_shapes
from nano_oasis.weights.packed import can_pack, read_packed
from nano_oasis.weights.safetensors_scan import scan_folder
from nano_oasis.weights.stored import PLAIN, QUANTISED, StoredTensor, map_file, read_tensor

_ROPE_FREQS = "rope_freqs.weight"
_MAX_ROPE_FREQS = 4096  # values
_READERS = 8  # threads


@dataclass
class Checkpoint:
    """A loaded model. Matrices are [out, in] in `dtype`, or as load_checkpoint's `matrices` says; norms'
    weights are float32 multipliers.

    Names: embed [V, H], final_norm [H], lm_head [V, H] (the embed object itself when tied), and for each
    layer layers.<i>. attn_norm, q, k, v, o, mlp_norm, gate, up, down, where the family has them q_bias,
    k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias, q_norm, k_norm [head_dim], post_attn_norm,
    post_mlp_norm.
    """

    config: ModelConfig
    tensors: dict[str, Any]  # torch.Tensor, of matrices also PackedWeight
    dtype: torch.dtype


@dataclass(frozen=True)
class _Source:
    """A checkpoint whose headers are checked: every parameter's place, and what its format calls for."""

    config: ModelConfig
    stored: dict[str, StoredTensor]  # canonical name -> place
    interleaved_rope: bool  # rows of q and k are in llama.cpp's order
    norms_minus_one: bool  # norm weights are stored as the multiplier minus 1


def load_config(path: Path) -> ModelConfig:
    """The configuration of a model folder or GGUF file, after checking all its headers; reads no weights.

    Raises CheckpointError for anything that load_checkpoint would refuse.
    """
    return _open(path).config


def load_checkpoint(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    matrices: str = "full",
) -> Checkpoint:
    """Load a model folder or a GGUF file (see resolve_model for names).

    dtype None means float32 on CPU, elsewhere bfloat16, or float16 if that is what the file holds.
    `progress(done, total)` counts bytes of the file. matrices: "full": in dtype; "stored": in the file's own
    numbers where kernels read them, 16 bits or packed, else in dtype; "float16" or "int8": rounded to that.
    Raises CheckpointError naming file and tensor.
    """
    source = _open(path)
    config = source.config
    dtype = dtype or _default_dtype(source, torch.device(device))
    if dtype not in PLAIN.values():
        raise CheckpointError.at(path, f"cannot be loaded as {dtype}; allowed: float32, bfloat16, float16")
    if dtype == torch.float16 and config.family == "gemma3":
        raise CheckpointError.at(path, "Gemma 3's activations overflow float16; use bfloat16 or float32")
    total = sum(stored.nbytes for stored in source.stored.values())
    done = 0
    tensors: dict[str, Any] = dict.fromkeys(source.stored)  # keeps the order
    in_file_order = sorted(source.stored.items(), key=lambda item: (item[1].path, item[1].offset))
    files = {path: map_file(path) for path in {stored.path for stored in source.stored.values()}}

    def read(item: tuple[str, StoredTensor]) -> Matrix:
        found = _read(*item, files[item[1].path], source, dtype, matrices)
        return found.to(device) if isinstance(found, torch.Tensor) else found

    with ThreadPoolExecutor(min(torch.get_num_threads(), _READERS)) as readers:
        # Unpacking quantised weights keeps one core busy for longer than reading them keeps the disk.
        for (name, stored), tensor in zip(in_file_order, readers.map(read, in_file_order), strict=True):
            tensors[name] = tensor
            done += stored.nbytes
            if progress is not None:
                progress(done, total)
    tensors.setdefault("lm_head", tensors["embed"])
    return Checkpoint(config, tensors, dtype)


def _read(
    name: str, stored: StoredTensor, data: mmap.mmap, source: _Source, dtype: torch.dtype, matrices: str
) -> Matrix:
    """One parameter as the decoder wants it. Norms stay float32: 1 + w would lose bits in less."""
    if is_norm(name):
        norm = read_tensor(data, stored, torch.float32)
        return norm + 1 if source.norms_minus_one else norm
    found = _read_numbers(data, stored, dtype, matrices if len(stored.shape) == 2 else "full")
    part = name.rpartition(".")[2]
    if source.interleaved_rope and part in ("q", "q_bias"):
        return take(found, _halves(stored.shape[0], source.config.num_heads))
    if source.interleaved_rope and part in ("k", "k_bias"):
        return take(found, _halves(stored.shape[0], source.config.num_kv_heads))
    return found


def _read_numbers(data: mmap.mmap, stored: StoredTensor, dtype: torch.dtype, matrices: str) -> Matrix:
    if matrices == "stored" and can_pack(stored):
        return read_packed(data, stored)
    if matrices == "stored" and stored.kind in PLAIN:
        return read_tensor(data, stored, PLAIN[stored.kind])
    full = read_tensor(data, stored, dtype)
    if matrices == "int8" and stored.shape[1] % GROUP == 0:
        return PackedWeight.of(full)
    if matrices != "float16":
        return full
    half = full.half()
    if not bool(half.isfinite().all()):
        raise CheckpointError.at(stored.path, f"tensor {stored.name!r} has weights too large for float16")
    return half


def _halves(rows: int, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows [heads * D]: rope pairs from (2i, 2i + 1) back to (i, i + D / 2)."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _default_dtype(source: _Source, device: torch.device) -> torch.dtype:
    if device.type == "cpu":  # 16-bit products are far slower than float32 on most CPUs
        return torch.float32
    half = source.stored["embed"].kind == "F16" and source.config.family != "gemma3"
    return torch.float16 if half else torch.bfloat16


def _open(path: Path) -> _Source:
    if not path.exists():
        raise CheckpointError.at(path, "does not exist")
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_folder(folder: Path) -> _Source:
    found = scan_folder(folder)
    config = config_from_folder(folder)
    prefix = next((p for p in HF_PREFIXES if f"{p}embed_tokens.weight" in found), HF_PREFIXES[0])
    # Buffers that old versions saved, and a spare head: transformers ignores them as well.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add(hf_name("lm_head", config, prefix))
    if prefix != HF_PREFIXES[0]:  # the vision half of Gemma 3
        outside = prefix.partition("language_model.")[0]
        vision = (f"{outside}vision_tower.", f"{outside}multi_modal_projector.")
        ignored |= {name for name in found if name.startswith(vision)}
    names = {name: hf_name(name, config, prefix) for name in parameter_shapes(config)}
    stored = _match(folder, config, names, found, ignored, tuple(PLAIN))
    return _Source(config, stored, interleaved_rope=False, norms_minus_one=config.family == "gemma3")


def _open_gguf(path: Path) -> _Source:
    header = scan_gguf_parts(path)
    factors = header.tensors.get(_ROPE_FREQS)
    config = config_from_gguf(header, None if factors is None else _rope_factors(factors))
    if factors is not None and factors.shape != (config.head_dim // 2,):
        raise CheckpointError.at(
            factors.path,
            f"tensor {_ROPE_FREQS!r} has shape {list(factors.shape)}; [{config.head_dim // 2}] is expected",
        )
    names = {name: gguf_name(name) for name in parameter_shapes(config)}
    stored = _match(path, config, names, header.tensors, {_ROPE_FREQS}, (*PLAIN, *QUANTISED))
    return _Source(config, stored, interleaved_rope=config.family == "llama", norms_minus_one=False)


def _rope_factors(stored: StoredTensor) -> tuple[float, ...]:
    stored.check_kind(("F32",))
    if stored.nbytes > 4 * _MAX_ROPE_FREQS:
        raise CheckpointError.at(stored.path, f"tensor {stored.name!r} has {stored.nbytes} bytes; too many")
    factors = read_tensor(map_file(stored.path), stored, torch.float32)
    if not bool(((factors > 0) & factors.isfinite()).all()):
        raise CheckpointError.at(stored.path, f"tensor {stored.name!r} holds a factor that is not above 0")
    return tuple(factors.tolist())


def _match(
    path: Path,
    config: ModelConfig,
    names: dict[str, str],
    found: dict[str, StoredTensor],
    ignored: set[str],
    kinds: tuple[str, ...],
) -> dict[str, StoredTensor]:
    """Canonical name -> stored tensor: none missing, none left over, every shape and type right."""
    missing = [name for name in names.values() if name not in found]
    if missing:
        raise CheckpointError.at(path, f"lacks {len(missing)} of its tensors: {some(missing)}")
    unknown = set(found) - set(names.values()) - ignored
    if unknown:
        raise CheckpointError.at(
            path,
            f"has {len(unknown)} tensors that this {config.family} model has no place for: {some(unknown)}",
        )
    stored = {name: found[file_name] for name, file_name in names.items()}
    for name, shape in parameter_shapes(config).items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise CheckpointError.at(
                tensor.path,
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}; configured is {list(shape)}",
            )
        tensor.check_kind(kinds)
    return stored
