"""One step's attention in the oasis mode: dense rows, shrunk rows, prefill chunks.

Owns: selection by sketch, what is attended to, what is done about a miss, what is asked for next.
Must not know: admission, sealing, how bytes move.

For each full-attention layer and shrunk row: score the sketches with the row's query, want the best blocks of
the budget (head groups have their own, and share it; in shapes there are G), attend to the best *resident*
ones; of the missing ones, wait for all or the heavy ones (by the request's miss policy), and order the rest
for the next step (predictor `previous`: what this query wants)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nano_oasis.kernels import select
from nano_oasis.memory.audit import mass_recall
from nano_oasis.memory.oasis_rows import Layout, Place, Rows
from nano_oasis.memory.seat import Seat
from nano_oasis.memory.stream import merge, piece_attention, stream_attention
from nano_oasis.memory.tickets import NOW, Ticket
from nano_oasis.request import ScheduledRow

if TYPE_CHECKING:
    from nano_oasis.memory.oasis_kv import OasisKV


class OasisView:
    """See KVView in dense_kv.py. T tokens, the rows one after another."""

    def __init__(self, kv: OasisKV, rows: Sequence[ScheduledRow], drafting: bool = False) -> None:
        """drafting: what is computed is a guess: selection also where everything is resident, no waiting."""
        self.kv, self.drafting = kv, drafting
        self.size = kv.block_size
        seats = [kv.seats[r.request.id] for r in rows]
        counts = torch.tensor([r.num_tokens for r in rows])
        starts = (counts.cumsum(0) - counts).tolist()
        position = torch.cat([torch.arange(r.start, r.start + r.num_tokens) for r in rows])
        token_seat = torch.tensor([s.index for s in seats]).repeat_interleave(counts)  # [T]
        slots = kv.residency.slot_of[:, token_seat, position // self.size].long()
        slots = slots * self.size + position % self.size  # [planes, T]; the tail does not move
        self.token_slots = slots.view(-1, kv.groups * len(position))  # [layers, G * T]
        dense: list[Place] = []
        sparse: list[Place] = []
        exact: list[Place] = []
        self.chunks: list[tuple[Seat, ScheduledRow, slice]] = []
        for row, seat, at in zip(rows, seats, starts, strict=True):
            if not row.is_decode:
                self.chunks.append((seat, row, slice(at, at + row.num_tokens)))
                continue
            whole = exact if seat.lossless and not drafting else sparse
            if seat.dense and not (drafting and seat.sealed > seat.budget):
                whole = dense
            whole += [Place(seat, at + j, row.start + j + 1, j) for j in range(row.num_tokens)]
        self.dense, self.sparse = (Rows(p) if p else None for p in (dense, sparse))
        self.exact = Rows(exact, waits=True) if exact else None
        if self.dense is not None:
            width = -(-max(self.dense.contexts) // self.size)
            table = kv.residency.slot_of[:, self.dense.index, :width]  # [planes, n, width]
            self.dense_table = table.view(
                -1, kv.groups * len(self.dense.places), width
            )  # [layers, G * n, width]
            self.dense_lens = self.dense.lens.repeat(kv.groups)
        self.counts = np.zeros(4, np.int64)
        self.estimated = 0
        self.closed = False
        self.num_drafts = {r.request.id: len(r.drafts) for r in rows if r.drafts}

    # --- the model's side --------------------------------------------------------------------------
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        kv = self.kv
        k, v = self._split(k), self._split(v)
        kv.kernels.write_kv(k, v, kv.slot_keys, kv.slot_values, self.token_slots[layer])

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        kv = self.kv
        kinds = [
            (rows, how)
            for rows, how in (
                (self.dense, self._dense),
                (self.sparse, self._sparse),
                (self.exact, self._exact),
            )
            if rows is not None
        ]
        if self.sparse is not None or self.exact is not None:
            kv.coordinator.reached(kv.step, layer)
            kv.flights.land()
        if not self.chunks and len(kinds) == 1:  # the usual step: nothing to take apart
            return kinds[0][1](kinds[0][0], layer, q, scale, window)
        out = torch.empty_like(q)
        for rows, how in kinds:
            out[rows.tokens] = how(rows, layer, q[rows.tokens], scale, window)
        for seat, row, at in self.chunks:
            out[at] = self._chunk(layer, q[at], seat, row, scale, window)
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[n, heads, D] -> [G * n, heads / G, D]: head groups are rows of their own, group after group."""
        groups = self.kv.groups
        return x if groups == 1 else x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)

    def _join(self, x: Tensor) -> Tensor:
        """The way back."""
        groups = self.kv.groups
        return x if groups == 1 else x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)

    def _dense(self, rows: Rows, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Queries [n, Hq, D] of rows whose request is on the device, over everything."""
        contexts = rows.contexts * self.kv.groups
        out = self._decode(self._split(q), self.dense_table[layer], self.dense_lens, contexts, scale, window)
        return self._join(out)

    def _decode(
        self, q: Tensor, table: Tensor, lens: Tensor, contexts: list[int] | None, scale: float,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        decode, caches = self.kv.kernels.paged_decode, (self.kv.slot_keys, self.kv.slot_values)
        out: Tensor = decode(q, *caches, table, lens, scale, window, context_list=contexts)
        return out

    # --- prefill chunks ----------------------------------------------------------------------------
    def _chunk(
        self, layer: int, q: Tensor, seat: Seat, row: ScheduledRow, scale: float, window: int | None
    ) -> Tensor:
        """q [n, Hq, D] of one row -> [n, Hq, D]; exact, wherever the earlier blocks are."""
        kv = self.kv
        end = row.start + row.num_tokens
        planes = kv.residency.slot_of[layer * kv.groups : (layer + 1) * kv.groups, seat.index]
        if seat.dense:  # head groups are rows
            starts = list(range(0, kv.groups * len(q) + 1, len(q)))
            out: Tensor = kv.kernels.paged_prefill(
                self._split(q), kv.slot_keys, kv.slot_values, planes[:, : -(-end // self.size)],
                torch.tensor(starts, dtype=torch.int32), torch.tensor([end] * kv.groups, dtype=torch.int32),
                scale, window, context_list=[end] * kv.groups, query_list=starts,
            )  # fmt: skip
            return self._join(out)
        first = row.start // self.size  # earlier blocks are sealed, so the host tier has them
        slots = planes[:, first : -(-end // self.size)].long()  # [G, blocks]
        keys, values = (  # [tokens, Hkv, D]
            torch.cat(tuple(x[slots]), 2).flatten(0, 1)[: end - first * self.size]
            for x in (kv.slot_keys, kv.slot_values)
        )
        own = piece_attention(q, keys, values, row.start, first * self.size, scale, window)
        blocks = seat.request.block_table[:first]
        past = stream_attention(q, row.start, kv.host, layer, blocks, kv.stage, scale, window)
        return merge(*own, *past)[0].to(q.dtype)

    # --- sparse decode -----------------------------------------------------------------------------
    def _exact(self, rows: Rows, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """q [n, Hq, D] over everything: sealed blocks where the host tier has them, others on the device."""
        if window is not None:
            return self._sparse(rows, layer, q, scale, window)  # forced, and waited for: all that is visible
        parts = self._split(q).view(self.kv.groups, len(q), -1, q.shape[-1])
        return torch.cat([self._exact_group(rows, layer, g, part, scale) for g, part in enumerate(parts)], 1)

    def _exact_group(self, rows: Rows, layer: int, group: int, q: Tensor, scale: float) -> Tensor:
        kv, plane = self.kv, layer * self.kv.groups + group
        held = kv.host.in_place(layer, kv.heads(group))
        assert held is not None, "refused at the door"
        decode, before = kv.kernels.paged_decode, (rows.sealed * self.size).int()
        past = decode(q, *held, rows.host_blocks.int(), before, scale, None, return_lse=True)
        first, width = int(rows.sealed.min()), -(-max(rows.contexts) // self.size)
        at = (rows.sealed[:, None] + torch.arange(width - first)).clamp(max=kv.residency.slots.shape[2] - 1)
        table = kv.residency.slot_of[plane, rows.index[:, None], at]  # [n, blocks after the sealed ones]
        caches = kv.slot_keys, kv.slot_values
        own = decode(q, *caches, table, rows.lens - before, scale, None, return_lse=True)
        return merge(own[0].float(), own[1], past[0].float(), past[1])[0].to(q.dtype)

    def _sparse(self, rows: Rows, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """The shrunk rows' q [n, Hq, D] -> [n, Hq, D], over the best resident blocks of each row's budget."""
        kv, counts = self.kv, self.counts
        pool, options = kv.pool, kv.options
        x = rows.layout(layer, window, options, kv.groups, self.drafting)
        mass = x.no_mass if window is not None else self._mass(rows, layer, q, scale, x.no_mass.shape[2])
        caps, held = rows.caps[layer], kv.residency.layer_slots[layer]  # [n], [G, P, positions]
        state = (
            mass, x.rows, held, kv.residency.layer_ages[layer], caps, pool.free, pool.count, kv.reserve
        )  # fmt: skip
        waits = x.rows[:, select.POLICY] == select.WAIT
        if waits.any():
            self._room_for(held[:, x.rows[waits, select.SEAT]], caps[waits])
        missed = int(counts[select.MISSES])
        kv.kernels.choose_now(*state, np.float32(options.repair_threshold), x.wanted, x.asks, counts)
        if counts[select.ASKS]:
            self._fetch_now(layer, rows, x, mass)
        if counts[select.MISSES] > missed and waits.any():
            lost = (x.wanted & (held[:, x.rows[:, select.SEAT], : mass.shape[2]] < 0)).any((0, 2)) & waits
            for i in np.flatnonzero(lost):
                why = "a KV block could not be fetched, and the miss policy is to wait"
                kv.failures[rows.seats[i].request.id] = why
        ahead, most = None, np.zeros(len(x.rows), np.int32)
        if window is None and options.predictor != "current":
            ahead = kv.lookahead.ahead(rows, mass)
            most = np.where(rows.last, kv.cap * kv.groups, 0).astype(np.int32)
        own = x.wanted.copy() if ahead is not None else x.wanted
        table = np.empty((*mass.shape[:2], x.most), np.int32)
        tokens = np.empty(mass.shape[:2], np.int32)
        kv.kernels.choose_read(
            *state, kv.step, most, self.size, ahead, x.wanted, x.read, table, tokens, x.asks, counts
        )
        kv.lookahead.measure(layer, rows, x, own, mass)
        if counts[select.ASKS]:
            masses = mass if ahead is None else ahead
            kv.flights.start(
                self._tickets(layer, rows, x.asks[:, : counts[select.ASKS]], masses, kv.step + 1)
            )
        slots, lens = torch.from_numpy(table).flatten(0, 1), torch.from_numpy(tokens).flatten()
        if window is None and (x.rows[:, select.POLICY] == select.ESTIMATE).any():
            out = self._with_estimates(rows, layer, self._split(q), x, own, slots, lens, scale)
        else:
            out = self._decode(self._split(q), slots, lens, None, scale, window)
        audited = options.audit_every and not self.drafting and kv.passes % options.audit_every == 0
        if window is None and audited:
            self._audit(rows, layer, q, x.read, scale)
        return self._join(out)

    def _room_for(self, held: np.ndarray, caps: np.ndarray) -> None:
        """Free slots for those who insist, held [G, n, positions], up to their caps [n]. A prompt's chunks
        may hold all that admission counted on: they give way, and read from the host tier."""
        need = int((caps - (held != select.EMPTY).sum((0, 2))).clip(min=0).sum())
        if self.kv.pool.num_free < need:
            self.kv.make_room(need)

    def _with_estimates(
        self, rows: Rows, layer: int, q: Tensor, x: Layout, own: np.ndarray, slots: Tensor, lens: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """q [G * n, Hq / G, D]: attention over what is resident, and over the means of what the rows want
        (own, bool [G, n, M]) and miss."""
        kv = self.kv
        assert kv.centroids is not None
        held = kv.residency.layer_slots[layer][:, x.rows[:, select.SEAT], : own.shape[2]]
        missing = own & (held < 0) & (x.rows[:, select.POLICY] == select.ESTIMATE)[:, None]  # [G, n, M]
        most = int(missing.sum(2).max())
        out, lse = kv.kernels.paged_decode(
            q, kv.slot_keys, kv.slot_values, slots, lens, scale, None, return_lse=True
        )
        if most == 0:
            return out
        self.estimated += int(missing.sum())
        valid, at = torch.from_numpy(missing.astype(np.int8)).topk(most, 2)  # [G, n, most]
        extra = []
        for g, part in enumerate(q.view(kv.groups, -1, *q.shape[1:])):
            heads = kv.heads(g) or slice(0, kv.config.num_kv_heads)
            blocks = rows.host_blocks.gather(1, at[g])
            extra.append(kv.centroids.attend(layer, part, blocks, valid[g] > 0, self.size, scale, heads))
        means, weights = (torch.cat(e) for e in zip(*extra, strict=True))
        return merge(out.float(), lse, means, weights)[0].to(q.dtype)

    def _mass(self, rows: Rows, layer: int, q: Tensor, scale: float, width: int) -> np.ndarray:
        """Estimated attention mass of every sealed block, fp32 [G, n, M]; 0 for the others."""
        table = rows.host_blocks[:, :width]
        mass = self.kv.sketches.mass(layer, q, table, rows.sealed, self.kv.groups, scale)
        return np.ascontiguousarray(mass.numpy())

    def _fetch_now(self, layer: int, rows: Rows, x: Layout, mass: np.ndarray) -> None:
        """Wait until the asked blocks are here."""
        kv, asks = self.kv, x.asks[:, : self.counts[select.ASKS]]
        groups, i, positions, slots = asks
        seats = x.rows[i, select.SEAT]
        claimed = slots != select.NO_SLOT
        at = layer, groups[claimed], seats[claimed], positions[claimed]
        blocks = rows.blocks[i, positions][claimed]
        left = asks[:, claimed]
        if len(blocks) and kv.flights.bring(*at, blocks, slots[claimed], kv.slot_bytes):
            left = asks[:, :0]
        if left.size or not claimed.all():
            keys = [
                (rows.seats[r].request.id, rows.seats[r].generation, layer, g, m)
                for g, r, m in asks[: select.SLOT].T.tolist()
            ]
            kv.flights.start_and_wait(self._tickets(layer, rows, left, mass, NOW), keys)
        here = int((kv.residency.layer_slots[layer, groups, seats, positions] >= 0).sum())
        kv.stats.fetched_now += here
        self.counts[select.SKIPPED] += asks.shape[1] - here

    def _tickets(self, layer: int, rows: Rows, asks: np.ndarray, mass: np.ndarray, step: int) -> list[Ticket]:
        """asks int32 [4, k] with slots claimed (see select.py) -> their tickets."""
        size = self.kv.slot_bytes
        masses = mass[*asks[: select.SLOT]].tolist()
        tickets = []
        for g, i, m, slot, heavy in zip(*asks.tolist(), masses, strict=True):
            request, generation = rows.seats[i].request, rows.seats[i].generation
            host = request.block_table[m]
            tickets.append(Ticket(request.id, generation, layer, g, m, host, slot, size, step, heavy))
        return tickets

    def _audit(self, rows: Rows, layer: int, q: Tensor, read: np.ndarray, scale: float) -> None:
        """True mass recall of a quarter of the layers, in turn; a request below --audit-recall gets more."""
        kv = self.kv
        if (kv.passes // kv.options.audit_every + layer) % 4:
            return
        shape = (-1, kv.slot_keys.shape[1], kv.config.num_kv_heads, kv.slot_keys.shape[3])
        for i, seat in enumerate(rows.seats):
            if rows.drafts[i]:
                continue  # a guess, which may be dropped
            blocks = torch.tensor(seat.request.block_table[: seat.sealed])
            keys = torch.empty((len(blocks), *shape[1:]), dtype=kv.slot_keys.dtype)
            kv.host.load(layer, blocks, keys, torch.empty_like(keys))
            newest = slice(seat.sealed, -(-rows.contexts[i] // self.size))
            planes = slice(layer * kv.groups, (layer + 1) * kv.groups)
            slots = kv.residency.slot_of[planes, seat.index, newest].long()  # [G, newest]
            own = torch.cat(tuple(kv.slot_keys[slots]), 2)  # [newest, B, H, D]
            seen = torch.cat((keys, own)).flatten(0, 1)[: rows.contexts[i]]
            parts = zip(q[i].chunk(kv.groups), seen.chunk(kv.groups, 1), read[:, i], strict=True)
            each = [
                mass_recall(query, part, self.size, torch.from_numpy(np.flatnonzero(chosen)), scale)
                for query, part, chosen in parts
            ]
            recall = sum(each) / len(each)
            kv.stats.recall_sum += recall
            kv.stats.recall_count += 1
            if recall < kv.options.audit_recall:
                kv.raise_budget(seat)

    def close(self) -> None:
        """The pass is over: order what the next one should find, add up what this one met."""
        if self.closed:
            return
        self.closed = True
        self.kv.flights.flush()
        stats, counts = self.kv.stats, self.counts
        stats.hits += int(counts[select.HITS])
        stats.misses += int(counts[select.MISSES])
        stats.skipped += int(counts[select.SKIPPED]) - self.estimated
        stats.estimated += self.estimated
