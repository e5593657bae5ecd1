"""Headers of safetensors files: one file, or the shards named by an index, checked before use.

Owns: the byte layout of safetensors and the index file. Must not know: what a tensor means.

Layout: header length u64; the header, a JSON object of name -> {dtype, shape, data_offsets}; the data,
which the tensors' ranges must cover without overlaps or holes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from nano_oasis.weights.errors import CheckpointError, some
from nano_oasis.weights.fields import read_json
from nano_oasis.weights.stored import StoredTensor

MAX_HEADER = 100 * 2**20  # the format's own limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_ITEM_BYTES |= {"U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


def scan_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files. Raises CheckpointError naming file and tensor."""
    if (folder / SINGLE).exists():
        return scan_safetensors(folder / SINGLE)
    if (folder / INDEX).exists():
        return _scan_shards(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return scan_safetensors(found[0])
    if found:
        raise CheckpointError.at(folder, f"has {len(found)} safetensors files, but {INDEX} is missing")
    pickles = [p.name for pattern in PICKLES for p in folder.glob(pattern)]
    if pickles:
        raise CheckpointError.at(
            folder,
            f"has only pickle weights ({some(pickles)}), which can run code when read and are never opened; "
            "convert them to safetensors",
        )
    raise CheckpointError.at(folder, f"has no weights: {SINGLE} or {INDEX} with its shards is needed")


def _scan_shards(folder: Path) -> dict[str, StoredTensor]:
    path = folder / INDEX
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError.at(path, "has no 'weight_map' object")
    for name, shard in where.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError.at(
                path, f"puts tensor {name!r} in {shard!r}, not a safetensors file beside it"
            )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(where.values())):
        if not (folder / shard).exists():
            lost = [name for name, s in where.items() if s == shard]
            raise CheckpointError.at(folder / shard, f"is missing; {INDEX} puts {some(lost)} there")
        for name, stored in scan_safetensors(folder / shard).items():
            if name in tensors:
                raise CheckpointError.at(stored.path, f"tensor {name!r} is also in {tensors[name].path.name}")
            tensors[name] = stored
    for name, shard in where.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError.at(
                folder / shard, f"tensor {name!r} is missing, though {INDEX} puts it there"
            )
    return tensors


def scan_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, its range checked. Raises CheckpointError naming file and tensor."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise CheckpointError.at(
                    path, f"claims a header of {length} bytes in a file of {size} bytes (cut or damaged?)"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError.at(path, f"cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError.at(
            path, f"has a header that is not valid JSON: {error!s:.120} (damaged?)"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError.at(path, "has a header that is not a JSON object (damaged?)")
    base = 8 + length
    tensors = {n: _entry(path, n, e, base) for n, e in header.items() if n != "__metadata__"}
    _check_ranges(path, sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)), base, size)
    return tensors


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError(f"{pairs[0][0]!r} or a later name appears twice")
    return result


def _entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if (
        not isinstance(kind, str)
        or not _counts(shape)
        or not _counts(ends)
        or len(ends) != 2
        or ends[0] > ends[1]
    ):
        raise CheckpointError.at(path, f"tensor {name!r} has a damaged header entry: {entry!r:.120}")
    if kind not in _ITEM_BYTES:
        raise CheckpointError.at(path, f"tensor {name!r} has the unknown type {kind!r:.40}")
    nbytes = _ITEM_BYTES[kind]
    for dim in shape:
        nbytes *= dim
    if nbytes != ends[1] - ends[0]:
        raise CheckpointError.at(
            path,
            f"tensor {name!r} ({kind} {shape}) needs {nbytes} bytes, but its range is {ends}",
        )
    return StoredTensor(path, name, kind, tuple(shape), base + ends[0], nbytes)


def _counts(value: Any) -> bool:
    """Whether `value` is a short list of plausible sizes; keeps products of dimensions small."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in value)
    )


def _check_ranges(path: Path, ordered: list[StoredTensor], base: int, size: int) -> None:
    end, hole = base, None
    for tensor in ordered:
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError.at(
                path,
                f"tensor {tensor.name!r} would end at byte {tensor.offset + tensor.nbytes}, but the file has "
                f"{size} bytes (cut or damaged?)",
            )
        if tensor.offset < end:
            raise CheckpointError.at(path, f"tensor {tensor.name!r} overlaps the tensor before it (damaged?)")
        if tensor.offset > end:
            hole = hole or tensor  # reported last: a range that is wrong elsewhere is the better clue
        end = tensor.offset + tensor.nbytes
    if hole is not None:
        raise CheckpointError.at(path, f"has bytes of no tensor before {hole.name!r} (damaged?)")
    if end != size:
        raise CheckpointError.at(path, f"has {size - end} bytes after its last tensor (damaged?)")
