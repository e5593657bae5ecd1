"""Header of a GGUF file: metadata and the place of every tensor, checked before anything trusts it.

Owns: the byte layout of GGUF (versions 2 and 3, little-endian) and its limits.
Must not know: what a key or a tensor means, dequantisation.

Layout: magic, version u32, tensor count u64, key count u64; then key/value pairs; then per tensor its
name, dimensions (fastest first), type and offset; then padding to the alignment; then the tensor data.
Every count and length is checked against the bytes that are left before it is used, so a damaged file
costs no more memory or time than a good one.
"""

from __future__ import annotations

import itertools
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nano_oasis.weights.errors import CheckpointError
from nano_oasis.weights.stored import StoredTensor

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_NAME = 1 << 12  # bytes of a key or of a tensor name
MAX_STRING = 1 << 24  # bytes of one string value; chat templates are the longest
MAX_ELEMENTS = 1 << 23  # array elements of all keys together; the largest vocabularies need about 1.3 million
MAX_ALIGNMENT = 1 << 20

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensors of one file, or of all parts of a split one (then the first part's metadata)."""

    path: Path
    metadata: dict[str, Any]  # arrays as lists
    tensors: dict[str, StoredTensor]


def scan_gguf(path: Path) -> GGUFHeader:
    """Read and check the header of one GGUF file; no tensor data is touched. Not to be changed: it is kept.

    Raises CheckpointError naming the file, and the key or tensor that is wrong.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError.at(path, f"cannot be read: {error.strerror or error}") from error
    return _scan(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=1)  # configuration, tokenizer and weights each ask, and a vocabulary takes a while
def _scan(path: Path, _state: tuple[int, ...]) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise CheckpointError.at(path, f"is {size} bytes long, too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Scan(path, data, size).run()
    except OSError as error:
        raise CheckpointError.at(path, f"cannot be read: {error.strerror or error}") from error


def read_gguf_metadata(path: Path | str) -> dict[str, Any]:
    """The key/value pairs of a GGUF file: numbers, bools, strings, and lists of these.

    Raises CheckpointError if the file is not GGUF or its header is damaged (tensor table included).
    """
    return dict(scan_gguf(Path(path)).metadata)


def scan_gguf_parts(path: Path) -> GGUFHeader:
    """Like scan_gguf; if `path` is the first part of a split file, the tensors of all parts together.

    Parts are named <name>-00001-of-00003.gguf and so on, and lie side by side.
    """
    first = scan_gguf(path)
    count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    if not _is_int(count) or not 1 <= count <= 99999:
        raise CheckpointError.at(path, f"split.count must be between 1 and 99999, got {count!r:.80}")
    if count == 1:
        return first
    named = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[2]) != 1 or int(named[3]) != count or number != 0:
        raise CheckpointError.at(
            path,
            f"is part {number} of a GGUF file split in {count}; give the first part, "
            f"named <name>-00001-of-{count:05d}.gguf, with the others beside it",
        )
    tensors = dict(first.tensors)
    for i in range(2, count + 1):
        part = scan_gguf(path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf"))
        if part.metadata.get("split.no") != i - 1 or part.metadata.get("split.count") != count:
            raise CheckpointError.at(part.path, f"is not part {i} of {count} of the split file {path.name}")
        for name, stored in part.tensors.items():
            if name in tensors:
                raise CheckpointError.at(part.path, f"tensor {name!r} is also in {tensors[name].path.name}")
            tensors[name] = stored
    return GGUFHeader(path, first.metadata, tensors)


class _Scan:
    """A cursor over the header that never steps outside the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.pos = 0
        self.elements_left = MAX_ELEMENTS

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError.at(self.path, message)

    def run(self) -> GGUFHeader:
        num_tensors, num_keys = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key", MAX_NAME)
            if key in metadata:
                raise self.fail(f"key {key!r} appears twice")
            metadata[key] = self._value(self._u32(f"the type of key {key!r}"), f"key {key!r}")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not _is_int(alignment) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(
                f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, got {alignment!r}"
            )
        return GGUFHeader(self.path, metadata, self._place(infos, alignment))

    def _preamble(self) -> tuple[int, int]:
        """Check magic, version and counts -> (number of tensors, number of keys)."""
        magic = self.data[:4]
        if magic != b"GGUF":
            raise self.fail(f"is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
        self.pos = 4
        version = self._u32("the version")
        if version and version & 0xFFFF == 0:
            raise self.fail("is a big-endian GGUF file; only little-endian ones can be read")
        if version not in (2, 3):
            raise self.fail(f"has GGUF version {version}; versions 2 and 3 can be read")
        counts = []
        for what, smallest, limit in (("tensors", 24, MAX_TENSORS), ("keys", 13, MAX_KEYS)):
            count = self._u64(f"the number of {what}")
            if count > limit or count * smallest > self.size - self.pos:
                raise self.fail(f"claims {count} {what}, more than its {self.size} bytes can hold (damaged?)")
            counts.append(count)
        return counts[0], counts[1]

    def _take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return where they start."""
        start = self.pos
        if count > self.size - start:
            raise self.fail(
                f"ends inside {what}: {count} bytes wanted at byte {start}, {self.size - start} left (cut?)"
            )
        self.pos = start + count
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self._take(8, what))[0])

    def _string(self, what: str, limit: int = MAX_STRING) -> str:
        length = self._u64(what)
        if length > limit:
            raise self.fail(f"{what} claims a string of {length} bytes; at most {limit} are allowed")
        start = self._take(length, what)
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 text (damaged?)") from error

    def _value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._numbers(kind, 1, what)[0]
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind} (damaged?)")
        item = self._u32(what)
        count = self._u64(what)
        if item not in _SCALARS and item != _STRING:
            raise self.fail(f"{what} is an array of type {item}; numbers, bools and strings can be read")
        if count > self.elements_left:
            raise self.fail(
                f"{what} claims {count} array elements; a file may hold {MAX_ELEMENTS} in all (damaged?)"
            )
        self.elements_left -= count
        if item != _STRING:
            return self._numbers(item, count, what)
        if count * 8 > self.size - self.pos:
            raise self.fail(f"ends inside {what}: {count} strings claimed (cut or damaged?)")
        return [self._string(what) for _ in range(count)]

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        start = self._take(count * dtype.itemsize, what)
        # A copy of these few bytes: an array over the mapping itself would keep the mapping from closing.
        return np.frombuffer(self.data[start : self.pos], dtype).tolist()

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string("a tensor's name", MAX_NAME)
        what = f"the entry of tensor {name!r}"
        num_dims = self._u32(what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} claims {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        shape = tuple(self._u64(what) for _ in range(num_dims))[::-1]
        kind = self._u32(what)
        try:
            quant = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self.fail(f"tensor {name!r} has the unknown type {kind}") from error
        return name, shape, quant, self._u64(what)

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
    ) -> dict[str, StoredTensor]:
        """Check every tensor's bytes: inside the file, aligned, not shared with another tensor."""
        base = -(-self.pos // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, quant, offset in infos:
            if name in tensors:
                raise self.fail(f"tensor {name!r} appears twice")
            block, block_bytes = GGML_QUANT_SIZES[quant]
            count = 1
            for dim in shape:
                count *= dim
            if count == 0 or shape[-1] % block:
                raise self.fail(
                    f"tensor {name!r} of type {quant.name} has shape {list(shape)}; "
                    f"dimensions must be positive and the last a multiple of {block}"
                )
            nbytes = count // block * block_bytes
            if offset % alignment:
                raise self.fail(f"tensor {name!r} starts at offset {offset}, not a multiple of {alignment}")
            if base + offset + nbytes > self.size:
                raise self.fail(
                    f"tensor {name!r} would end at byte {base + offset + nbytes}, "
                    f"but the file has {self.size} bytes (cut or damaged?)"
                )
            tensors[name] = StoredTensor(self.path, name, quant.name, shape, base + offset, nbytes)
        ordered = sorted(tensors.values(), key=lambda t: t.offset)
        for first, second in itertools.pairwise(ordered):
            if first.offset + first.nbytes > second.offset:
                raise self.fail(f"tensors {first.name!r} and {second.name!r} overlap")
        if ordered:
            end = ordered[-1].offset + ordered[-1].nbytes
            # Writers pad the last tensor or stop right after it; ending in between means bytes were lost.
            if end < self.size < -(-end // alignment) * alignment:
                raise self.fail(f"ends inside the padding after tensor {ordered[-1].name!r} (cut?)")
        return tensors


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
