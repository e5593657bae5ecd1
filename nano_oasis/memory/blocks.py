"""Logical KV blocks: ids, reference counts, the prefix index, and least-recently-used eviction.

Owns: which block id is free, held or cached, and which tokens a published block stands for.
Must not know: torch, where a block's bytes are, or who asks.

A block is in exactly one place:

    free list  ->  held (ref > 0)  ->  free list            (never published)
                        |    ^
              publish   v    | lookup hit
                     cached (ref 0, published, in LRU order) -> evicted -> free list
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or evictable. Nothing was changed."""


@dataclass(slots=True)
class _Entry:
    """A published block: the exact tokens it holds and the published block before it."""

    serial: int  # never reused, so a child can name its parent safely
    parent: int  # serial of the block before it; 0 = the prefix starts here
    tokens: bytes
    salt: bytes
    key: bytes
    block: int


def hash_block(parent_key: bytes, tokens: bytes, salt: bytes) -> bytes:
    """Chained content key of a block: its tokens, everything before them, and the salt."""
    return hashlib.blake2b(
        parent_key + len(salt).to_bytes(4, "little") + salt + tokens, digest_size=16
    ).digest()


@dataclass
class BlockManager:
    """Hands out `num_blocks` block ids of `block_size` tokens each.

    Prefix reuse is verified, not trusted: a hit needs the same tokens, the same salt and the same
    *parent entry*, so even a constant hash could only cost hits, never hand out foreign KV.
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    _free: list[int] = field(init=False)
    _refs: list[int] = field(init=False)
    _entry_of: dict[int, _Entry] = field(init=False, default_factory=dict)  # block id -> entry
    _index: dict[bytes, _Entry] = field(init=False, default_factory=dict)  # key -> entry
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # oldest first
    _serial: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))  # popped from the end: low ids first
        self._refs = [0] * self.num_blocks

    # --- counting -----------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        """Blocks that allocate() could hand out now, cached prefixes included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- taking and giving back ---------------------------------------------------------------
    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises OutOfBlocks, changing nothing."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free of {self.num_blocks}")
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. Later blocks are evicted before the prefix they extend."""
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise AssertionError(f"block {block} released more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._entry_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        entry = self._entry_of.pop(block)
        if self._index.get(entry.key) is entry:
            del self._index[entry.key]

    # --- prefix index -------------------------------------------------------------------------
    def lookup(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """Blocks of the longest published prefix of `tokens` (whole blocks), each now referenced.

        At least the last token is left to compute, so the model always has a row to answer from.
        """
        hit: list[int] = []
        if not self.enable_prefix_caching:
            return hit
        parent: _Entry | None = None
        for i in range((len(tokens) - 1) // self.block_size):
            entry = self._find(parent, self._pack(tokens, i), salt)
            if entry is None:
                break
            hit.append(entry.block)
            parent = entry
        for block in hit:
            self._refs[block] += 1
            self._cached.pop(block, None)
        return hit

    def publish(self, tokens: Sequence[int], table: Sequence[int], start: int, salt: bytes = b"") -> int:
        """Publish the full blocks `start`.. of a sequence whose KV for all of `tokens` is computed.

        `table` maps position // block_size to block id. Returns the number of leading blocks now
        settled. A block whose content is already published under another id stays private.
        """
        full = len(tokens) // self.block_size
        if not self.enable_prefix_caching or start >= full:
            return max(start, full)
        parent = self._entry_of.get(table[start - 1]) if start else None
        if start and parent is None:
            # The block before stayed private because its twin was first: chain on to the twin.
            parent = self._walk(tokens, start, salt)
            if parent is None:
                return full
        for i in range(start, full):
            packed = self._pack(tokens, i)
            entry = self._find(parent, packed, salt)
            if entry is None:
                key = hash_block(parent.key if parent else b"", packed, salt)
                if key in self._index or table[i] in self._entry_of:
                    return full  # the key names other content, or the block already has a name
                self._serial += 1
                entry = _Entry(self._serial, parent.serial if parent else 0, packed, salt, key, table[i])
                self._entry_of[table[i]] = self._index[key] = entry
            parent = entry
        return full

    def _walk(self, tokens: Sequence[int], count: int, salt: bytes) -> _Entry | None:
        parent: _Entry | None = None
        for i in range(count):
            parent = self._find(parent, self._pack(tokens, i), salt)
            if parent is None:
                return None
        return parent

    def _find(self, parent: _Entry | None, packed: bytes, salt: bytes) -> _Entry | None:
        entry = self._index.get(hash_block(parent.key if parent else b"", packed, salt))
        same = entry and entry.tokens == packed and entry.salt == salt
        return entry if same and entry and entry.parent == (parent.serial if parent else 0) else None

    def _pack(self, tokens: Sequence[int], i: int) -> bytes:
        return array("q", tokens[i * self.block_size : (i + 1) * self.block_size]).tobytes()

    # --- invariants ---------------------------------------------------------------------------
    def check(self, tables: Sequence[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless every block is in one place and references match `tables`."""
        free, cached = set(self._free), set(self._cached)
        held = {b for b in range(self.num_blocks) if self._refs[b] > 0}
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert not free & cached and not free & held and not cached & held, "a block is in two places"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert all(e.block == b and self._refs[b] >= 0 for b, e in self._entry_of.items())
        assert cached <= set(self._entry_of) and not free & set(self._entry_of)
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._refs, "reference counts do not match the block tables"
