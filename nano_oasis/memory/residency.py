"""Which block of which request is in which device slot, layer by layer.

Owns: the pool of slots, the residency table, the choice of victims.
Must not know: queries, sketches, how bytes move, the scheduler.

A *slot* holds the keys and values of one block for one *plane* (a layer's head group; with one group per
layer a plane is a layer). All planes and requests draw from one pool. A slot is always in one place:

    free ── take ──> resident (table says where) ── evict ──> free
                         ^            │
                 publish │            └── claim ──> in flight (a ticket owns it) ── release ──> free
                         └───────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_oasis.kernels.select import EMPTY, FLYING, Pool


class OutOfSlots(RuntimeError):
    """More slots were asked for than are free. Nothing was changed."""


class SlotPool(Pool):
    """The free slots."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        return int(self.count[0])

    def take(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfSlots(f"{count} slots wanted, {self.num_free} free of {self.num_slots}")
        end = self.num_free
        self.count[0] -= count
        taken: list[int] = self.free[end - count : end][::-1].tolist()
        return taken

    def give(self, slots: Sequence[int]) -> None:
        end = self.num_free
        self.free[end : end + len(slots)] = slots[::-1]
        self.count[0] += len(slots)


class Residency:
    """Tables over [planes, seats, positions]; a running request has a seat.

    slot_of: int32, the slot of a block, EMPTY or FLYING. used_at: int32, the step that last selected it.
    Plane l * groups + g is head group g of layer l.
    """

    def __init__(self, pool: SlotPool, planes: int, seats: int, max_blocks: int, groups: int = 1) -> None:
        self.pool = pool
        self.planes, self.groups = planes, groups
        self.slot_of = torch.full((planes, seats, max_blocks), EMPTY, dtype=torch.int32)
        self.used_at = torch.zeros((planes, seats, max_blocks), dtype=torch.int32)
        self.slots, self.ages = self.slot_of.numpy(), self.used_at.numpy()  # the same memory
        shape = planes // groups, groups, seats, max_blocks
        self.layer_slots, self.layer_ages = self.slots.reshape(shape), self.ages.reshape(shape)  # and here
        self._seats = list(range(seats - 1, -1, -1))

    def sit(self) -> int:
        return self._seats.pop()

    def leave(self, seat: int) -> None:
        """Free the seat and every slot that is resident there; flying ones come back with their tickets."""
        table = self.slot_of[:, seat]
        self.pool.give(table[table >= 0].tolist())
        table.fill_(EMPTY)
        self.used_at[:, seat] = 0
        self._seats.append(seat)

    def add(self, seat: int, positions: range, step: int) -> None:
        """Give the blocks at `positions` a slot in every plane. Raises OutOfSlots."""
        slots = self.pool.take(self.planes * len(positions))
        where = slice(positions.start, positions.stop)
        self.slot_of[:, seat, where] = torch.tensor(slots, dtype=torch.int32).view(self.planes, -1)
        self.used_at[:, seat, where] = step

    def resident(self, seat: int) -> int:
        """Slots this seat holds in all planes, those in flight left out."""
        return int((self.slot_of[:, seat] >= 0).sum())

    def trim(self, seat: int, caps: Tensor, keep_first: int, keep_last: int, end: int) -> None:
        """Evict down to caps [layers] slots per layer, in all its groups, least recently selected first.

        The first `keep_first` and last `keep_last` of the `end` positions stay: they are always read.
        """
        if end == 0:
            return
        table, used = self.slot_of[:, seat, :end], self.used_at[:, seat, :end]  # [planes, end]
        here = table >= 0
        held = here | (table == FLYING)  # what is on its way will need its place
        excess = (held.view(len(caps), -1).sum(1) - caps).clamp(min=0)  # [layers]
        most = int(excess.max())
        if most == 0:
            return
        evictable = here.clone()
        evictable[:, :keep_first] = False
        evictable[:, max(end - keep_last, 0) :] = False
        # Among equals the older position goes first: after a prefill the newest blocks stay.
        age = (used.long() * (end + 1) + torch.arange(end)).masked_fill(~evictable, 2**62)
        age = age.view(len(caps), -1)  # [layers, groups * end]
        order = age.topk(min(most, age.shape[1]), dim=1, largest=False)
        gone = (torch.arange(order.indices.shape[1]) < excess[:, None]) & (order.values < 2**62)
        layers, columns = gone.nonzero(as_tuple=True)
        chosen = order.indices[layers, columns]
        planes, positions = layers * self.groups + chosen // end, chosen % end
        self.pool.give(table[planes, positions].tolist())
        table[planes, positions] = EMPTY

    def check(self, in_flight: int) -> None:
        """Raise AssertionError unless free + resident + in flight = all, and no slot is used twice."""
        used = self.slot_of[self.slot_of >= 0].tolist()
        assert len(set(used)) == len(used), "a slot holds two blocks"
        assert not set(used) & set(self.pool.free[: self.pool.num_free].tolist()), "a slot is free and in use"
        assert len(used) + self.pool.num_free + in_flight == self.pool.num_slots, "slots do not add up"
