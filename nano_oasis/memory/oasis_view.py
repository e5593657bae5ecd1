"""One step's attention in the oasis mode: dense rows, shrunk rows, prefill chunks.

Owns: selection by sketch, what is attended to, what is done about a miss, what is asked for next.
Must not know: admission, sealing, how bytes move.

For each full-attention layer and shrunk row: score the sketches with the row's query, want the best blocks of
the budget, attend to the best *resident* ones; of the missing ones, wait for all or the heavy ones (by the
request's miss policy), and order the rest for the next step (predictor `previous`: what this query wants).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import select
from nano_oasis.memory.audit import mass_recall
from nano_oasis.memory.seat import Seat
from nano_oasis.memory.stream import merge, piece_attention, stream_attention
from nano_oasis.memory.tickets import NOW, Key, Ticket
from nano_oasis.request import ScheduledRow

if TYPE_CHECKING:
    from nano_oasis.memory.oasis_kv import OasisKV


@dataclass
class _Rows:
    """Some rows of the step that are attended to together."""

    seats: list[Seat]
    tokens: Tensor  # [n] indices into the step's T tokens (one per row for decodes)
    contexts: list[int]  # tokens visible to each row's newest query

    def __post_init__(self) -> None:
        self.index = torch.tensor([s.index for s in self.seats])  # [n]
        self.lens = torch.tensor(self.contexts, dtype=torch.int32)
        self.sealed = torch.tensor([s.sealed for s in self.seats])
        # Host block of each sealed position, for the sketches; block 0 stands in for the others.
        width = max(len(s.request.block_table) for s in self.seats)
        padded = [s.request.block_table + [0] * (width - len(s.request.block_table)) for s in self.seats]
        self.host_blocks = torch.tensor(padded)  # [n, width] int64


@dataclass
class _Layout:
    """What the choice of blocks has in common over the layers of one kind: n rows, M positions."""

    rows: np.ndarray  # int32 [n, 8], see select.py
    wanted: np.ndarray  # bool [n, M]
    read: np.ndarray  # bool [n, M]
    asks: np.ndarray  # int32 [3, n * M]
    no_mass: np.ndarray  # fp32 [n, M] of zeros, for sliding windows: what is visible is forced

    @property
    def budget(self) -> int:
        return int(self.rows[:, select.BUDGET].max())


class OasisView:
    """See KVView in dense_kv.py. T tokens, the rows one after another."""

    def __init__(self, kv: OasisKV, rows: Sequence[ScheduledRow]) -> None:
        self.kv = kv
        self.size = kv.block_size
        seats = [kv.seats[r.request.id] for r in rows]
        counts = torch.tensor([r.num_tokens for r in rows])
        starts = (counts.cumsum(0) - counts).tolist()
        position = torch.cat([torch.arange(r.start, r.start + r.num_tokens) for r in rows])
        token_seat = torch.tensor([s.index for s in seats]).repeat_interleave(counts)  # [T]
        slots = kv.residency.slot_of[:, token_seat, position // self.size].long()
        self.token_slots = slots * self.size + position % self.size  # [planes, T]; the tail does not move
        dense: list[tuple[Seat, int, int]] = []
        sparse: list[tuple[Seat, int, int]] = []
        self.chunks: list[tuple[Seat, ScheduledRow, slice]] = []
        for row, seat, at in zip(rows, seats, starts, strict=True):
            decode = row.num_tokens == 1 and row.start >= len(row.request.prompt_ids)
            if not decode:
                self.chunks.append((seat, row, slice(at, at + row.num_tokens)))
            else:
                (dense if seat.dense else sparse).append((seat, at, row.start + 1))
        self.dense, self.sparse = self._group(dense), self._group(sparse)
        if self.dense is not None:
            width = -(-max(self.dense.contexts) // self.size)
            self.dense_table = kv.residency.slot_of[:, self.dense.index, :width]  # [planes, n, width]
        self.layouts: dict[tuple[int | None, bool], _Layout] = {}
        self.counts = np.zeros(4, np.int64)
        self.estimated = 0
        if self.sparse is not None:
            self.caps = np.stack([s.caps.numpy() for s in self.sparse.seats], 1).astype(
                np.int32
            )  # [planes, n]

    @staticmethod
    def _group(parts: list[tuple[Seat, int, int]]) -> _Rows | None:
        if not parts:
            return None
        return _Rows([p[0] for p in parts], torch.tensor([p[1] for p in parts]), [p[2] for p in parts])

    # --- the model's side --------------------------------------------------------------------------
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        kv = self.kv
        for g in range(kv.groups):
            heads = kv.heads(g) or slice(None)
            slots = self.token_slots[layer * kv.groups + g]
            kv.kernels.write_kv(k[:, heads], v[:, heads], kv.slot_keys, kv.slot_values, slots)

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        kv = self.kv
        if self.sparse is not None:
            kv.coordinator.reached(kv.step, layer)
            kv.flights.land()
        if kv.groups == 1 and not self.chunks:  # the usual decode step: nothing to take apart
            if self.sparse is None:
                return self._dense(layer, q, scale, window)
            if self.dense is None:
                return self._sparse(layer, q, scale, window)
        out = torch.empty_like(q)
        parts = out.view(len(q), kv.groups, -1, q.shape[-1])  # [T, groups, Hq / groups, D]
        queries = q.view(parts.shape)
        for g in range(kv.groups):
            plane = layer * kv.groups + g
            if self.dense is not None:
                tokens = self.dense.tokens
                parts[tokens, g] = self._dense(plane, queries[tokens, g], scale, window)
            if self.sparse is not None:
                parts[self.sparse.tokens, g] = self._sparse(plane, queries[:, g], scale, window)
            for chunk in self.chunks:
                parts[chunk[2], g] = self._chunk(plane, queries[chunk[2], g], *chunk[:2], scale, window)
        return out

    def _dense(self, plane: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """The dense rows' queries [n, Hq, D] over everything."""
        rows = self.dense
        assert rows is not None
        return self._decode(q, self.dense_table[plane], rows.lens, rows.contexts, scale, window)

    def _decode(
        self, q: Tensor, table: Tensor, lens: Tensor, contexts: list[int] | None, scale: float,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        decode, caches = self.kv.kernels.paged_decode, (self.kv.slot_keys, self.kv.slot_values)
        out: Tensor = decode(q, *caches, table, lens, scale, window, context_list=contexts)
        return out

    # --- prefill chunks ----------------------------------------------------------------------------
    def _chunk(
        self, plane: int, q: Tensor, seat: Seat, row: ScheduledRow, scale: float, window: int | None
    ) -> Tensor:
        """q [n, Hq, D] of one row -> [n, Hq, D]; exact, wherever the earlier blocks are."""
        kv = self.kv
        end = row.start + row.num_tokens
        if seat.dense:
            table = kv.residency.slot_of[plane, seat.index, None, : -(-end // self.size)]
            starts, lens = (
                torch.tensor([0, len(q)], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
            )
            out: Tensor = kv.kernels.paged_prefill(
                q, kv.slot_keys, kv.slot_values, table, starts, lens, scale, window,
                context_list=[end], query_list=[0, len(q)],
            )  # fmt: skip
            return out
        layer, group = divmod(plane, kv.groups)
        first = row.start // self.size  # earlier blocks are sealed, so the host tier has them
        slots = kv.residency.slot_of[plane, seat.index, first : -(-end // self.size)].long()
        keys, values = (
            x[slots].flatten(0, 1)[: end - first * self.size] for x in (kv.slot_keys, kv.slot_values)
        )
        own = piece_attention(q, keys, values, row.start, first * self.size, scale, window)
        heads = kv.heads(group) or slice(0, kv.config.num_kv_heads)
        blocks = seat.request.block_table[:first]
        past = stream_attention(q, row.start, kv.host, layer, heads, blocks, kv.stage, scale, window)
        return merge(*own, *past)[0].to(q.dtype)

    # --- sparse decode -----------------------------------------------------------------------------
    def _sparse(self, plane: int, queries: Tensor, scale: float, window: int | None) -> Tensor:
        """The shrunk rows' queries -> [n, Hq, D], over the best resident blocks of each row's budget."""
        kv, rows = self.kv, self.sparse
        assert rows is not None
        q = queries if len(rows.seats) == len(queries) else queries[rows.tokens]
        x, counts = self._layout(plane // kv.groups, window), self.counts
        mass = x.no_mass if window is not None else self._mass(plane, q, scale, x.no_mass.shape[1])
        pool, options = kv.pool, kv.options
        state = (
            mass, x.rows, kv.residency.slots[plane], kv.residency.ages[plane], self.caps[plane],
            pool.free, pool.count, kv.reserve,
        )  # fmt: skip
        waits = x.rows[:, select.POLICY] == select.WAIT
        if waits.any():
            self._room_for(plane, x.rows[waits, select.SEAT], self.caps[plane, waits])
        kv.kernels.choose_now(*state, np.float32(options.repair_threshold), x.wanted, x.asks, counts)
        if counts[select.ASKS]:
            self._fetch_now(plane, rows, x, mass)
        for i in np.flatnonzero(waits):
            if (
                kv.residency.slots[plane, x.rows[i, select.SEAT], : x.wanted.shape[1]][x.wanted[i]] < 0
            ).any():
                why = "a KV block could not be fetched, and the miss policy is to wait"
                kv.failures[rows.seats[i].request.id] = why
        most = 0 if window is not None or options.predictor == "current" else kv.cap
        table = np.empty((len(x.rows), x.budget), np.int32)
        tokens = np.empty(len(x.rows), np.int32)
        kv.kernels.choose_read(
            *state, kv.step, most, self.size, x.wanted, x.read, table, tokens, x.asks, counts
        )
        if counts[select.ASKS]:
            kv.flights.start(self._tickets(plane, rows, x.asks[:, : counts[select.ASKS]], mass, kv.step + 1))
        slots, lens = torch.from_numpy(table), torch.from_numpy(tokens)
        if window is None and (x.rows[:, select.POLICY] == select.ESTIMATE).any():
            out = self._with_estimates(plane, q, x, slots, lens, scale)
        else:
            out = self._decode(q, slots, lens, None, scale, window)
        if window is None and options.audit_every and kv.step % options.audit_every == 0:
            self._audit(plane, q, x.read, scale)
        return out

    def _room_for(self, plane: int, seats: np.ndarray, caps: np.ndarray) -> None:
        """Free slots for those who insist, up to their caps. A prompt's chunks may hold all that admission
        counted on: they give way, and read from the host tier."""
        held = (self.kv.residency.slots[plane, seats] != select.EMPTY).sum(1)
        need = int((caps - held).clip(min=0).sum())
        if self.kv.pool.num_free < need:
            self.kv.make_room(need)

    def _with_estimates(
        self, plane: int, q: Tensor, x: _Layout, slots: Tensor, lens: Tensor, scale: float
    ) -> Tensor:
        """Attention over what is resident, and over the means of what is wanted and missing."""
        kv, rows, (layer, group) = self.kv, self.sparse, divmod(plane, self.kv.groups)
        assert rows is not None and kv.centroids is not None
        held = kv.residency.slots[plane][x.rows[:, select.SEAT], : x.wanted.shape[1]]
        missing = x.wanted & (held < 0) & (x.rows[:, select.POLICY] == select.ESTIMATE)[:, None]
        most = int(missing.sum(1).max())
        out, lse = kv.kernels.paged_decode(
            q, kv.slot_keys, kv.slot_values, slots, lens, scale, None, return_lse=True
        )
        if most == 0:
            return out
        self.estimated += int(missing.sum())
        valid, at = torch.from_numpy(missing.astype(np.int8)).topk(most, 1)  # [n, most]
        blocks = rows.host_blocks.gather(1, at)
        heads = kv.heads(group) or slice(0, kv.config.num_kv_heads)
        extra = kv.centroids.attend(layer, q, blocks, valid > 0, self.size, scale, heads)
        return merge(out.float(), lse, *extra)[0].to(q.dtype)

    def _layout(self, layer: int, window: int | None) -> _Layout:
        rows, o = self.sparse, self.kv.options
        assert rows is not None
        key = (window, layer < o.dense_layers)
        if key not in self.layouts:
            blocks = [-(-n // self.size) for n in rows.contexts]
            table = np.zeros((len(blocks), 8), np.int32)
            for i, (seat, context, count) in enumerate(zip(rows.seats, rows.contexts, blocks, strict=True)):
                first = 0 if window is None else max(context - window, 0) // self.size
                sink, recent = min(o.sink_blocks, count), max(count - o.recent_blocks, 0)
                budget = min(seat.budget, count)
                if window is not None:
                    sink, recent, budget = 0, first, count - first
                elif layer < o.dense_layers:
                    budget = count
                tail = context - (count - 1) * self.size
                table[i] = seat.index, first, count, sink, recent, budget, tail, self._policy(seat)
            shape = len(blocks), max(blocks)
            wanted, read = np.zeros((2, *shape), bool)
            asks = np.empty((3, shape[0] * shape[1]), np.int32)
            self.layouts[key] = _Layout(table, wanted, read, asks, np.zeros(shape, np.float32))
        return self.layouts[key]

    def _policy(self, seat: Seat) -> int:
        if seat.cold or self.kv.options.predictor == "current":
            return select.WAIT
        return _POLICIES[seat.request.params.miss_policy or self.kv.options.miss_policy]

    def _mass(self, plane: int, q: Tensor, scale: float, width: int) -> np.ndarray:
        """Estimated attention mass of every sealed block, fp32 [n, M]; 0 for the others."""
        kv, rows, (layer, group) = self.kv, self.sparse, divmod(plane, self.kv.groups)
        assert rows is not None
        table = rows.host_blocks[:, :width]
        mass = kv.sketches.mass(layer, q, table, rows.sealed, kv.heads(group), scale)
        return np.ascontiguousarray(mass.numpy())

    def _fetch_now(self, plane: int, rows: _Rows, x: _Layout, mass: np.ndarray) -> None:
        """Wait until the asked blocks are here."""
        kv, asks = self.kv, x.asks[:, : self.counts[select.ASKS]]
        where = asks[: select.SLOT].T.tolist()
        claimed = asks[:, asks[select.SLOT] != select.NO_SLOT]
        keys = [self._key(plane, rows.seats[i], m) for i, m in where]
        kv.flights.start_and_wait(self._tickets(plane, rows, claimed, mass, NOW), keys)
        for i, m in where:
            seat = rows.seats[i]
            if kv.residency.slots[plane, seat.index, m] >= 0:
                kv.stats.fetched_now += 1
                continue
            self.counts[select.SKIPPED] += 1

    def _tickets(
        self, plane: int, rows: _Rows, asks: np.ndarray, mass: np.ndarray, step: int
    ) -> list[Ticket]:
        """asks int32 [3, k] with slots claimed (see select.py) -> their tickets."""
        (layer, group), size = divmod(plane, self.kv.groups), self.kv.slot_bytes
        masses = mass[asks[select.ROW], asks[select.POSITION]].tolist()
        tickets = []
        for i, m, slot, heavy in zip(*asks.tolist(), masses, strict=True):
            request, generation = rows.seats[i].request, rows.seats[i].generation
            host = request.block_table[m]
            tickets.append(Ticket(request.id, generation, layer, group, m, host, slot, size, step, heavy))
        return tickets

    def _key(self, plane: int, seat: Seat, position: int) -> Key:
        return (seat.request.id, seat.generation, *divmod(plane, self.kv.groups), position)

    def _audit(self, plane: int, q: Tensor, read: np.ndarray, scale: float) -> None:
        """True mass recall of a quarter of the layers, in turn; a request below --audit-recall gets more."""
        kv, rows, (layer, group) = self.kv, self.sparse, divmod(plane, self.kv.groups)
        if rows is None or (kv.step // kv.options.audit_every + layer) % 4:
            return
        for i, seat in enumerate(rows.seats):
            blocks = torch.tensor(seat.request.block_table[: seat.sealed])
            keys = torch.empty((len(blocks), *kv.slot_keys.shape[1:]), dtype=kv.slot_keys.dtype)
            kv.host.load(layer, blocks, keys, torch.empty_like(keys), kv.heads(group))
            newest = kv.residency.slot_of[plane, seat.index, seat.sealed : -(-rows.contexts[i] // self.size)]
            seen = torch.cat((keys, kv.slot_keys[newest.long()])).flatten(0, 1)[: rows.contexts[i]]
            chosen = torch.from_numpy(np.flatnonzero(read[i]))
            recall = mass_recall(q[i], seen, self.size, chosen, scale)
            kv.stats.recall_sum += recall
            kv.stats.recall_count += 1
            if recall < kv.options.audit_recall:
                kv.raise_budget(seat)

    def close(self) -> None:
        """The step is over: order what the next one should find, add up what this one met."""
        self.kv.flights.flush()
        stats, counts = self.kv.stats, self.counts
        stats.hits += int(counts[select.HITS])
        stats.misses += int(counts[select.MISSES])
        stats.skipped += int(counts[select.SKIPPED]) - self.estimated
        stats.estimated += self.estimated


_POLICIES = {
    "skip": select.SKIP, "repair": select.REPAIR, "wait": select.WAIT, "estimate": select.ESTIMATE
}  # fmt: skip
