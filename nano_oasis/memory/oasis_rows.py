"""The decode rows of a step in the oasis mode, and what their choice of blocks has in common over the layers.

Owns: Rows, Layout, and which miss policy a row has. Must not know: queries, masses, how blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nano_oasis.config import EngineConfig
from nano_oasis.kernels import select
from nano_oasis.memory.seat import Seat

_POLICIES = {
    "skip": select.SKIP, "repair": select.REPAIR, "wait": select.WAIT, "estimate": select.ESTIMATE
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One query of the step. draft: 0 for a request's newest token, then 1.. for its drafts."""

    seat: Seat
    token: int  # index into the step's T tokens
    context: int  # tokens visible to it
    draft: int


@dataclass
class Layout:
    """What the choice of blocks has in common over the layers of one kind: n rows, M positions, G groups."""

    rows: np.ndarray  # int32 [n, 8], see select.py
    wanted: np.ndarray  # bool [G, n, M]
    read: np.ndarray  # bool [G, n, M]
    asks: np.ndarray  # int32 [4, G * n * M]
    no_mass: np.ndarray  # fp32 [G, n, M] of zeros, for sliding windows: what is visible is forced

    @property
    def most(self) -> int:
        """Blocks that a row may read of one group: all of the groups' budgets at most, none twice."""
        return int(
            np.minimum(self.rows[:, select.BUDGET] * len(self.read), self.rows[:, select.BLOCKS]).max()
        )


@dataclass
class Rows:
    """Some rows of the step that are attended to together; a seat's rows follow each other, drafts last."""

    places: Sequence[Place]
    waits: bool = False  # misses are waited for, whatever the requests' policies: the result is to be exact
    layouts: dict[tuple[int | None, bool], Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seats = [p.seat for p in self.places]
        self.contexts = [p.context for p in self.places]
        self.tokens = torch.tensor([p.token for p in self.places])  # [n]
        self.index = torch.tensor([s.index for s in self.seats])  # [n]
        self.lens = torch.tensor(self.contexts, dtype=torch.int32)
        self.sealed = torch.tensor([s.sealed for s in self.seats])
        self.drafts = np.array([p.draft for p in self.places])
        self.has_drafts = bool(self.drafts.any())
        self.last = np.append(self.drafts[1:] == 0, True)  # of its seat
        # Host block of each sealed position, for the sketches; block 0 stands in for the others.
        width = max(len(s.request.block_table) for s in self.seats)
        padded = [s.request.block_table + [0] * (width - len(s.request.block_table)) for s in self.seats]
        self.host_blocks = torch.tensor(padded)  # [n, width] int64
        self.blocks = self.host_blocks.numpy()  # the same memory
        self.caps = np.stack([s.caps.numpy() for s in self.seats], 1).astype(np.int32)  # [layers, n]

    def layout(
        self, layer: int, window: int | None, options: EngineConfig, groups: int, drafting: bool
    ) -> Layout:
        key = (window, layer < options.dense_layers)
        if key not in self.layouts:
            size = options.block_size
            blocks = [-(-n // size) for n in self.contexts]
            table = np.zeros((len(blocks), 8), np.int32)
            for i, (place, count) in enumerate(zip(self.places, blocks, strict=True)):
                first = 0 if window is None else max(place.context - window, 0) // size
                # What is not sealed is nowhere else: always read, never a victim.
                sink = min(options.sink_blocks, count)
                recent = min(max(count - options.recent_blocks, 0), place.seat.sealed)
                budget = min(max(place.seat.budget, sink + count - recent), count)
                if window is not None:
                    sink, recent, budget = 0, first, count - first
                elif layer < options.dense_layers:
                    budget = count
                tail, policy = place.context - (count - 1) * size, self._policy(place, options, drafting)
                table[i] = place.seat.index, first, count, sink, recent, budget, tail, policy
            shape = groups, len(blocks), max(blocks)
            wanted, read = np.zeros((2, *shape), bool)
            asks = np.empty((4, wanted.size), np.int32)
            self.layouts[key] = Layout(table, wanted, read, asks, np.zeros(shape, np.float32))
        return self.layouts[key]

    def _policy(self, place: Place, options: EngineConfig, drafting: bool) -> int:
        seat = place.seat
        if drafting:
            return select.SKIP  # a guess waits for nothing
        if self.waits:
            return select.WAIT
        policy = _POLICIES[seat.request.params.miss_policy or options.miss_policy]
        if seat.cold or options.predictor == "current":
            policy = select.WAIT
        # The cap has room for all that one query wants; the others wait for what is heavy.
        return select.REPAIR if place.draft and policy == select.WAIT else policy
