"""Links: what carries KV blocks from the host tier into device slots.

Owns: the copy of one batch, for real or through a simulated wire with a seeded temper.
Must not know: which tickets come next, who waits for them, or what is published.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nano_oasis.memory.tickets import Ticket

Move = Callable[[int, Sequence[Ticket]], None]
Blocks = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]


class LinkError(Exception):
    """A copy that did not happen. Its slots may hold anything."""


class Link(Protocol):
    """Moves batches, up to `lanes` at once and, if it can, one more on the thread that waits for it."""

    lanes: int

    @property
    def copy_here(self) -> Move | None:
        """copy() without the event loop, on the caller's thread; None if the link cannot do that."""

    @property
    def copy_blocks(self) -> Blocks | None:
        """copy_here() without tickets: layer, and int [n] host blocks, head groups and slots."""

    def fence(self) -> Any:
        """Called on the step thread at submit: what must be done before the slots may be written.

        The slots were taken from other blocks, and work already queued on the device may still read those.
        """

    async def copy(self, layer: int, tickets: Sequence[Ticket]) -> None:
        """Returns when every slot holds its block. Raises if any may not: then none can be trusted.

        On the coordinator's event loop. Until it has returned or raised, it may still be writing.
        """

    def close(self) -> None:
        """Returns when nothing is being written any more."""


class HostBlocks(Protocol):
    """The part of the host tier that a link needs."""

    def load_groups(
        self,
        layer: int,
        blocks: Tensor,
        groups: Tensor,
        slots: Tensor,
        slot_keys: Tensor,
        slot_values: Tensor,
    ) -> None: ...


class BlockMover:
    """The copy itself: host blocks of one layer into slots [S, B, Hg, D] of keys and of values."""

    def __init__(self, host: HostBlocks, slot_keys: Tensor, slot_values: Tensor) -> None:
        self.host, self.keys, self.values = host, slot_keys, slot_values

    def __call__(self, layer: int, tickets: Sequence[Ticket]) -> None:
        order = sorted(tickets, key=lambda t: (t.group, t.host_block))  # neighbours travel as one copy
        self.blocks(layer, *np.array([(t.host_block, t.group, t.slot) for t in order]).T)

    def blocks(self, layer: int, blocks: np.ndarray, groups: np.ndarray, slots: np.ndarray) -> None:
        """int [n] each; what the copy reads is its own: nobody rewrites it."""
        where, parts, to = (torch.from_numpy(x.astype(np.int64)) for x in (blocks, groups, slots))
        with torch.inference_mode():  # per thread, and this may be a worker's
            self.host.load_groups(layer, where, parts, to, self.keys, self.values)

    def spoil(self, tickets: Sequence[Ticket]) -> None:
        """Leave the slots as an interrupted copy might: half of them overwritten with noise."""
        with torch.inference_mode():
            for ticket in tickets:
                self.keys[ticket.slot].fill_(-77)


class MemcpyLink:
    """Copies on worker threads, so that the event loop stays free; torch lets go of the GIL while copying.

    With slots on a CUDA device the copies run on a stream of their own: it waits for the fences of its
    tickets before it writes, and the worker waits for the stream before it reports.
    """

    def __init__(self, move: BlockMover, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        self.lanes = lanes
        self._move = move
        self._device = move.keys.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.copy_here: Move = move if self._stream is None else self._move_on_stream
        self._workers = ThreadPoolExecutor(lanes, thread_name_prefix="nano-oasis-copy")

    @property
    def copy_blocks(self) -> Blocks | None:
        return self._move.blocks if self._stream is None else None

    def fence(self) -> Any:
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    async def copy(self, layer: int, tickets: Sequence[Ticket]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._workers, self.copy_here, layer, tickets)

    def _move_on_stream(self, layer: int, tickets: Sequence[Ticket]) -> None:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            for fence in {id(t.fence): t.fence for t in tickets}.values():
                self._stream.wait_event(fence)
            self._move(layer, tickets)
            done = self._stream.record_event()
        done.synchronize()

    def close(self) -> None:
        self._workers.shutdown(wait=True)


class SimulatedLink:
    """A wire with a bandwidth and a temper. It moves the same bytes, at the moment a copy ends.

    Copies share the wire and queue for it in the order they come. `latency_s` is added to each copy but
    does not occupy the wire. With probability `delay_rate` a copy takes up to `delay_s` longer, so with two
    or more lanes copies overtake each other; with probability `failure_rate` it fails, leaving its slots
    spoiled, and so does every copy with a host block of `broken`. Time is the event loop's: real, or
    virtual (clock.py), and then a run repeats exactly for the same seed.
    """

    def __init__(
        self,
        move: BlockMover | None = None,
        *,
        bandwidth: float,
        latency_s: float = 0.0,
        lanes: int = 1,
        delay_rate: float = 0.0,
        delay_s: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        if lanes < 1 or bandwidth <= 0:
            raise ValueError(f"lanes must be at least 1 and bandwidth above 0, got {lanes} and {bandwidth}")
        if not (0 <= delay_rate <= 1 and 0 <= failure_rate <= 1):
            raise ValueError(f"delay_rate {delay_rate} and failure_rate {failure_rate} must be from 0 to 1")
        self.copy_here: Move | None = None
        self.copy_blocks: Blocks | None = None
        self.lanes, self.bandwidth, self.latency_s = lanes, bandwidth, latency_s
        self.delay_rate, self.delay_s, self.failure_rate = delay_rate, delay_s, failure_rate
        self.broken: set[int] = set()
        self.busy_s = 0.0  # the wire's, in all
        self._move = move
        self._free_at = 0.0
        self._random = random.Random(seed)

    def fence(self) -> Any:
        return None

    async def copy(self, layer: int, tickets: Sequence[Ticket]) -> None:
        now = asyncio.get_running_loop().time()
        on_wire = sum(t.nbytes for t in tickets) / self.bandwidth
        self._free_at = max(now, self._free_at) + on_wire
        self.busy_s += on_wire
        late = self._random.uniform(0, self.delay_s) if self._random.random() < self.delay_rate else 0.0
        fails = self._random.random() < self.failure_rate
        await asyncio.sleep(self._free_at - now + self.latency_s + late)
        broken = [t.host_block for t in tickets if t.host_block in self.broken]
        if fails or broken:
            if self._move:
                self._move.spoil(tickets)
            raise LinkError(f"simulated failure, layer {layer}, broken host blocks {broken}")
        if self._move:
            self._move(layer, tickets)

    def close(self) -> None:
        pass
