"""What the prefetch tests share: a watchdog, a small host tier and pool, links that tests hold still.

Tests that use make_coordinator import the fixture nothing_is_left too.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import traceback

import pytest
import torch

from nano_oasis.memory.clock import VirtualClock
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.link import BlockMover, LinkError
from nano_oasis.memory.tickets import Ticket

LAYERS, BLOCKS, SLOTS, SIZE, HEADS, DIM = 6, 12, 24, 2, 2, 4
POISON = -1.0  # what a slot holds that nobody may have written to
NBYTES = 2 * 4 * SIZE * HEADS * DIM  # keys and values of one block, one layer, fp32


def watchdog(seconds: float = 30.0):
    """The test runs on a thread of its own; a hang is a failure that shows where everyone stands."""

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            raised: list[BaseException] = []

            def body() -> None:
                try:
                    test(*args, **kwargs)
                except BaseException as error:
                    raised.append(error)

            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            thread.join(seconds)
            if thread.is_alive():
                stacks = ["".join(traceback.format_stack(f)) for f in sys._current_frames().values()]
                raise AssertionError(f"still running after {seconds} s:\n" + "\n---\n".join(stacks))
            if raised:
                raise raised[0]

        return run

    return decorate


class FakeHost:
    """A host tier of random blocks [L, N, B, H, D] that copies plainly. `broken` blocks cannot be read."""

    def __init__(self, seed: int = 0, layers: int = LAYERS, blocks: int = BLOCKS) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.keys, self.values = (self.fresh(layers, blocks) for _ in range(2))
        self.broken: set[int] = set()
        self.batches: list[tuple[int, list[int]]] = []

    def fresh(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, SIZE, HEADS, DIM, generator=self.random)

    def load_groups(self, layer, blocks, groups, slots, slot_keys, slot_values):
        self.batches.append((layer, blocks.tolist()))
        if self.broken.intersection(blocks.tolist()):
            raise OSError(f"cannot read one of the blocks {blocks.tolist()}")
        size = slot_keys.shape[2]
        for block, group, slot in zip(blocks.tolist(), groups.tolist(), slots.tolist(), strict=True):
            heads = slice(group * size, (group + 1) * size)
            slot_keys[slot], slot_values[slot] = (
                self.keys[layer, block][:, heads],
                self.values[layer, block][:, heads],
            )


class World:
    """Host, pool and the mover between them."""

    def __init__(self, seed: int = 0, slots: int = SLOTS) -> None:
        self.host = FakeHost(seed)
        self.keys = torch.full((slots, SIZE, HEADS, DIM), POISON)
        self.values = self.keys.clone()
        self.move = BlockMover(self.host, self.keys, self.values)

    def holds(self, ticket: Ticket) -> bool:
        """The slot holds exactly the block's bytes."""
        at = ticket.layer, ticket.host_block
        return torch.equal(self.keys[ticket.slot], self.host.keys[at]) and torch.equal(
            self.values[ticket.slot], self.host.values[at]
        )

    def untouched(self, slot: int) -> bool:
        return bool((self.keys[slot] == POISON).all() and (self.values[slot] == POISON).all())


class GateLink:
    """A copy ends when the test opens its layer's gate, and not before. For the virtual clock."""

    copy_here = copy_blocks = None

    def __init__(self, move: BlockMover | None = None, lanes: int = 1) -> None:
        self.lanes, self.move = lanes, move
        self.gates = [asyncio.Event() for _ in range(LAYERS)]
        self.started: list[Ticket] = []
        self.closed = False

    def fence(self):
        return None

    async def copy(self, layer, tickets):
        self.started += tickets
        await self.gates[layer].wait()
        if self.move:
            self.move(layer, tickets)

    def close(self):
        self.closed = True


class BrokenLink(GateLink):
    """Every copy fails at once."""

    async def copy(self, layer, tickets):
        self.started += tickets
        raise LinkError("no such luck")


def make_ticket(slot: int = 0, **changes) -> Ticket:
    """Block `slot` into slot `slot`, layer 0, due at step 1, unless `changes` says otherwise."""
    fields = {"request_id": 1, "generation": 0, "layer": 0, "group": 0, "position": slot, "step": 1}
    fields |= {"host_block": slot % BLOCKS, "slot": slot, "nbytes": NBYTES}
    return Ticket(**(fields | changes))


STARTED: list[PrefetchCoordinator] = []
HELD: list[threading.Event] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Whatever a test did, stopping returns all that is outstanding."""
    yield
    while HELD:
        HELD.pop().set()
    while STARTED:
        coordinator = STARTED.pop()
        coordinator.stop(timeout_s=1)
        coordinator.completed()
        assert coordinator.in_flight() == coordinator.bytes_in_flight == 0


def make_coordinator(link, clock=None, **options):
    """Started, in virtual time, one block per batch; and its clock."""
    clock = clock or VirtualClock()
    coordinator = PrefetchCoordinator(link, clock=clock, **({"batch_bytes": NBYTES} | options))
    coordinator.start()
    STARTED.append(coordinator)
    return coordinator, clock


def slots(tickets):
    return [t.slot for t in tickets]
