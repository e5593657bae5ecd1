"""The prefetch coordinator, in virtual time: overlap, order, failures, stops, the admission cap."""

import threading

import pytest
from prefetch_fakes import (
    LAYERS,
    NBYTES,
    BrokenLink,
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
from nano_oasis.memory.link import SimulatedLink
from nano_oasis.memory.link_rate import admission_cap
from nano_oasis.memory.tickets import NOW, State

SECOND = NBYTES  # a wire of this bandwidth takes one second per block


# --- overlap and waiting ----------------------------------------------------------------------------
@watchdog()
def test_a_copy_that_fits_into_the_step_costs_nothing():
    world = World()
    coordinator, clock = make_coordinator(SimulatedLink(world.move, bandwidth=SECOND))
    tickets = [make_ticket(i, layer=i) for i in range(3)]
    assert coordinator.submit(tickets) == []
    assert coordinator.completed() == []  # submitting does not wait
    clock.elapse(3.1)
    assert coordinator.wait(tickets, 10) == 0.0
    assert coordinator.completed() == tickets and coordinator.completed() == []
    assert all(t.completed and world.holds(t) for t in tickets)
    assert coordinator.stats.exposed_s == 0 and coordinator.in_flight() == coordinator.bytes_in_flight == 0


@watchdog()
def test_only_the_part_that_does_not_fit_is_exposed():
    coordinator, clock = make_coordinator(SimulatedLink(bandwidth=SECOND, latency_s=0.25))
    tickets = [make_ticket(i) for i in range(3)]
    coordinator.submit(tickets)
    clock.elapse(2)
    assert coordinator.wait(tickets, 100) == pytest.approx(3 * 1.25 - 2)
    assert coordinator.stats.exposed_s == pytest.approx(1.75)


@watchdog()
def test_waiting_has_an_end_and_the_ticket_goes_on():
    coordinator, clock = make_coordinator(SimulatedLink(bandwidth=SECOND))
    ticket = make_ticket()
    coordinator.submit([ticket])
    assert coordinator.wait([ticket], 0.4) == pytest.approx(0.4) and not ticket.finished
    clock.elapse(0.7)
    assert coordinator.completed() == [ticket]


@watchdog()
def test_who_is_waited_for_stands_behind_one_batch_at_most():
    coordinator, clock = make_coordinator(SimulatedLink(bandwidth=SECOND))
    tickets = [make_ticket(i, layer=i % LAYERS, step=1 + i // LAYERS) for i in range(20)]
    coordinator.submit(tickets)
    clock.elapse(0.5)
    assert coordinator.wait(tickets[19:], 100) == pytest.approx(1.5)  # half of the first, and its own
    repair = make_ticket(20, step=NOW)
    coordinator.submit([repair])
    clock.elapse(2.01)  # one more that had been started, then the repair
    assert repair.completed and coordinator.stats.completed == 4


@watchdog()
def test_completion_follows_the_deadlines():
    coordinator, clock = make_coordinator(SimulatedLink(bandwidth=SECOND))
    coordinator.submit([make_ticket(0, step=9)])
    clock.elapse(0.5)  # this one is under way and ends first
    coordinator.submit([make_ticket(1, step=3, priority=0.1), make_ticket(2, step=3, priority=0.5)])
    coordinator.submit([make_ticket(3, step=2, layer=4), make_ticket(4, step=2, layer=1)])
    clock.elapse(10)
    assert slots(coordinator.completed()) == [0, 4, 3, 2, 1]


@watchdog()
@pytest.mark.parametrize("slow", [0, 5])
def test_no_layer_waits_for_another(slow):
    """Whichever layer is stuck, the other one's ticket completes and can be collected."""
    world = World()
    link = GateLink(world.move, lanes=2)
    coordinator, _ = make_coordinator(link)
    tickets = {layer: make_ticket(layer, layer=layer) for layer in (0, 5)}
    coordinator.submit(list(tickets.values()))
    link.gates[5 - slow].set()
    coordinator.wait([tickets[5 - slow]], 10)
    assert coordinator.completed() == [tickets[5 - slow]] and world.holds(tickets[5 - slow])
    assert tickets[slow].state is State.ENQUEUED and coordinator.in_flight() == 1
    link.gates[slow].set()
    coordinator.wait([tickets[slow]], 10)
    assert coordinator.completed() == [tickets[slow]]


@watchdog()
def test_an_idle_lane_is_used_while_another_is_busy():
    """Both lanes have slept, one is busy since: the next submit must wake the other."""
    link = GateLink(lanes=2)
    coordinator, clock = make_coordinator(link)
    clock.elapse(1)
    for layer in (0, 1):
        coordinator.submit([make_ticket(layer, layer=layer)])
        clock.elapse(1)
    assert slots(link.started) == [0, 1]


# --- counting ---------------------------------------------------------------------------------------
@watchdog()
def test_late_means_after_the_step_thread_got_there():
    coordinator, clock = make_coordinator(SimulatedLink(bandwidth=SECOND))
    tickets = [make_ticket(i, step=4, layer=i) for i in range(3)] + [make_ticket(3, step=NOW)]
    coordinator.submit(tickets)
    coordinator.reached(3, 5)
    clock.elapse(2.1)  # the repair and layer 0, in time
    coordinator.reached(4, 1)
    clock.elapse(2.1)  # layer 1 is late, layer 2 still in time
    assert coordinator.stats.completed == 4 and coordinator.stats.late == 1


@watchdog()
@pytest.mark.parametrize("lanes", [1, 3])
def test_the_measured_bandwidth_is_the_wires(lanes):
    link = SimulatedLink(bandwidth=12345.0, lanes=lanes)
    coordinator, clock = make_coordinator(link, expected_bandwidth=7.0)
    assert coordinator.stats.bandwidth == 7.0
    coordinator.submit([make_ticket(i, layer=i % LAYERS) for i in range(20)])
    clock.elapse(0.001)
    clock.elapse(1000)  # idle time must not count
    coordinator.completed()
    coordinator.submit([make_ticket(i) for i in range(20)])
    clock.elapse(1000)
    assert coordinator.stats.bandwidth == pytest.approx(12345.0, rel=0.01)


@watchdog()
def test_the_measured_bandwidth_follows_a_change():
    link = SimulatedLink(bandwidth=1e6)
    coordinator, clock = make_coordinator(link)
    for round_ in range(60):
        link.bandwidth = 1e6 if round_ < 10 else 2e5
        coordinator.submit([make_ticket(i) for i in range(4)])
        clock.elapse(1)
        coordinator.completed()
    assert coordinator.stats.bandwidth == pytest.approx(2e5, rel=0.05)


@watchdog()
def test_every_ticket_is_counted_once():
    world = World()
    link = SimulatedLink(world.move, bandwidth=SECOND)
    link.broken = {1}
    coordinator, clock = make_coordinator(link, max_tickets=6)
    refused = coordinator.submit([make_ticket(i, request_id=i % 2, priority=-i) for i in range(7)])
    clock.elapse(2.5)
    coordinator.cancel(0)  # slot 0 is done, 2 under way, 4 waits
    clock.elapse(10)
    stats = coordinator.stats
    assert slots(refused) == [5, 6] and len(coordinator.completed()) == 5
    assert (stats.submitted, stats.refused, stats.enqueued) == (5, 2, 4)
    assert (stats.completed, stats.failed, stats.cancelled) == (3, 1, 1)
    assert stats.bytes == 3 * NBYTES


# --- cancelling and failing -------------------------------------------------------------------------
@watchdog()
def test_cancelling_ends_what_waits_at_once_and_lets_the_rest_end():
    world = World()
    coordinator, clock = make_coordinator(SimulatedLink(world.move, bandwidth=SECOND))
    mine, other = [make_ticket(i) for i in range(3)], make_ticket(3, request_id=2)
    coordinator.submit([*mine, other])
    clock.elapse(0.5)
    coordinator.cancel(1)
    back = coordinator.completed()
    assert slots(back) == [1, 2] and all(t.state is State.CANCELLED for t in back)
    assert "request 1 was cancelled" in back[0].error
    assert coordinator.in_flight(1) == 1 and mine[0].state is State.ENQUEUED  # its slot is still in use
    clock.elapse(10)
    assert coordinator.completed() == [mine[0], other] and world.holds(mine[0])
    assert world.untouched(1) and world.untouched(2) and coordinator.in_flight(1) == 0


@watchdog()
def test_waiting_for_a_cancelled_ticket_ends():
    coordinator, _ = make_coordinator(GateLink())
    tickets = [make_ticket(0), make_ticket(1, request_id=2)]
    coordinator.submit(tickets)
    coordinator.cancel(2)
    assert coordinator.wait([tickets[1]], 10) == 0.0


@watchdog()
def test_a_broken_block_fails_its_own_ticket_only():
    world = World()
    link = SimulatedLink(world.move, bandwidth=1e6)
    link.broken = {2}
    coordinator, _ = make_coordinator(link, batch_bytes=100 * NBYTES)
    tickets = [make_ticket(i, request_id=i) for i in range(5)]
    coordinator.submit(tickets)
    coordinator.wait(tickets, 10)
    assert [t.completed for t in tickets] == [True, True, False, True, True]
    assert tickets[2].state is State.FAILED and "LinkError" in tickets[2].error
    assert [world.holds(t) for t in tickets] == [True, True, False, True, True]
    assert coordinator.stats.retried == 5 and coordinator.stats.failed == 1


@watchdog()
def test_a_dead_link_fails_every_ticket_and_hangs_nobody():
    link = BrokenLink()
    coordinator, _ = make_coordinator(link, batch_bytes=100 * NBYTES)
    tickets = [make_ticket(i, layer=i % 3) for i in range(9)]
    coordinator.submit(tickets)
    coordinator.wait(tickets, 10)
    assert {t.state for t in coordinator.completed()} == {State.FAILED}
    assert max(link.started.count(t) for t in tickets) == 2  # with the others, then alone


# --- the end ----------------------------------------------------------------------------------------
@watchdog()
def test_stopping_cancels_what_waits_and_awaits_what_is_under_way():
    world = World()
    coordinator, clock = make_coordinator(SimulatedLink(world.move, bandwidth=SECOND))
    tickets = [make_ticket(i) for i in range(4)]
    coordinator.submit(tickets)
    clock.elapse(1.5)
    coordinator.stop(timeout_s=10)
    assert [t.state for t in tickets] == [State.COMPLETED] * 2 + [State.CANCELLED] * 2
    assert sorted(slots(coordinator.completed())) == [0, 1, 2, 3] and coordinator.in_flight() == 0
    assert world.holds(tickets[1]) and world.untouched(2)
    coordinator.stop()  # again: nothing happens


@watchdog()
@pytest.mark.parametrize("make_clock", [VirtualClock, RealClock])
def test_stopping_gives_up_a_copy_that_never_ends(make_clock, monkeypatch):
    crashes = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)
    link = GateLink(lanes=2)
    coordinator, _ = make_coordinator(link, make_clock())
    tickets = [make_ticket(i, layer=i) for i in range(3)]
    coordinator.submit(tickets)
    assert coordinator.wait(tickets, 0.2) >= 0.199
    coordinator.stop(timeout_s=0.2)
    assert not crashes
    assert [t.state for t in tickets] == [State.FAILED] * 2 + [State.CANCELLED]
    assert "given up" in tickets[0].error and len(coordinator.completed()) == 3 and link.closed


@watchdog()
def test_a_coordinator_that_died_returns_all_tickets_and_says_so(monkeypatch):
    """A fault in the coordinator itself: nobody may wait for ever."""
    link = GateLink(lanes=2)
    coordinator, _ = make_coordinator(link)
    tickets = [make_ticket(i, layer=i) for i in range(4)]
    coordinator.submit(tickets)
    coordinator.wait(tickets, 1)

    def fault(*_):
        raise RuntimeError("injected fault")

    monkeypatch.setattr(coordinator._meter, "end", fault)
    link.gates[0].set()
    assert coordinator.wait(tickets, 10) < 1
    assert all(t.finished for t in tickets) and len(coordinator.completed()) == 4 and link.closed
    with pytest.raises(RuntimeError, match="is dead and takes no tickets"):
        coordinator.submit([make_ticket(9)])
    coordinator.stop()


def test_misuse_is_refused_by_name():
    coordinator = PrefetchCoordinator(SimulatedLink(bandwidth=1.0), clock=VirtualClock())
    with pytest.raises(RuntimeError, match="not started"):
        coordinator.submit([make_ticket()])
    coordinator.start()
    with pytest.raises(RuntimeError, match="is running and cannot be started"):
        coordinator.start()
    with pytest.raises(ValueError, match="not accepted by submit"):
        coordinator.wait([make_ticket()], 1)
    coordinator.stop()
    with pytest.raises(RuntimeError, match="is stopped and takes no tickets"):
        coordinator.submit([make_ticket()])
    assert coordinator.submit([]) == [] and coordinator.completed() == []


# --- the admission cap ------------------------------------------------------------------------------
def test_the_cap_is_what_the_link_can_carry_in_a_step_less_the_headroom():
    link = {"bandwidth": 25e9, "bytes_per_block": 128 * 1024, "layers": 32}
    # 25 GB/s for 20 ms is 500 MB: 119 blocks for each of 32 layers
    assert admission_cap(0.020, rows=1, headroom=0.0, **link) == 119
    assert admission_cap(0.020, rows=8, headroom=0.0, **link) == 14
    assert admission_cap(0.020, rows=8, headroom=0.5, **link) == 7
    assert admission_cap(0.001, rows=8, **link) == 0
    assert admission_cap(0.0, rows=1, **link) == admission_cap(0.02, 0.0, 1, 1, 1) == 0


@pytest.mark.parametrize(
    "wrong", [{"bytes_per_block": 0}, {"layers": 0}, {"rows": 0}, {"headroom": 1.0}, {"headroom": -0.1}]
)
def test_a_cap_of_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        admission_cap(**({"step_s": 1, "bandwidth": 1, "bytes_per_block": 1, "layers": 1, "rows": 1} | wrong))


@watchdog()
@pytest.mark.parametrize(("step_s", "rows"), [(0.010, 4), (0.020, 16), (0.040, 3)])
def test_at_the_online_cap_a_step_never_waits(step_s, rows):
    """The cap computed from the *measured* bandwidth, which includes the latency of each copy."""
    layers, size = 8, 128 * 1024
    link = SimulatedLink(bandwidth=2e9, latency_s=20e-6)
    coordinator, clock = make_coordinator(link, batch_bytes=4 << 20)
    due: dict[int, list] = {}
    for step in range(12):
        for layer in range(layers):
            coordinator.reached(step, layer)
            coordinator.wait(due.pop(layer, []), 10)
            coordinator.completed()
            cap = admission_cap(step_s, coordinator.stats.bandwidth, size, layers, rows)
            number = cap * rows if step else rows  # the first step measures
            fields = {"layer": layer, "step": step + 1, "nbytes": size}
            due[layer] = [make_ticket(layer * 10**4 + i, **fields) for i in range(number)]
            assert number and coordinator.submit(due[layer]) == []
            clock.elapse(step_s / layers)
    assert coordinator.stats.exposed_s == 0 and coordinator.stats.late == 0
    assert 0.3 < link.busy_s / (12 * step_s) < 0.8  # and the link is really used
