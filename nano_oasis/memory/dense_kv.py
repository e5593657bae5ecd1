"""KV of the dense mode: every block of a request is on the device, in the same place of every layer.

Owns: the device slabs and what one step's attention reads from them.
Must not know: the model, sampling, why these rows run.

The model sees KV only through a view: `write` stores a layer's new keys and values, `attend` answers its
queries. Other modes give it another view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nano_oasis.kernels.batch import AttentionBatch, make_batch
from nano_oasis.kernels.dispatch import Kernels
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.request import ScheduledRow


class KVView(Protocol):
    """One step's access to KV. T tokens, the rows of the step one after another."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] (after rope) at this step's positions."""

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]. Called once per layer, after write."""


class KVStore(Protocol):
    """What the runner needs of a mode: a view before the forward pass, a word after it."""

    def begin(self, rows: Sequence[ScheduledRow]) -> KVView: ...

    def peek(self, rows: Sequence[ScheduledRow]) -> KVView:
        """A view for drafting, before begin(): what it writes at positions to come is provisional."""

    def report(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Counters and levels for Metrics.tiers; None where there is only one tier."""

    def end(self, rows: Sequence[ScheduledRow]) -> dict[int, str]:
        """The step is computed. Returns what went wrong, by request id: those results are not to be used."""


@dataclass
class DenseView:
    cache: KVCache
    batch: AttentionBatch
    kernels: Kernels

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.kernels.write_kv(k, v, *self.cache.layer(layer), self.batch.slots)

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        return self.kernels.attention(q, *self.cache.layer(layer), self.batch, scale, window)


@dataclass
class DenseKV:
    cache: KVCache
    kernels: Kernels
    device: str = "cpu"

    def begin(self, rows: Sequence[ScheduledRow]) -> DenseView:
        parts: list[tuple[list[int], int, int]] = []
        for row in rows:
            table = row.request.block_table
            if row.is_decode:  # the newest token and its drafts: a row with one query for each
                parts += [(table, at, 1) for at in range(row.start, row.start + row.num_tokens)]
            else:
                parts.append((table, row.start, row.num_tokens))
        return DenseView(self.cache, make_batch(parts, self.cache.block_size, self.device), self.kernels)

    peek = begin  # every position is written again when it is computed

    def end(self, rows: Sequence[ScheduledRow]) -> dict[int, str]:
        return {}  # nothing to do: what was written is where it stays

    def report(self) -> None:
        return None
