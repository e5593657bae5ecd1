"""The prefetch coordinator on real threads: the loop's, the copies', and the one that waits."""

import threading
import time

import numpy as np
import pytest
from prefetch_fakes import (
    HELD,
    LAYERS,
    NBYTES,
    GateLink,
    World,
    make_coordinator,
    make_ticket,
    nothing_is_left,  # noqa: F401  (a fixture)
    slots,
    watchdog,
)

from nano_oasis.memory.clock import RealClock, VirtualClock
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.link import MemcpyLink, SimulatedLink
from nano_oasis.memory.tickets import NOW, State


@watchdog()
def test_copies_run_on_neither_the_step_thread_nor_the_loop():
    world, threads = World(), []

    def move(layer, tickets):
        threads.append(threading.current_thread().name)
        world.move(layer, tickets)

    move.keys = world.keys
    coordinator = PrefetchCoordinator(MemcpyLink(move))
    coordinator.start()
    tickets = [make_ticket(i, layer=i % LAYERS) for i in range(24)]
    coordinator.submit(tickets)
    while not all(t.finished for t in tickets):
        time.sleep(1e-3)
    coordinator.stop()
    assert all(world.holds(t) for t in tickets) and len(threads) == LAYERS
    assert all(name.startswith("nano-oasis-copy") for name in threads)


def make_busy(move):
    """A coordinator whose only worker is held in its first copy, and the event that lets it go."""
    entered, go_on, here = threading.Event(), threading.Event(), []
    HELD.append(go_on)

    def held(layer, tickets):
        if threading.current_thread().name.startswith("nano-oasis-copy"):
            entered.set()
            go_on.wait()
        else:
            here.append([t.slot for t in tickets])
        move(layer, tickets)

    held.keys = move.keys
    coordinator, _ = make_coordinator(MemcpyLink(held), RealClock(), batch_bytes=4 * NBYTES)
    coordinator.submit([make_ticket(23)])
    entered.wait()
    return coordinator, go_on, here


@watchdog()
def test_a_thread_that_waits_copies_what_the_link_does_not_have_yet():
    world = World()
    coordinator, go_on, here = make_busy(world.move)
    tickets = [make_ticket(i, layer=1 + i % 2, step=NOW) for i in range(12)]
    others = [make_ticket(12)]
    coordinator.submit(tickets + others)
    assert coordinator.wait(tickets, 20) < 20  # the worker is held all this time
    assert here == [[0, 2, 4, 6], [8, 10], [1, 3, 5, 7], [9, 11]] and all(world.holds(t) for t in tickets)
    assert others[0].state is State.WAITING
    go_on.set()
    coordinator.wait(others, 20)
    coordinator.stop(timeout_s=20)
    assert coordinator.stats.completed == 14 and coordinator.stats.enqueued == 14


@watchdog()
def test_copies_of_the_waiting_thread_fail_alone_too():
    world = World()
    world.host.broken = {2}
    coordinator, go_on, here = make_busy(world.move)
    tickets = [make_ticket(i) for i in range(4)]
    coordinator.submit(tickets)
    coordinator.wait(tickets, 20)
    go_on.set()
    assert here == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert [t.completed for t in tickets] == [True, True, False, True] and "OSError" in tickets[2].error


@watchdog()
def test_an_interrupted_wait_loses_no_ticket():
    world = World()

    def interrupted(layer, tickets):
        if tickets[0].layer:
            raise KeyboardInterrupt
        world.move(layer, tickets)

    interrupted.keys = world.keys
    coordinator, go_on, _ = make_busy(interrupted)
    tickets = [make_ticket(i, layer=1) for i in range(4)]
    coordinator.submit(tickets)
    with pytest.raises(KeyboardInterrupt):
        coordinator.wait(tickets, 20)
    go_on.set()
    assert all(t.state is State.FAILED and "interrupted" in t.error for t in tickets)


@watchdog()
def test_stopping_leaves_a_copy_of_the_waiting_thread_to_that_thread():
    world, inside, go_on = World(), threading.Event(), threading.Event()
    HELD.append(go_on)

    def slow(layer, tickets):
        inside.set()
        go_on.wait()
        world.move(layer, tickets)

    link = GateLink()
    link.copy_here = slow
    coordinator, _ = make_coordinator(link, RealClock())
    coordinator.submit([make_ticket(0)])
    while not link.started:
        time.sleep(1e-3)
    ticket = make_ticket(5)
    coordinator.submit([ticket])
    waiter = threading.Thread(target=coordinator.wait, args=([ticket], 20), daemon=True)
    waiter.start()
    inside.wait()
    coordinator.stop(timeout_s=0.2)
    state = ticket.state
    go_on.set()
    waiter.join()
    assert state is State.ENQUEUED and ticket.completed and world.holds(ticket)
    assert slots(coordinator.completed()) == [0, 5]


@watchdog()
def test_a_fence_is_taken_on_the_callers_thread_for_each_submit():
    """B042: slots may still be read by work queued before the submit; the copy has to know."""

    class FencedLink(SimulatedLink):
        def fence(self):
            return threading.current_thread(), object()

    coordinator, _ = make_coordinator(FencedLink(bandwidth=1e9), RealClock())
    first, second = [make_ticket(0), make_ticket(1)], [make_ticket(2)]
    coordinator.submit(first)
    coordinator.submit(second)
    coordinator.wait(first + second, 20)
    coordinator.stop()
    assert first[0].fence is first[1].fence is not second[0].fence
    assert first[0].fence[0] is threading.current_thread()


@watchdog()
def test_stop_right_after_start_and_without_work():
    for clock in (RealClock(), VirtualClock()):
        coordinator = PrefetchCoordinator(SimulatedLink(bandwidth=1.0), clock=clock)
        coordinator.start()
        coordinator.stop(timeout_s=20)
        with pytest.raises(RuntimeError, match="is stopped"):
            coordinator.submit([make_ticket()])


@watchdog()
def test_copying_at_once_needs_no_tickets_and_says_when_it_cannot():
    world = World()
    coordinator, _ = make_coordinator(MemcpyLink(world.move), RealClock())
    what = [np.array(x) for x in ([4, 2], [0, 0], [7, 1])]
    assert coordinator.copy_now(3, *what, NBYTES)
    moved = [make_ticket(7, layer=3, host_block=4), make_ticket(1, layer=3, host_block=2)]
    assert all(world.holds(t) for t in moved) and coordinator.in_flight() == 0
    stats = coordinator.stats
    assert (stats.completed, stats.bytes) == (2, 2 * NBYTES) and stats.exposed_s > 0 and stats.bandwidth > 0
    world.host.broken = {2}
    assert not coordinator.copy_now(3, *what, NBYTES) and coordinator.stats.completed == 2
    coordinator.stop()
    world.host.broken = set()
    assert not coordinator.copy_now(3, *what, NBYTES)
    wire, _ = make_coordinator(SimulatedLink(world.move, bandwidth=1e9))
    assert not wire.copy_now(3, *what, NBYTES)  # a wire takes its time
