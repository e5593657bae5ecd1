"""Links: the real copy, the simulated wire, and the clocks they run by."""

import asyncio
import contextlib
import threading
import time

import pytest
import torch
from prefetch_fakes import NBYTES, POISON, World, make_ticket, watchdog

from nano_oasis.memory.clock import RealClock, VirtualClock
from nano_oasis.memory.link import BlockMover, LinkError, MemcpyLink, SimulatedLink


def run_copies(link, batches, clock=None):
    """All batches given to the link at once -> for each, when it ended (virtual seconds), or its error."""
    clock = clock or VirtualClock()
    ends: list = [None] * len(batches)

    async def one(i, batch):
        try:
            await link.copy(batch[0].layer, batch)
            ends[i] = asyncio.get_running_loop().time()
        except LinkError as error:
            ends[i] = error

    async def main():
        await asyncio.gather(*(one(i, batch) for i, batch in enumerate(batches)))

    clock.start(main, lambda: None)
    assert clock.join(3600)
    return ends


# --- the copy itself --------------------------------------------------------------------------------
@watchdog()
def test_memcpy_link_copies_keys_and_values_of_the_right_blocks():
    world = World()
    tickets = [make_ticket(slot, layer=3, host_block=11 - slot) for slot in (4, 0, 7)]
    link = MemcpyLink(world.move)
    run_copies(link, [tickets], RealClock())
    link.close()
    assert all(world.holds(t) for t in tickets)
    assert all(world.untouched(slot) for slot in range(24) if slot not in (4, 0, 7))
    assert world.host.batches == [(3, [4, 7, 11])]  # one coalesced call, neighbours together


def test_head_groups_take_their_own_heads():
    world = World()
    keys, values = torch.full((2, 8, 2, 1, 4), POISON).unbind(0)  # slots of one head each
    move = BlockMover(world.host, keys, values)
    move(2, [make_ticket(0, layer=2, group=0), make_ticket(5, layer=2, group=1)])
    assert torch.equal(keys[0], world.host.keys[2, 0][:, :1])
    assert torch.equal(keys[5], world.host.keys[2, 5][:, 1:])
    assert torch.equal(values[5], world.host.values[2, 5][:, 1:])


@watchdog()
def test_memcpy_link_works_with_the_real_host_tier_and_inference_tensors():
    from nano_oasis.config import ModelConfig, RopeConfig
    from nano_oasis.memory.host_tier import HostTier

    config = ModelConfig("llama", 8, 8, 8, 2, 2, 2, 4, 64, 1e-5, RopeConfig())
    with HostTier.create(config, 4, 2, torch.float32) as host, torch.inference_mode():
        keys, values = torch.randn(2, 2, 4, 2, 2, 4).unbind(0)  # [L, N, B, H, D] each
        host.store(torch.arange(4), keys, values)
        pool = torch.zeros(2, 6, 2, 2, 4)
        link = MemcpyLink(BlockMover(host, pool[0], pool[1]), lanes=2)
        batches = [[make_ticket(5, layer=1, host_block=3)], [make_ticket(1, layer=0, host_block=2)]]
        run_copies(link, batches, RealClock())
        link.close()
        assert torch.equal(pool[0, 5], keys[1, 3]) and torch.equal(pool[1, 5], values[1, 3])
        assert torch.equal(pool[0, 1], keys[0, 2]) and torch.equal(pool[1, 1], values[0, 2])


@watchdog()
def test_closing_a_memcpy_link_waits_for_what_is_being_written():
    world = World()
    entered, go_on = threading.Event(), threading.Event()

    def slow(layer, tickets):
        entered.set()
        go_on.wait()
        world.move(layer, tickets)

    slow.keys = world.keys  # what MemcpyLink asks a mover for
    link = MemcpyLink(slow)
    ticket = make_ticket(3)
    runner = threading.Thread(target=run_copies, args=(link, [[ticket]], RealClock()), daemon=True)
    runner.start()
    entered.wait()
    closer = threading.Thread(target=link.close, daemon=True)
    closer.start()
    closer.join(0.05)
    waits = closer.is_alive() and world.untouched(3)
    go_on.set()
    closer.join()
    assert waits and world.holds(ticket)


def test_on_a_cuda_stream_fences_come_before_the_copy_and_its_end_after(monkeypatch):
    """The order of calls only; the stream is a fake. Each distinct fence is waited for once (B042)."""
    world, calls = World(), []

    class FakeStream:
        def wait_event(self, event):
            calls.append(event)

        def record_event(self):
            calls.append("record")
            return self

        def synchronize(self):
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    move = lambda layer, tickets: calls.append("move")  # noqa: E731
    move.keys = world.keys
    link = MemcpyLink(move)
    link._stream = FakeStream()
    fences = ["fence 0", "fence 1"]
    tickets = [make_ticket(i, fence=fences[i // 2]) for i in range(4)]
    link._move_on_stream(0, tickets)
    assert calls == ["fence 0", "fence 1", "move", "record", "synchronize"]


# --- the simulated wire -----------------------------------------------------------------------------
def test_time_on_the_wire_is_bytes_over_bandwidth_and_copies_queue():
    world = World()
    link = SimulatedLink(world.move, bandwidth=NBYTES * 10, latency_s=0.02, lanes=3)
    batches = [[make_ticket(0)], [make_ticket(1), make_ticket(2)], [make_ticket(3)]]
    ends = run_copies(link, batches)
    assert ends == pytest.approx([0.12, 0.32, 0.42])  # 1, 1+2, 1+2+1 blocks of 0.1 s, and the latency
    assert link.busy_s == pytest.approx(0.4)
    assert all(world.holds(t) for batch in batches for t in batch)


def test_bytes_move_when_the_copy_ends_not_before():
    world, clock = World(), VirtualClock()
    link = SimulatedLink(world.move, bandwidth=NBYTES)  # one second per block
    ticket = make_ticket(3)
    clock.start(lambda: link.copy(0, [ticket]), lambda: None)
    clock.elapse(0.99)
    assert world.untouched(3)
    clock.elapse(0.02)
    assert world.holds(ticket)
    assert clock.join(1)


def test_the_same_seed_repeats_exactly_and_another_does_not():
    def trace(seed):
        temper = {"delay_rate": 0.5, "delay_s": 1.0, "failure_rate": 0.3, "seed": seed}
        link = SimulatedLink(bandwidth=1e6, lanes=4, **temper)
        return [str(end) for end in run_copies(link, [[make_ticket(i)] for i in range(24)])]

    assert trace(1) == trace(1) != trace(2)


def test_delayed_copies_are_overtaken():
    link = SimulatedLink(bandwidth=NBYTES * 1e3, lanes=8, delay_rate=0.5, delay_s=1.0, seed=3)
    ends = run_copies(link, [[make_ticket(i)] for i in range(20)])
    assert ends != sorted(ends)
    assert min(ends) < 0.03 and 0.1 < max(ends) < 1.1  # some on time, none later than it may be


def test_a_failed_copy_raises_and_leaves_its_slots_spoiled():
    world = World()
    link = SimulatedLink(world.move, bandwidth=1e6, lanes=2)
    link.broken = {5}
    good, bad = [make_ticket(1)], [make_ticket(2), make_ticket(5)]
    ends = run_copies(link, [good, bad])
    assert world.holds(good[0]) and isinstance(ends[1], LinkError) and "5" in str(ends[1])
    assert not any(world.holds(t) or world.untouched(t.slot) for t in bad)


def test_failures_come_at_the_rate_asked_for():
    def failures(rate):
        link = SimulatedLink(bandwidth=1e6, lanes=4, failure_rate=rate, seed=0)
        return sum(isinstance(e, LinkError) for e in run_copies(link, [[make_ticket(i)] for i in range(200)]))

    assert failures(0.0) == 0 and failures(1.0) == 200 and 30 < failures(0.25) < 70


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0}, {"lanes": 0}, {"delay_rate": 1.5}, {"failure_rate": -0.1}]
)
def test_a_wire_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        SimulatedLink(**({"bandwidth": 1.0} | wrong))


def test_a_memcpy_link_without_lanes_is_refused():
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        MemcpyLink(World().move, lanes=0)


# --- clocks -----------------------------------------------------------------------------------------
@watchdog()
def test_virtual_time_passes_only_when_it_is_asked_to_and_takes_no_time():
    clock, seen = VirtualClock(), []

    async def main():
        for hour in range(3):
            await asyncio.sleep(3600)
            seen.append((hour, clock.now()))

    started = time.monotonic()
    clock.start(main, lambda: seen.append("ended"))
    clock.elapse(3599)
    assert seen == [] and clock.now() == pytest.approx(3599)
    clock.elapse(3600 * 1.5)
    assert seen == [(0, pytest.approx(3600)), (1, pytest.approx(7200))]
    assert not clock.join(60)
    assert clock.join(1e6) and clock.now() == pytest.approx(10800) and seen[-1] == "ended"
    clock.call_soon(lambda: seen.append("too late"))
    assert seen[-1] == "ended" and time.monotonic() - started < 20


@watchdog()
def test_virtual_wait_ends_with_the_condition_or_the_time():
    clock, changed, flag = VirtualClock(), threading.Condition(), []

    async def main():
        await asyncio.sleep(5)
        flag.append(True)
        clock.notify(changed)
        await asyncio.sleep(5)

    clock.start(main, lambda: None)
    assert not clock.wait_for(changed, lambda: bool(flag), 2) and clock.now() == pytest.approx(2)
    assert clock.wait_for(changed, lambda: bool(flag), 100) and clock.now() == pytest.approx(5)
    assert clock.join(100)


@watchdog()
def test_the_real_loop_has_its_own_thread_and_always_says_that_it_ended():
    clock, threads, ended = RealClock(), [], threading.Event()

    async def main():
        threads.append(threading.current_thread())
        await asyncio.sleep(0)

    clock.start(main, ended.set)
    assert clock.join(20) and ended.is_set()
    assert threads[0] is not threading.current_thread() and threads[0].daemon
    clock.call_soon(lambda: threads.append("never"))  # the loop is gone: not an error
    assert len(threads) == 1
