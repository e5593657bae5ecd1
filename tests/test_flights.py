"""Blocks on their way: who gets a slot back when a ticket is refused, fails, or comes after its request left.

Owns: these cases, against a coordinator that does what it is told. Must not know: links, threads.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nano_oasis.memory.flights import HAND_OVER, Flights
from nano_oasis.memory.residency import EMPTY, FLYING, Residency, SlotPool
from nano_oasis.memory.seat import Seat
from nano_oasis.memory.tickets import NOW, State, Ticket


class Told:
    """room: how many tickets it takes; the rest are refused. wait() ends what it is given, as `ends` says."""

    def __init__(self, room: int = 10**6, ends: State = State.COMPLETED) -> None:
        self.room, self.ends = room, ends
        self.taken: list[Ticket] = []
        self.calls = 0

    def submit(self, tickets):
        self.calls += 1
        free = max(self.room - len(self.taken), 0)
        self.taken += tickets[:free]
        return list(tickets[free:])

    def wait(self, tickets, timeout_s):
        for ticket in tickets:
            ticket.state = self.ends

    def copy_now(self, layer, blocks, groups, slots, nbytes):
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends is State.COMPLETED

    def completed(self):
        done = [t for t in self.taken if t.finished]
        self.taken = [t for t in self.taken if not t.finished]
        return done


@pytest.fixture
def world():
    pool = SlotPool(40)
    residency = Residency(pool, planes=2, seats=3, max_blocks=20)
    seat = Seat(SimpleNamespace(id=7), residency.sit(), 3, 4, torch.tensor([9, 9]), 18)
    return SimpleNamespace(pool=pool, residency=residency, seat=seat, seats={7: seat})


def flights(world, coordinator) -> Flights:
    return Flights(coordinator, world.residency, world.seats)


def ticket(world, position: int, step: int = 5) -> Ticket:
    slot = world.pool.take(1)[0]
    world.residency.slots[1, world.seat.index, position] = FLYING
    return Ticket(7, 3, 1, 0, position, 100 + position, slot, 10, step)


def place(world, position: int) -> int:
    return int(world.residency.slots[1, world.seat.index, position])


def test_tickets_for_the_next_step_are_handed_over_together(world) -> None:
    coordinator = Told()
    f = flights(world, coordinator)
    first = [ticket(world, p) for p in range(3)]
    f.start(first)
    assert coordinator.calls == 0 and len(f) == 3 < HAND_OVER
    f.flush()
    assert coordinator.taken == first and len(f) == 3
    f.wait_for_all()
    assert [place(world, p) for p in range(3)] == [t.slot for t in first] and len(f) == 0
    world.residency.check(0)


@pytest.mark.parametrize("ends", [State.FAILED, State.CANCELLED])
def test_what_does_not_arrive_gives_its_slot_back(world, ends: State) -> None:
    f = flights(world, Told(ends=ends))
    f.start([ticket(world, 4)])
    f.wait_for_all()
    assert place(world, 4) == EMPTY and world.pool.num_free == 40
    world.residency.check(0)


def test_refused_tickets_give_their_slots_back(world) -> None:
    f = flights(world, Told(room=1))
    f.start([ticket(world, p) for p in (4, 5)])
    f.flush()
    assert place(world, 4) == FLYING and place(world, 5) == EMPTY and len(f) == 1
    world.residency.check(1)


def test_what_is_insisted_on_waits_for_room(world) -> None:
    """The book holds two, other blocks' tickets fill it, and four are needed now."""
    f = flights(world, Told(room=2))
    f.start([ticket(world, p) for p in (0, 1)])
    f.flush()
    needed = [ticket(world, p, NOW) for p in (2, 3, 4, 5)]
    f.start_and_wait(needed, [t.key for t in needed])
    assert [place(world, p) for p in (2, 3, 4, 5)] == [t.slot for t in needed] and len(f) == 0
    world.residency.check(0)


@pytest.mark.parametrize("comes_back", [False, True])
def test_tickets_of_a_request_that_left_free_their_slots(world, comes_back: bool) -> None:
    """Handed over or not, refused or not: the step may have failed half way."""
    f = flights(world, Told(room=1))
    f.start([ticket(world, 4)])
    f.flush()
    f.start([ticket(world, 5)])  # kept back, and refused later
    world.residency.leave(world.seats.pop(7).index)
    if comes_back:
        world.seats[7] = world.seat
        world.seat.index, world.seat.generation = world.residency.sit(), 4
    f.wait_for_all()
    assert len(f) == 0 and world.pool.num_free == 40
    assert place(world, 4) == place(world, 5) == EMPTY
    world.residency.check(0)


@pytest.mark.parametrize("ends", [State.COMPLETED, State.FAILED, KeyboardInterrupt()], ids=str)
def test_what_is_brought_at_once(world, ends) -> None:
    """There: published. Not there: still claimed, for tickets. Interrupted: the slots are free again."""
    f = flights(world, Told(ends=ends))
    tickets = [ticket(world, p) for p in (4, 5)]
    slots = np.array([t.slot for t in tickets], np.int32)
    zero = np.zeros(2, np.int32)
    where = zero, zero + world.seat.index, np.array([4, 5])
    f.step = 9
    if isinstance(ends, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            f.bring(1, *where, np.array([104, 105]), slots, 10)
        assert place(world, 4) == place(world, 5) == EMPTY and world.pool.num_free == 40
    else:
        there = f.bring(1, *where, np.array([104, 105]), slots, 10)
        assert there == (ends is State.COMPLETED)
        assert [place(world, p) for p in (4, 5)] == (slots.tolist() if there else [FLYING, FLYING])
        assert (world.residency.ages[1, world.seat.index, 4] == 9) == there
    world.residency.check(2 if ends is State.FAILED else 0)


def test_a_seat_is_trimmed_to_a_cap_that_its_head_groups_share() -> None:
    """Least recently read first, in whichever group; sink, newest and what is on its way stay."""
    pool = SlotPool(40)
    residency = Residency(pool, planes=4, seats=2, max_blocks=6, groups=2)
    seat = residency.sit()
    residency.add(seat, range(6), 5)
    residency.used_at[0, seat, 1:4] = torch.tensor([1, 2, 3], dtype=torch.int32)  # layer 0, group 0
    residency.used_at[1, seat, 1:4] = torch.tensor([4, 1, 4], dtype=torch.int32)  # group 1
    residency.trim(seat, torch.tensor([9, 12]), keep_first=1, keep_last=2, end=6)
    gone = {tuple(x) for x in (residency.slot_of[:, seat] == EMPTY).nonzero().tolist()}
    assert gone == {(0, 1), (0, 2), (1, 2)} and pool.num_free == 40 - 24 + 3
    residency.check(0)
    residency.trim(seat, torch.tensor([0, 0]), keep_first=1, keep_last=2, end=0)  # nothing sealed yet
    assert pool.num_free == 40 - 24 + 3
