"""The host tier: the KV of every sealed block, all layers, in host memory or in a mapped file.

Owns: the slabs, their layout and size, and the copies in and out of them.
Must not know: which request a block belongs to, which ids are free (memory/blocks.py hands them out), or
when to copy. A block id must not be stored to while it is being loaded; the caller sees to that.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import zlib

import torch
from torch import Tensor

from nano_oasis.config import ModelConfig, format_bytes
from nano_oasis.kernels.dispatch import select_oasis_kernels
from nano_oasis.kernels.reference_blocks import copy_rows, gather_blocks, runs
from nano_oasis.memory.formats import DTYPES, KEYS, VALUES, Format, HostTierError, make_format, part_bytes
from nano_oasis.memory.host_file import HEADER_BYTES, HostFile
from nano_oasis.memory.pinning import Pinner

_PAGE = mmap.PAGESIZE
_STORE_CHUNK = 2**21  # bytes encoded, or staged, at once: temporaries that stay in the caches
_LOAD_CHUNK = 2**19


class HostTier:
    """Keys and values of blocks 0..num_blocks-1, for all layers.

    Letters in shapes: L layers, N blocks, n of them, B tokens per block, H KV heads, D head size.

    One slab per part of the format, [L, N, b, H, d]: keys, values, and for int8 their scales. Slabs are
    never zeroed, and pages (2 MiB where the kernel has them) that nobody stored to cost no memory. Each
    layer of a slab starts on its own page, so that layers can be pinned one by one and no copy of one layer
    crosses a border of pinned memory.

    Threads: any number may load and store at once, as long as their blocks differ.
    CUDA: copies run on the caller's current stream. store returns when the bytes are here; its stream must
    already wait for the work that wrote the blocks. load returns when the copies are enqueued (B042, B043).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, form: Format, path: str | None, pin: bool
    ) -> None:
        """Use create()."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.dtype, self.format = form.dtype, form.name
        self.num_layers = config.num_layers
        self._form = form
        self._shape = (block_size, config.num_kv_heads, config.head_dim)
        self.bytes_per_block, padding = _sizes(config, block_size, form)
        self.nbytes = num_blocks * self.bytes_per_block + padding
        self._file: HostFile | None = None
        self._pinner: Pinner | None = None
        self._memory: mmap.mmap | None = self._map(path)
        offset = HEADER_BYTES  # in memory this page stays untouched
        self._slabs: dict[int, list[Tensor]] = {KEYS: [], VALUES: []}
        for axis, slabs in self._slabs.items():
            for part in form.parts(self._shape, axis):
                slab, offset = self._slab(part, offset)
                slabs.append(slab)
        if pin:
            self._pinner = Pinner([(one.data_ptr(), one.nbytes) for s in self._all_slabs() for one in s])

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        format: str = "auto",
        path: str | None = None,
        pin: bool = False,
    ) -> HostTier:
        """format: "auto" (as the model's dtype) or "int8". path: a file, or a folder for the file, to keep
        the bytes in; it is made anew at every start and removed by close(). pin: page-lock the memory for
        CUDA, in the background. Raises HostTierError."""
        form = make_format(format, dtype)
        if num_blocks < 1 or block_size < 1:
            raise HostTierError(
                f"host tier of {num_blocks} blocks of {block_size} tokens: both must be at least 1"
            )
        if pin and path is not None:
            raise HostTierError("a file-backed host tier cannot be pinned: drop --host-kv-path or pin=True")
        if pin and not torch.cuda.is_available():
            raise HostTierError(
                "pin=True pins memory for CUDA, and this torch finds no CUDA device; use pin=False"
            )
        return cls(config, num_blocks, block_size, form, path, pin)

    # --- copies -------------------------------------------------------------------------------------
    def store(self, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """blocks [n] int64; keys, values [L, n, B, H, D] of the tier's dtype, any device -> the slabs.

        Raises HostTierError; the bytes of these blocks are then undefined, other blocks untouched.
        """
        self._store(slice(0, self.num_layers), blocks, keys, values)

    def store_layer(self, layer: int, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """store() of one layer: keys, values [n, B, H, D]."""
        self._store(slice(layer, layer + 1), blocks, keys[None], values[None])

    def _store(self, layers: slice, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        ids = self._ids(blocks)
        shape = (layers.stop - layers.start, len(ids), *self._shape)
        step = max(1, _STORE_CHUNK // (4 * shape[0] * math.prod(self._shape)))
        for axis, x in ((KEYS, keys), (VALUES, values)):
            self._check("keys and values to store", x, shape)
            for start in range(0, len(ids), step):
                chunk = ids[start : start + step]
                encoded = self._form.encode(x[:, start : start + step], axis)
                for slab, part in zip(self._slabs[axis], encoded, strict=True):
                    part = part.to("cpu")
                    for i, j in runs(chunk):
                        slab[layers, chunk[i] : chunk[i] + j - i].copy_(part[:, i:j])

    def load(
        self, layer: int, blocks: Tensor, out_keys: Tensor, out_values: Tensor, heads: slice | None = None
    ) -> None:
        """Blocks [n] of one layer -> out_keys, out_values [n, B, Hg, D], of the tier's dtype, any device.

        heads: the KV heads wanted (Hg of them); all by default.
        """
        ids = self._ids(blocks)
        shape = (len(ids), *self._group(heads))
        for axis, out in ((KEYS, out_keys), (VALUES, out_values)):
            self._check("tensors to load into", out, shape)
            parts = self._parts(axis, layer, heads)
            if len(parts) == 1 and out.device.type == "cpu":  # nothing to decode: one pass
                torch.index_select(parts[0], 0, blocks, out=out)
                continue
            step = max(1, _LOAD_CHUNK // (math.prod(shape[1:]) * self.dtype.itemsize))
            for i in range(0, len(ids), step):
                part = slice(i, i + step)
                self._decode(parts, blocks[part], ids[part], out[part])

    def load_into(
        self,
        layer: int,
        blocks: Tensor,
        slots: Tensor,
        slot_keys: Tensor,
        slot_values: Tensor,
        heads: slice | None = None,
    ) -> None:
        """Block blocks[i] of one layer -> slot slots[i] of a pool: slot_keys, slot_values [S, B, Hg, D].

        blocks, slots [n] int64 on the CPU; no slot twice. Blocks that are consecutive on both sides, on
        CUDA on the host side, travel as one copy.
        """
        ids, slot_ids = self._ids(blocks), slots.tolist()
        if len(slot_ids) != len(ids):
            raise HostTierError(f"{len(ids)} blocks cannot go to {len(slot_ids)} slots: one slot per block")
        shape = self._group(heads)
        for pool in (slot_keys, slot_values):
            self._check("slots to load into", pool, (len(pool), *shape))
        held = {axis: self._parts(axis, layer, heads) for axis in (KEYS, VALUES)}
        if len(held[KEYS]) == 1 and slot_keys.device.type == "cpu":  # nothing to decode: one pass
            gather_blocks(held[KEYS][0], held[VALUES][0], slot_keys, slot_values, blocks, slots)
            return
        for axis, pool in ((KEYS, slot_keys), (VALUES, slot_values)):
            parts = held[axis]
            step = max(1, _LOAD_CHUNK // (math.prod(shape) * self.dtype.itemsize))
            for i in range(0, len(ids), step):
                part = slice(i, i + step)
                decoded = pool.new_empty(len(ids[part]), *shape)
                self._decode(parts, blocks[part], ids[part], decoded)
                if pool.device.type == "cpu":
                    copy_rows(decoded, range(len(decoded)), pool, slot_ids[part])
                else:
                    pool.index_copy_(0, slots[part].to(pool.device), decoded)

    def load_groups(
        self,
        layer: int,
        blocks: Tensor,
        groups: Tensor,
        slots: Tensor,
        slot_keys: Tensor,
        slot_values: Tensor,
    ) -> None:
        """Head group groups[i] of block blocks[i] -> slots[i]: load_into for slots of different groups.

        A group is as many heads as a slot has; group g begins at head g * Hg.
        """
        size = slot_keys.shape[2]
        parts = self._parts(KEYS, layer, None), self._parts(VALUES, layer, None)
        if len(parts[0]) == 1 and slot_keys.device.type == "cpu":
            self._ids(blocks)
            for pool in (slot_keys, slot_values):
                self._check("slots to load into", pool, (len(pool), self.block_size, *pool.shape[2:]))
            gather = select_oasis_kernels("cpu").gather_groups
            gather(parts[0][0], parts[1][0], slot_keys, slot_values, blocks, groups, slots)
            return
        for group in groups.unique().tolist():
            own, heads = groups == group, slice(group * size, (group + 1) * size)
            self.load_into(layer, blocks[own], slots[own], slot_keys, slot_values, heads)

    def _parts(self, axis: int, layer: int, heads: slice | None) -> list[Tensor]:
        """What the format keeps of one layer's keys or values: [N, b, Hg, d] per part, views of the slabs."""
        return [slab[layer][:, :, heads or slice(None)] for slab in self._slabs[axis]]

    def in_place(self, layer: int, heads: slice | None = None) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a layer [N, B, Hg, D], to be read where they are; None if they are encoded.

        Raises HostTierError when the tier is closed, or its file is no longer what it was.
        """
        self._ids(torch.empty(0, dtype=torch.int64))
        parts = [self._parts(axis, layer, heads) for axis in (KEYS, VALUES)]
        return (parts[0][0], parts[1][0]) if all(len(p) == 1 for p in parts) else None

    def _decode(self, parts: list[Tensor], blocks: Tensor, ids: list[int], out: Tensor) -> None:
        """The n blocks -> out [n, B, Hg, D], on out's device; what crosses the link is still encoded."""
        self._form.decode([_gather(part, blocks, ids, out.device) for part in parts], out)

    def checksum(self, block: int) -> int:
        """CRC-32 of the block's stored bytes in all layers, scales included."""
        total = 0
        for slab in self._all_slabs():
            total = zlib.crc32(slab[:, block].contiguous().view(torch.uint8).numpy().tobytes(), total)
        return total

    def _ids(self, blocks: Tensor) -> list[int]:
        if not self._slabs:
            raise HostTierError("the host tier is closed")
        if self._file:
            self._file.check()
        ids: list[int] = blocks.tolist()
        if ids and not (min(ids) >= 0 and max(ids) < self.num_blocks):
            raise HostTierError(
                f"block ids {min(ids)}..{max(ids)} are not all within 0..{self.num_blocks - 1}"
            )
        return ids

    def _group(self, heads: slice | None) -> tuple[int, int, int]:
        b, h, d = self._shape
        return b, len(range(*heads.indices(h))) if heads else h, d

    def _check(self, what: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if x.shape != shape or x.dtype != self.dtype:
            raise HostTierError(
                f"{what}: expected {list(shape)} of {self.dtype}, got {list(x.shape)} of {x.dtype}"
            )

    # --- memory -------------------------------------------------------------------------------------
    def _map(self, path: str | None) -> mmap.mmap:
        if path is not None:
            b, h, d = self._shape
            self._file = HostFile(path, self.nbytes, {
                "layers": self.num_layers, "blocks": self.num_blocks, "block_size": b, "kv_heads": h,
                "head_dim": d, "format": self.format, "dtype": DTYPES[self.dtype],
            })  # fmt: skip
            return self._file.mapping
        installed = os.sysconf("SC_PHYS_PAGES") * _PAGE
        if self.nbytes > installed:
            raise HostTierError(
                f"a host tier of {self.nbytes} bytes ({format_bytes(self.nbytes)}) does not fit this "
                f"machine's {format_bytes(installed)} of memory; lower --host-kv-memory or use --host-kv-path"
            )
        try:
            memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostTierError(
                f"host tier of {self.nbytes} bytes: {error.strerror}; lower --host-kv-memory"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)  # scattered blocks: a quarter less time on address lookups
        return memory

    def _slab(self, part: tuple[tuple[int, int, int], torch.dtype], offset: int) -> tuple[Tensor, int]:
        """The view [L, N, b, H, d] of the memory at `offset`, and the offset after it."""
        layer = self.num_blocks * part_bytes(part)
        stride = _pages(layer)
        size = self.num_layers * stride
        with torch.inference_mode(False):  # plain tensors, which both modes may write to
            raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)
            slab = raw.view(self.num_layers, stride)[:, :layer].view(part[1])
            slab = slab.view(self.num_layers, self.num_blocks, *part[0])
        return slab, offset + size

    def _all_slabs(self) -> list[Tensor]:
        return self._slabs[KEYS] + self._slabs[VALUES]

    @property
    def pinned_bytes(self) -> int:
        return self._pinner.pinned_bytes if self._pinner else 0

    @property
    def discarded(self) -> str | None:
        """What an earlier run had left in the file, in words; None if nothing."""
        return self._file.discarded if self._file else None

    def close(self) -> None:
        """Gives the memory back and removes the file. Nothing may be loading or storing."""
        if self._pinner:
            self._pinner.close()
        # Dropped, not unmapped: torch does not lock the buffer, so mmap.close() under a live view would be
        # a crash. The memory goes with the last view of it, which is normally here.
        self._slabs = {}
        self._memory = None
        if self._file:
            self._file.close()

    def __enter__(self) -> HostTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def num_blocks_for(
    memory_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype, format: str = "auto"
) -> int:
    """Most blocks whose tier, padding and file header included, fits. Raises HostTierError if none does."""
    per_block, padding = _sizes(config, block_size, make_format(format, dtype))
    count = (memory_bytes - padding) // per_block
    if count < 1:
        raise HostTierError(
            f"host KV memory of {memory_bytes} bytes holds no block: one needs {per_block + padding} "
            f"({format_bytes(per_block + padding)})"
        )
    return count


def _sizes(config: ModelConfig, block_size: int, form: Format) -> tuple[int, int]:
    """Bytes of one block, and a bound on the bytes beside the blocks: file header, layers on whole pages."""
    shape = (block_size, config.num_kv_heads, config.head_dim)
    parts = form.parts(shape, KEYS) + form.parts(shape, VALUES)
    per_block = config.num_layers * sum(map(part_bytes, parts))
    return per_block, HEADER_BYTES + config.num_layers * len(parts) * _PAGE


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _gather(part: Tensor, blocks: Tensor, ids: list[int], device: torch.device) -> Tensor:
    """part [N, b, h, d] in host memory -> the n blocks [n, b, h, d] on `device`."""
    if device.type == "cpu":
        return part.index_select(0, blocks)
    # A fresh tensor each time: nobody rewrites it while a copy is under way. One copy per run of blocks.
    out = torch.empty((len(ids), *part.shape[1:]), dtype=part.dtype, device=device)
    for start, end in runs(ids):
        out[start:end].copy_(part[ids[start] : ids[start] + end - start], non_blocking=True)
    return out
