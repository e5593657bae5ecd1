"""Tickets: promises to bring one block of KV from the host tier into a device slot, and their life.

Owns: the states of a ticket, the bounded book of all outstanding tickets, and the order they are served in.
Must not know: torch, threads, how bytes move, or why a block is wanted.

                            refused: stays NEW
    NEW ── submit ──> WAITING ── take ──> ENQUEUED ── finish ──> COMPLETED | FAILED
                         └──── cancel ──────────────────────────> CANCELLED
                                                                     └── collect: leaves the book, once
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int, int, int, int]
Deadline = tuple[int, int]
NOW = -1  # the `step` of a ticket that is due at once
PROMOTED: Deadline = (NOW, -1)  # sorts before every other deadline


class State(enum.Enum):
    NEW = "new"
    WAITING = "waiting"  # may still be cancelled
    ENQUEUED = "enqueued"  # the link has it: source and slot are in use, it ends by itself
    COMPLETED = "completed"  # the slot holds the block and may be published
    FAILED = "failed"  # the slot may hold anything and must not be read
    CANCELLED = "cancelled"  # the slot was never touched


@dataclass(slots=True, eq=False)
class Ticket:
    """One block for one (layer, head group): host block `host_block` into device slot `slot`.

    From submit until the ticket comes back the host block must not change and the slot belongs to the
    ticket: nobody reads it, nobody reuses it. `step` and `layer` are the deadline: the copy should be done
    when that step reaches that layer. step=NOW is for repairs: due at once, before all prefetches.
    `priority` is the attention mass the block is expected to receive.
    """

    request_id: int
    generation: int  # of the request: rises when it is preempted, so that old tickets are recognised
    layer: int
    group: int  # head group within the layer
    position: int  # the block's place in the request's context
    host_block: int
    slot: int
    nbytes: int  # keys and values together
    step: int
    priority: float = 0.0
    state: State = State.NEW
    error: str | None = None  # why it is FAILED or CANCELLED
    fence: Any = None  # what the device must have done before the slot may be written; see link.py

    @property
    def key(self) -> Key:
        return self.request_id, self.generation, self.layer, self.group, self.position

    @property
    def deadline(self) -> Deadline:
        return self.step, self.layer

    @property
    def enqueued(self) -> bool:
        """The link has accepted it (and may be done with it)."""
        return self.state in (State.ENQUEUED, State.COMPLETED, State.FAILED)

    @property
    def completed(self) -> bool:
        """The slot holds the block's bytes."""
        return self.state is State.COMPLETED

    @property
    def finished(self) -> bool:
        """Nothing will touch source or slot any more."""
        return self.state in (State.COMPLETED, State.FAILED, State.CANCELLED)


@dataclass
class TicketBook:
    """All tickets between submit and collect, at most `max_tickets` and `max_bytes` of them.

    A quarter of both is kept for tickets due NOW: prefetches never keep a repair out. A ticket counts until
    it is collected, not until it is finished: while a request has any, its slots are not its owner's to
    reuse. Not thread-safe.
    """

    max_tickets: int
    max_bytes: int
    num_bytes: int = field(init=False, default=0)
    _by_slot: dict[int, Ticket] = field(init=False, default_factory=dict)  # every ticket of the book
    _keys: set[Key] = field(init=False, default_factory=set)
    _per_request: Counter[int] = field(init=False, default_factory=Counter)
    # WAITING, by deadline: all of a list are of one layer, except the promoted ones.
    _waiting: dict[Deadline, list[Ticket]] = field(init=False, default_factory=dict)
    _finished: list[Ticket] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.max_tickets < 1 or self.max_bytes < 1:
            raise ValueError(
                f"the ticket book must hold something: max_tickets {self.max_tickets}, max_bytes "
                f"{self.max_bytes}; both must be at least 1"
            )

    def __len__(self) -> int:
        return len(self._by_slot)

    def in_flight(self, request_id: int | None = None) -> int:
        """Tickets submitted and not collected, of one request or of all."""
        return len(self) if request_id is None else self._per_request[request_id]

    # --- into the book ------------------------------------------------------------------------
    def submit(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Take in what the bounds allow, most urgent first; returns the rest, still NEW.

        Raises ValueError, changing nothing, for a ticket that is not new, is too large to ever fit, or
        names a key or slot that an outstanding ticket names already.
        """
        self._check(tickets)
        refused = []
        for ticket in sorted(tickets, key=_urgency):
            most, most_bytes = self._bounds(ticket)
            if len(self._by_slot) >= most or self.num_bytes + ticket.nbytes > most_bytes:
                refused.append(ticket)
                continue
            self._by_slot[ticket.slot] = ticket
            self._keys.add(ticket.key)
            self._per_request[ticket.request_id] += 1
            self.num_bytes += ticket.nbytes
            self._waiting.setdefault(ticket.deadline, []).append(ticket)
            ticket.state = State.WAITING
        return refused

    def _bounds(self, ticket: Ticket) -> tuple[int, int]:
        """What the book may hold when this ticket is in: tickets, bytes."""
        if ticket.step == NOW:
            return self.max_tickets, self.max_bytes
        return self.max_tickets - self.max_tickets // 4, self.max_bytes - self.max_bytes // 4

    def _check(self, tickets: Sequence[Ticket]) -> None:
        for t in tickets:
            if t.state is not State.NEW:
                raise ValueError(f"{t} was submitted before; make a new ticket")
            most_bytes = self._bounds(t)[1]
            if not 0 < t.nbytes <= most_bytes:
                raise ValueError(f"{t} can never be taken: nbytes must be from 1 to {most_bytes}")
        keys, slots = {t.key for t in tickets}, {t.slot for t in tickets}
        if len(keys) < len(tickets) or not keys.isdisjoint(self._keys):
            twice = [key for key in keys if key in self._keys] or "some key given twice"
            raise ValueError(f"blocks already on their way: {twice}; wait for their tickets")
        if len(slots) < len(tickets) or not slots.isdisjoint(self._by_slot):
            taken = [slot for slot in slots if slot in self._by_slot] or "some slot given twice"
            raise ValueError(f"slots that are the destination of another ticket: {taken}; take free ones")

    # --- towards the link ---------------------------------------------------------------------
    def take(self, max_bytes: int, only_promoted: bool = False) -> list[Ticket]:
        """The next batch for the link, now ENQUEUED: one layer's, earliest deadline, highest priority.

        At most `max_bytes`, but at least one ticket; empty if none is waiting.
        """
        if not self._waiting or (only_promoted and PROMOTED not in self._waiting):
            return []
        deadline = min(self._waiting)
        order = sorted(self._waiting[deadline], key=_urgency)
        batch: list[Ticket] = []
        size = 0
        for ticket in order:
            size += ticket.nbytes
            if batch and (size > max_bytes or ticket.layer != batch[0].layer):
                break
            batch.append(ticket)
            ticket.state = State.ENQUEUED
        self._waiting[deadline] = order[len(batch) :]
        if len(batch) == len(order):
            del self._waiting[deadline]
        return batch

    def promote(self, tickets: Iterable[Ticket]) -> None:
        """Serve these next: somebody is standing still until they are there."""
        urgent = [t for t in tickets if t.state is State.WAITING]
        if urgent:
            self._unqueue(urgent)
            self._waiting.setdefault(PROMOTED, []).extend(urgent)

    def _unqueue(self, tickets: Sequence[Ticket]) -> None:
        gone = set(tickets)
        left = {d: [t for t in waiting if t not in gone] for d, waiting in self._waiting.items()}
        self._waiting = {d: waiting for d, waiting in left.items() if waiting}

    # --- out of the book ----------------------------------------------------------------------
    def finish(self, tickets: Sequence[Ticket], error: str | None = None) -> None:
        """The link is done with these ENQUEUED tickets: COMPLETED, or FAILED with `error`."""
        for ticket in tickets:
            if ticket.state is not State.ENQUEUED:
                raise AssertionError(f"{ticket} is {ticket.state.value}, only enqueued tickets can finish")
            ticket.state, ticket.error = (State.FAILED, error) if error else (State.COMPLETED, None)
        self._finished += tickets

    def cancel(self, request_id: int | None, why: str) -> list[Ticket]:
        """End the WAITING tickets of a request (None = of all); those ENQUEUED go on. Returns the ended."""
        ended = [t for of in self._waiting.values() for t in of if request_id in (None, t.request_id)]
        for ticket in ended:
            ticket.state, ticket.error = State.CANCELLED, why
        self._unqueue(ended)
        self._finished += ended
        return ended

    def enqueued(self) -> list[Ticket]:
        """Those the link has now."""
        return [t for t in self._by_slot.values() if t.state is State.ENQUEUED]

    def collect(self) -> list[Ticket]:
        """Finished tickets not yet handed out, oldest first; they leave the book."""
        finished, self._finished = self._finished, []
        for ticket in finished:
            del self._by_slot[ticket.slot]
            self._keys.remove(ticket.key)
            self.num_bytes -= ticket.nbytes
            self._per_request[ticket.request_id] -= 1
            if not self._per_request[ticket.request_id]:
                del self._per_request[ticket.request_id]
        return finished


def _urgency(ticket: Ticket) -> tuple[int, int, float]:
    return ticket.step, ticket.layer, -ticket.priority
