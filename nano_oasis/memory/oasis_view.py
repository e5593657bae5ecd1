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

import torch
from torch import Tensor

from nano_oasis.memory.audit import mass_recall
from nano_oasis.memory.residency import EMPTY, FLYING
from nano_oasis.memory.seat import Seat
from nano_oasis.memory.sketch import top_blocks
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
class _Plan:
    """n rows, M positions: which blocks a choice may and must contain."""

    blocks: Tensor  # [n] blocks of the context, the partial one included
    valid: Tensor  # [n, M] bool
    forced: Tensor  # [n, M] bool: read whatever their mass
    within: Tensor  # [n, most blocks any row reads] bool: within the row's own budget


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
        self.plans: dict[tuple[int | None, bool], _Plan] = {}

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
            kv.arrivals()
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
        p = self._plan(plane // kv.groups, window)
        forced, valid, within, count = p.forced, p.valid, p.within, p.within.shape[1]
        if window is None:
            mass = self._mass(plane, q, scale, p.valid.shape[1])
        else:
            mass = torch.zeros(valid.shape)
        want = self._top(mass, count, forced, valid, within)
        table = kv.residency.slot_of[plane]
        held = table[rows.index, : valid.shape[1]]  # [n, M]
        missing = (want >= 0) & (held.gather(1, want.clamp(min=0)) < 0)
        self._count(want, missing)
        if missing.any():
            self._fetch(plane, rows, want, missing, forced, held, mass, now=True)
            held = table[rows.index, : valid.shape[1]]
        here = held >= 0
        chosen = self._top(mass, count, forced, valid & here, within)
        out = self._decode(q, *self._slots(chosen, held, p.blocks, rows), None, scale, window)
        if window is None and kv.options.audit_every and kv.step % kv.options.audit_every == 0:
            self._audit(plane, q, chosen, held, scale)
        # -1 falls on position 0: the sink, which is read anyway
        kv.residency.used_at[plane][rows.index[:, None], chosen.clamp(min=0)] = kv.step
        if window is None and kv.options.predictor != "current":
            missing = (want >= 0) & (held.gather(1, want.clamp(min=0)) == EMPTY)
            if missing.any():
                self._fetch(plane, rows, want, missing, forced, held, mass, now=False)
        return out

    def _plan(self, layer: int, window: int | None) -> _Plan:
        """What the choice of blocks has in common over the layers of one kind; made once per step."""
        rows, o = self.sparse, self.kv.options
        assert rows is not None
        key = (window, layer < o.dense_layers)
        if key not in self.plans:
            blocks = (rows.lens.long() + self.size - 1) // self.size
            at = torch.arange(int(blocks.max()))
            valid = at < blocks[:, None]
            if window is not None:
                valid = forced = valid & (at * self.size + self.size > rows.lens[:, None] - window)
                budget = forced.sum(1)
            else:
                forced = valid & ((at < o.sink_blocks) | (at >= blocks[:, None] - o.recent_blocks))
                budget = torch.minimum(torch.tensor([s.budget for s in rows.seats]), blocks)
                budget = blocks if layer < o.dense_layers else budget
            within = torch.arange(int(budget.max())) < budget[:, None]
            self.plans[key] = _Plan(blocks, valid, forced, within)
        return self.plans[key]

    def _mass(self, plane: int, q: Tensor, scale: float, width: int) -> Tensor:
        """Estimated attention mass of every sealed block, [n, M] fp32; 0 for the others."""
        kv, rows, (layer, group) = self.kv, self.sparse, divmod(plane, self.kv.groups)
        assert rows is not None
        return kv.sketches.mass(layer, q, rows.host_blocks[:, :width], rows.sealed, kv.heads(group), scale)

    @staticmethod
    def _top(mass: Tensor, count: int, forced: Tensor, valid: Tensor, within: Tensor) -> Tensor:
        """[n, count] block positions, best first; -1 beyond a row's own budget or where there is none."""
        best = top_blocks(mass[:, None], count, forced & valid, valid)[:, 0]
        return best.masked_fill(~within[:, : best.shape[1]], -1)

    def _slots(self, chosen: Tensor, held: Tensor, blocks: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        """Chosen positions -> (slot table [n, count] int32, tokens [n] int32), the partial block last."""
        order = chosen.masked_fill(chosen < 0, 2**31 - 1).sort(1).values
        count = (chosen >= 0).sum(1)  # [n]
        table = held.gather(1, order.clamp(max=held.shape[1] - 1))
        tail = rows.lens.long() - (blocks - 1) * self.size  # tokens in the newest block, always chosen
        return table, ((count - 1) * self.size + tail).int()

    def _count(self, want: Tensor, missing: Tensor) -> None:
        stats = self.kv.stats
        misses = int(missing.sum())
        stats.hits += int((want >= 0).sum()) - misses
        stats.misses += misses

    def _audit(self, plane: int, q: Tensor, chosen: Tensor, held: Tensor, scale: float) -> None:
        """True mass recall of a quarter of the layers, in turn; a request below --audit-recall gets more."""
        kv, rows, (layer, group) = self.kv, self.sparse, divmod(plane, self.kv.groups)
        if rows is None or (kv.step // kv.options.audit_every + layer) % 4:
            return
        for i, seat in enumerate(rows.seats):
            blocks = torch.tensor(seat.request.block_table[: seat.sealed])
            keys = torch.empty((len(blocks), *kv.slot_keys.shape[1:]), dtype=kv.slot_keys.dtype)
            kv.host.load(layer, blocks, keys, torch.empty_like(keys), kv.heads(group))
            tail = kv.slot_keys[held[i, seat.sealed : -(-rows.contexts[i] // self.size)].long()]
            seen = torch.cat((keys, tail)).flatten(0, 1)[: rows.contexts[i]]
            recall = mass_recall(q[i], seen, self.size, chosen[i][chosen[i] >= 0], scale)
            kv.stats.recall_sum += recall
            kv.stats.recall_count += 1
            if recall < kv.options.audit_recall:
                kv.raise_budget(seat)

    # --- fetching ----------------------------------------------------------------------------------
    def _fetch(
        self, plane: int, rows: _Rows, want: Tensor, missing: Tensor, forced: Tensor, held: Tensor,
        mass: Tensor, now: bool,
    ) -> None:  # fmt: skip
        """Order missing blocks: those waited for (`now`), or for the next step, within the admission cap."""
        kv = self.kv
        flying = held.gather(1, want.clamp(min=0)) == FLYING
        if now:
            heavy = mass.gather(1, want.clamp(min=0)) > kv.options.repair_threshold
            policy = [self._policy(s) for s in rows.seats]
            ask = missing & torch.tensor([p != "skip" for p in policy])[:, None]
            ask &= heavy | torch.tensor([p == "wait" for p in policy])[:, None]
        else:
            ask = missing & ~flying
            ask &= ask.cumsum(1) <= kv.cap
        fresh = ask & ~flying
        if fresh.any():
            kv.fly(self._claim(plane, rows, want, fresh, forced, held, mass, now))
        if now and ask.any():
            self._await(plane, rows, want, ask)
        if now:
            kv.stats.skipped += int((missing & ~ask).sum())

    def _await(self, plane: int, rows: _Rows, want: Tensor, ask: Tensor) -> None:
        """Wait until the asked blocks are here. One that cannot be had ends a request that insists on it."""
        kv = self.kv
        asked = [(rows.seats[i], int(want[i, j])) for i, j in ask.nonzero().tolist()]
        kv.wait([self._key(plane, seat, position) for seat, position in asked])
        for seat, position in asked:
            if int(kv.residency.slot_of[plane, seat.index, position]) >= 0:
                kv.stats.fetched_now += 1
                continue
            kv.stats.skipped += 1
            if (seat.request.params.miss_policy or kv.options.miss_policy) == "wait":
                kv.failures[seat.request.id] = (
                    "a KV block could not be fetched, and the miss policy is to wait"
                )

    def _key(self, plane: int, seat: Seat, position: int) -> Key:
        return (seat.request.id, seat.generation, *divmod(plane, self.kv.groups), position)

    def _policy(self, seat: Seat) -> str:
        if seat.cold or self.kv.options.predictor == "current":
            return "wait"
        return seat.request.params.miss_policy or self.kv.options.miss_policy

    def _claim(
        self, plane: int, rows: _Rows, want: Tensor, ask: Tensor, forced: Tensor, held: Tensor, mass: Tensor,
        now: bool,
    ) -> list[Ticket]:  # fmt: skip
        """A slot for each asked block: a free one under the row's cap, else that of its oldest unwanted."""
        kv, (layer, group) = self.kv, divmod(plane, self.kv.groups)
        table = kv.residency.slot_of[plane]
        wanted = torch.zeros(held.shape, dtype=torch.bool)
        wanted.scatter_(1, want.clamp(min=0), True)  # position 0 is the sink: forced anyway
        evictable = (held >= 0) & ~forced & ~wanted
        age = kv.residency.used_at[plane][rows.index, : held.shape[1]].masked_fill(~evictable, 2**31 - 1)
        most = min(int(ask.sum(1).max()), held.shape[1])
        victims = age.topk(most, dim=1, largest=False)
        choices = victims.indices.masked_fill(victims.values == 2**31 - 1, -1).tolist()
        resident = ((held >= 0) | (held == FLYING)).sum(1).tolist()
        caps = [int(s.caps[plane]) for s in rows.seats]
        tickets = []
        wants, masses = want.tolist(), mass.gather(1, want.clamp(min=0)).tolist()
        for i, j in ask.nonzero().tolist():
            seat, position = rows.seats[i], wants[i][j]
            if kv.spare > 0 or (resident[i] < caps[i] and kv.pool.num_free > 0):
                slot = kv.pool.take(1)[0]
                resident[i] += 1
            elif choices[i] and choices[i][0] >= 0:
                victim = choices[i].pop(0)
                slot = int(table[seat.index, victim])
                table[seat.index, victim] = EMPTY
            else:
                continue
            table[seat.index, position] = FLYING
            tickets.append(
                Ticket(
                    seat.request.id, seat.generation, layer, group, position,
                    seat.request.block_table[position], slot, kv.slot_bytes,
                    NOW if now else kv.step + 1, masses[i][j],
                )
            )  # fmt: skip
        return tickets
