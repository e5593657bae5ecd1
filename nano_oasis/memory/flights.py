"""Blocks on their way to the device: from claimed slots to published ones.

Owns: the tickets of the oasis mode, publishing what arrived, taking back slots of what did not.
Must not know: why a block was wanted, which slots are claimed for it, how bytes move.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.residency import EMPTY, Residency
from nano_oasis.memory.seat import Seat
from nano_oasis.memory.tickets import Key, Ticket

HAND_OVER = 128  # tickets
WAIT_S = 30.0  # a fetch that takes longer than this is given up and treated as a miss


class Flights:
    """seats: the running requests by id, which the owner keeps up to date."""

    def __init__(
        self, coordinator: PrefetchCoordinator, residency: Residency, seats: Mapping[int, Seat]
    ) -> None:
        self.coordinator, self.residency, self.seats = coordinator, residency, seats
        self.step = 0  # the current one, for the age of what arrives
        self._ready: list[Ticket] = []
        self._flying: dict[Key, Ticket] = {}

    def __len__(self) -> int:
        return len(self._flying) + len(self._ready)

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Tickets for the next step, whose slots are claimed; those the coordinator refuses lose them.

        They are handed over some layers at a time: each time wakes the coordinator's thread, and there is a
        whole step's time.
        """
        self._ready += tickets
        if len(self._ready) >= HAND_OVER:
            self.flush()

    def flush(self) -> None:
        """Hand over what start() has kept back."""
        tickets, self._ready = self._ready, []
        self._drop(self._submit(tickets))

    def start_and_wait(self, tickets: Sequence[Ticket], keys: Sequence[Key]) -> None:
        """Submit these and wait for them and for `keys`, which may be on their way already."""
        end = time.monotonic() + WAIT_S
        keys = list(dict.fromkeys(keys))  # a request's newest token and its drafts may ask for the same
        while True:
            tickets = self._submit(tickets)
            # Refused ones want room in the coordinator's book: whatever ends makes some.
            waited = (
                self._flying.values() if tickets else [self._flying[k] for k in keys if k in self._flying]
            )
            self.coordinator.wait(list(waited), max(end - time.monotonic(), 0.0))
            self.land()
            if not tickets or time.monotonic() > end:
                return self._drop(tickets)

    def bring(
        self, layer: int, groups: np.ndarray, seats: np.ndarray, positions: np.ndarray, blocks: np.ndarray,
        slots: np.ndarray, nbytes: int,
    ) -> bool:  # fmt: skip
        """Copy into claimed slots here and now, and publish; int [n] each. False: it takes tickets."""
        try:
            done = self.coordinator.copy_now(layer, blocks, groups, slots, nbytes)
        except BaseException:  # Ctrl-C: they belong to nobody
            self.residency.layer_slots[layer, groups, seats, positions] = EMPTY
            self.residency.pool.give(slots.tolist())
            raise
        if done:
            self.residency.layer_slots[layer, groups, seats, positions] = slots
            self.residency.layer_ages[layer, groups, seats, positions] = self.step
        return done

    def wait_for_all(self) -> None:
        self.flush()
        self.coordinator.wait(list(self._flying.values()), WAIT_S)
        self.land()

    def land(self) -> None:
        """Completed tickets become readable; slots of the others are free again."""
        for ticket in self.coordinator.completed():
            del self._flying[ticket.key]
            if ticket.completed and (at := self._place(ticket)) is not None:
                self.residency.layer_slots[at], self.residency.layer_ages[at] = ticket.slot, self.step
            else:
                self._drop([ticket])

    def _submit(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        try:
            refused = self.coordinator.submit(tickets)
        except BaseException:  # it has stopped: nothing will arrive
            self._drop(tickets)
            raise
        gone = {t.slot for t in refused}
        self._flying |= {t.key: t for t in tickets if t.slot not in gone}
        return refused

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        """These will not arrive, or nobody is there any more: their slots are free again."""
        for ticket in tickets:
            if (at := self._place(ticket)) is not None:
                self.residency.layer_slots[at] = EMPTY
            self.residency.pool.give([ticket.slot])

    def _place(self, ticket: Ticket) -> tuple[int, int, int, int] | None:
        """Where in the tables; None if the request has left, or was preempted and came back."""
        seat = self.seats.get(ticket.request_id)
        if seat is None or seat.generation != ticket.generation:
            return None
        return ticket.layer, ticket.group, seat.index, ticket.position
