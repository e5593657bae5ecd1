"""Random schedules of submits, cancels, failures, delays and stops against the coordinator.

A small model of the residency code stands beside it. It knows which slot belongs to which ticket, what each
slot must hold, and rewrites a host block the moment nobody promised to leave it alone.
"""

import random
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefetch_fakes import BLOCKS, LAYERS, NBYTES, POISON, World, make_ticket, watchdog

from nano_oasis.memory.clock import RealClock, VirtualClock
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.link import MemcpyLink, SimulatedLink
from nano_oasis.memory.tickets import NOW, State

SLOTS, MAX_TICKETS, MAX_BYTES = 40, 14, 11 * NBYTES
REQUESTS = 4


class Residency:
    """The step thread's side: owns the slots, and checks everything that comes back."""

    def __init__(self, coordinator, world, seed):
        self.coordinator, self.world, self.random = coordinator, world, random.Random(seed)
        self.free = list(range(SLOTS))
        self.out = {}  # ticket -> (keys, values) that its slot must hold once completed
        self.returned = set()
        self.step = self.serial = 0
        self.ends = {state: 0 for state in State}

    def submit(self, count):
        tickets = [self.make(slot) for slot in self.random.sample(self.free, min(count, len(self.free)))]
        refused = self.coordinator.submit(tickets)
        assert all(t.state is State.NEW for t in refused)
        for ticket in tickets:
            if ticket not in refused:
                self.free.remove(ticket.slot)
                at = ticket.layer, ticket.host_block
                host = self.world.host
                self.out[ticket] = host.keys[at].clone(), host.values[at].clone()

    def make(self, slot):
        self.serial += 1
        return make_ticket(
            slot,
            request_id=self.random.randrange(REQUESTS),
            layer=self.random.randrange(LAYERS),
            position=self.serial,
            host_block=self.random.randrange(BLOCKS),
            step=self.random.choice([NOW, self.step + 1, self.step + 1, self.step + 2]),
            priority=self.random.random(),
        )

    def collect(self):
        for ticket in self.coordinator.completed():
            assert ticket not in self.returned and ticket.finished
            self.returned.add(ticket)
            keys, values = self.out.pop(ticket)  # KeyError: it was never submitted, or came back twice
            slot = ticket.slot
            same = torch.equal(self.world.keys[slot], keys) and torch.equal(self.world.values[slot], values)
            assert same == ticket.completed
            assert (ticket.error is None) == ticket.completed
            if ticket.state is State.CANCELLED:
                assert self.world.untouched(slot) and not ticket.enqueued
            self.world.keys[slot] = self.world.values[slot] = POISON
            self.free.append(slot)
            self.ends[ticket.state] += 1

    def wait(self, timeout):
        some = self.random.sample(list(self.out), min(3, len(self.out)))
        assert self.coordinator.wait(some, timeout) >= 0

    def rewrite_host(self):
        """Blocks that no ticket reads get new content: a copy that reads too late would show."""
        read = {(t.layer, t.host_block) for t in self.out}
        for _ in range(5):
            at = self.random.randrange(LAYERS), self.random.randrange(BLOCKS)
            if at not in read:
                self.world.host.keys[at] = self.world.host.fresh()
                self.world.host.values[at] = self.world.host.fresh()

    def check(self):
        """What must hold at every moment."""
        coordinator = self.coordinator
        assert coordinator.in_flight() == len(self.out) <= MAX_TICKETS
        assert coordinator.bytes_in_flight == len(self.out) * NBYTES <= MAX_BYTES
        assert len(self.free) + len(self.out) == SLOTS
        for request in range(REQUESTS):
            assert coordinator.in_flight(request) == sum(t.request_id == request for t in self.out)
        assert all(self.world.untouched(slot) for slot in self.free)  # nobody writes after the return

    def check_end(self):
        self.collect()
        self.check()
        assert not self.out and len(self.free) == SLOTS
        stats, ends = self.coordinator.stats, self.ends
        assert stats.submitted == len(self.returned)
        assert stats.completed == ends[State.COMPLETED] and stats.failed == ends[State.FAILED]
        assert stats.cancelled == ends[State.CANCELLED]
        assert stats.bytes == NBYTES * ends[State.COMPLETED]


def act(residency, link, what, amount, rest):
    """One step of a schedule; `rest` lets time pass."""
    if what == "submit":
        residency.submit(amount)
    elif what == "rest":
        rest(amount)
    elif what == "wait":
        residency.wait(amount)
    elif what == "cancel":
        residency.coordinator.cancel(amount % REQUESTS)
    elif what == "collect":
        residency.collect()
    elif what == "break":
        link.broken ^= {amount % BLOCKS}
    elif what == "advance":
        residency.step += 1
        residency.coordinator.reached(residency.step, amount % LAYERS)
    residency.rewrite_host()
    residency.check()


ACTIONS = ["submit"] * 4 + ["rest"] * 2 + ["wait", "cancel", "collect", "collect", "break", "advance"]
SCHEDULES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=60)
TEMPERS = st.fixed_dictionaries(
    {
        "lanes": st.integers(1, 4),
        "delay_rate": st.sampled_from([0.0, 0.3, 1.0]),
        "failure_rate": st.sampled_from([0.0, 0.2, 0.9]),
        "seed": st.integers(0, 2**16),
    }
)


@watchdog(120)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=SCHEDULES, temper=TEMPERS, batch=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_any_schedule_in_virtual_time(schedule, temper, batch, seed):
    world, clock = World(seed, SLOTS), VirtualClock()
    link = SimulatedLink(world.move, bandwidth=NBYTES, latency_s=0.1, delay_s=5.0, **temper)
    bounds = {"max_tickets": MAX_TICKETS, "max_bytes": MAX_BYTES, "batch_bytes": batch * NBYTES}
    coordinator = PrefetchCoordinator(link, clock=clock, **bounds)
    coordinator.start()
    residency = Residency(coordinator, world, seed)
    for what, amount in schedule:
        act(residency, link, what, amount, clock.elapse)
    coordinator.stop(timeout_s=1000 if seed % 4 else 0.5)  # now and then it must give copies up
    residency.check_end()
    assert coordinator.stats.enqueued + coordinator.stats.cancelled == coordinator.stats.submitted


class TemperedMove:
    """A mover with a temper, for the real link: sleeps, and fails for broken blocks and now and then."""

    def __init__(self, world, seed):
        self.world, self.keys, self.broken, self.random = world, world.keys, set(), random.Random(seed)
        self.guard = threading.Lock()  # torch's own copies need none; the generator does

    def __call__(self, layer, tickets):
        with self.guard:
            nap, fails = self.random.choice([0, 0, 1e-4, 1e-3]), self.random.random() < 0.1
        time.sleep(nap)
        if fails or self.broken.intersection(t.host_block for t in tickets):
            self.world.move.spoil(tickets)
            raise OSError("injected")
        self.world.move(layer, tickets)


@watchdog(60)
@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_on_real_threads(seed):
    """The same, with the loop and the copies on threads of their own and a meddler on yet another."""
    rng, world = random.Random(seed), World(seed, SLOTS)
    if seed % 2:
        link = move = TemperedMove(world, seed)
        real = MemcpyLink(move, lanes=1 + seed % 3)
    else:
        temper = {"delay_rate": 0.3, "delay_s": 2e-3, "failure_rate": 0.1, "seed": seed}
        link = real = SimulatedLink(world.move, bandwidth=NBYTES * 1e5, lanes=1 + seed % 3, **temper)
    bounds = {"max_tickets": MAX_TICKETS, "max_bytes": MAX_BYTES, "batch_bytes": 3 * NBYTES}
    coordinator = PrefetchCoordinator(real, clock=RealClock(), **bounds)
    coordinator.start()
    residency = Residency(coordinator, world, seed)
    stopped, seen = threading.Event(), []

    def meddle():
        meddler = random.Random(-seed)
        while not stopped.wait(1e-3):
            coordinator.cancel(meddler.randrange(REQUESTS))
            stats = coordinator.stats
            within = coordinator.bytes_in_flight <= MAX_BYTES and coordinator.in_flight() <= MAX_TICKETS
            seen.append(within and stats.completed + stats.failed <= stats.enqueued <= stats.submitted)

    thread = threading.Thread(target=meddle, daemon=True)
    thread.start()
    for _ in range(150):
        what, amount = rng.choice(ACTIONS), rng.randrange(10)
        act(residency, link, what, amount, lambda n: time.sleep(n * 1e-4))
    coordinator.stop(timeout_s=30)
    residency.check_end()
    stopped.set()
    thread.join()
    assert len(seen) > 10 and all(seen)
    assert residency.ends[State.COMPLETED] > 20 and residency.ends[State.CANCELLED] > 0


@watchdog(60)
def test_index_tensors_of_a_batch_are_never_rewritten():
    """B043: what a slow copy was given stays as it was, however many batches are made after it."""
    world, kept = World(0, SLOTS), []
    load = world.host.load_groups

    def slow_load(layer, blocks, groups, slots, *rest):
        kept.append((blocks, slots, blocks.clone(), slots.clone()))
        time.sleep(2e-4)
        load(layer, blocks, groups, slots, *rest)

    world.host.load_groups = slow_load
    coordinator = PrefetchCoordinator(MemcpyLink(world.move, lanes=2), batch_bytes=4 * NBYTES)
    coordinator.start()
    for round_ in range(100):
        tickets = [make_ticket(s, layer=s % LAYERS, host_block=(s + round_) % BLOCKS) for s in range(20)]
        coordinator.submit(tickets)
        coordinator.wait(tickets, 20)
        assert len(coordinator.completed()) == 20 and all(world.holds(t) for t in tickets)
    coordinator.stop()
    assert len(kept) >= 500
    assert all(torch.equal(b, b0) and torch.equal(s, s0) for b, s, b0, s0 in kept)


def test_the_model_notices_a_wrong_byte():
    """The checks above can fail: a link that copies a neighbour's block is caught."""
    world, clock = World(0, SLOTS), VirtualClock()
    honest = world.move

    class Liar(SimulatedLink):
        async def copy(self, layer, tickets):
            await super().copy(layer, tickets)
            honest((layer + 1) % LAYERS, tickets)

    coordinator = PrefetchCoordinator(Liar(honest, bandwidth=NBYTES), clock=clock)
    coordinator.start()
    residency = Residency(coordinator, world, 0)
    residency.submit(3)
    clock.elapse(100)
    with pytest.raises(AssertionError):
        residency.collect()
    coordinator.stop()
