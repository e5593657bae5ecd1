"""The prefetch coordinator: brings blocks into their slots while the current step computes.

Owns: its event loop, the hand-over of tickets to the link, what waiting and copying cost, the admission cap.
Must not know: torch, why a block is wanted, which slots are free, or what is done with a block that arrived.

    step thread                        event loop                         link
    submit ──> book (bounded) ──> lane: earliest deadline first ──> copy of one layer's batch
    wait ──────> copies what the link does not have yet itself         │
    completed <── book <── one by one if the batch failed <─────── done or failed
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nano_oasis.memory.clock import Clock, RealClock
from nano_oasis.memory.link import Link
from nano_oasis.memory.link_rate import Meter
from nano_oasis.memory.tickets import NOW, Deadline, State, Ticket, TicketBook

log = logging.getLogger(__name__)


@dataclass
class PrefetchStats:
    """Counts since start, in tickets unless the name says otherwise."""

    submitted: int = 0
    refused: int = 0  # by the bounds; they were never part of `submitted`
    enqueued: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0  # of a failed batch, and then copied alone
    late: int = 0  # completed after the step thread had reached their deadline; not for step=NOW
    bytes: int = 0  # of completed tickets
    exposed_s: float = 0.0  # the step thread stood still for so long in wait()
    bandwidth: float = 0.0  # bytes per second while the link is busy, over the last 50 batches or so


class PrefetchCoordinator:
    """All methods may be called from any thread, and only wait(), stop() and nothing else blocks.

    max_tickets, max_bytes: bounds on what is submitted and not collected; batch_bytes: of one copy, so that
    an urgent ticket never stands behind a long one; expected_bandwidth: bytes per second until measured.
    """

    def __init__(
        self,
        link: Link,
        *,
        max_tickets: int = 1 << 17,
        max_bytes: int = 1 << 30,
        batch_bytes: int = 4 << 20,
        expected_bandwidth: float = 1e9,
        clock: Clock | None = None,
    ) -> None:
        self._link = link
        self._clock = clock or RealClock()
        self._lanes: list[asyncio.Task[None]] = []
        self._book = TicketBook(max_tickets, max_bytes)
        self._batch_bytes = batch_bytes
        self._stats = PrefetchStats()
        self._meter = Meter(expected_bandwidth)
        self._reached: Deadline = (-1, -1)
        self._state = "not started"  # -> running -> stopped, or dead
        self._changed = threading.Condition()  # guards everything above
        self._work = asyncio.Event()
        self._idle = False  # some lane found nothing to do and must be woken
        self._here: set[Ticket] = set()  # being copied by a thread that waits for them

    # --- life ---------------------------------------------------------------------------------
    def start(self) -> None:
        with self._changed:
            if self._state != "not started":
                raise RuntimeError(f"the prefetch coordinator is {self._state} and cannot be started")
            self._state = "running"
        self._clock.start(self._main, self._ended)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel what waits, await what is under way, end the loop. All tickets come back by completed().

        A copy that takes longer than `timeout_s` is given up as failed.
        """
        with self._changed:
            if self._state != "running":
                return
            self._state = "stopped"
            self._cancel(None, "the prefetch coordinator was stopped")
        self._clock.call_soon(self._work.set)
        if not self._clock.join(timeout_s):
            self._clock.call_soon(self._give_up)
            self._clock.join(timeout_s)

    # --- the step thread's side ---------------------------------------------------------------
    def submit(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Start fetching; returns those refused because the bounds are reached (least urgent, still NEW).

        The rest come back by completed(), each exactly once. Raises ValueError for a ticket that is wrong
        in itself (see TicketBook.submit), RuntimeError if the coordinator does not run.
        """
        if not tickets:
            return []
        fence = self._link.fence()
        with self._changed:
            if self._state != "running":
                raise RuntimeError(f"the prefetch coordinator is {self._state} and takes no tickets")
            refused = self._book.submit(tickets)
            for ticket in tickets:
                ticket.fence = fence if ticket.state is State.WAITING else None
            self._stats.submitted += len(tickets) - len(refused)
            self._stats.refused += len(refused)
            wake, self._idle = self._idle, False
        if wake:
            self._clock.call_soon(self._work.set)
        return refused

    def completed(self) -> list[Ticket]:
        """Tickets that ended since the last call: publish the slot of a `completed` one, free the others."""
        with self._changed:
            return self._book.collect()

    def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> float:
        """Block until these have finished or the time is up; returns the seconds that took.

        They are served before all others, by this thread too: it stands still anyway, and waking others
        costs more than a small copy. Raises ValueError for a ticket that was never accepted.
        """
        with self._changed:
            pending = [t for t in tickets if not t.finished]
            for ticket in pending:
                if ticket.state is State.NEW:
                    raise ValueError(f"{ticket} was not accepted by submit(): nothing will ever finish it")
            self._book.promote(pending)
        if not pending:
            return 0.0
        start = self._clock.now()
        self._copy_here(start + timeout_s)
        left_s = max(start + timeout_s - self._clock.now(), 0.0)
        self._clock.wait_for(self._changed, lambda: all(t.finished for t in pending), left_s)
        exposed = self._clock.now() - start
        with self._changed:
            self._stats.exposed_s += exposed
        return exposed

    def copy_now(
        self, layer: int, blocks: np.ndarray, groups: np.ndarray, slots: np.ndarray, nbytes: int
    ) -> bool:
        """Bring blocks for one who would only wait for them, at once and on this thread: no tickets.

        int [n] host blocks, head groups and slots that are the caller's; nbytes of each. False if that
        cannot be, or went wrong: nothing may be read then, and tickets for them find out which block it was.
        """
        copy = self._link.copy_blocks
        if copy is None or self._state != "running":
            return False
        start, done = self._clock.now(), 0
        self._begin()
        try:
            copy(layer, blocks, groups, slots)
            done = len(slots)
        except Exception as failure:
            log.debug("a copy of %d blocks of layer %d failed: %s", len(slots), layer, failure)
        finally:
            with self._changed:
                end = self._clock.now()
                self._meter.end(end, done * nbytes)
                self._stats.submitted += done
                self._stats.enqueued += done
                self._stats.completed += done
                self._stats.bytes += done * nbytes
                self._stats.exposed_s += end - start
        return done > 0

    def cancel(self, request_id: int) -> None:
        """End a request's tickets that the link does not have yet. The others end normally."""
        with self._changed:
            self._cancel(request_id, f"request {request_id} was cancelled")

    def reached(self, step: int, layer: int) -> None:
        """The step thread is at this layer: tickets due by now that complete later are late."""
        self._reached = (step, layer)

    def in_flight(self, request_id: int | None = None) -> int:
        """Tickets submitted and not yet returned by completed(); while there are any, slots are in use."""
        with self._changed:
            return self._book.in_flight(request_id)

    @property
    def bytes_in_flight(self) -> int:
        with self._changed:
            return self._book.num_bytes

    @property
    def stats(self) -> PrefetchStats:
        """A copy, consistent in itself."""
        with self._changed:
            return dataclasses.replace(self._stats, bandwidth=self._meter.bandwidth)

    def _copy_here(self, end: float) -> None:
        """Copy promoted batches on this thread while there are any and the time is not up."""
        copy = self._link.copy_here
        while copy and self._clock.now() < end and (batch := self._take(only_promoted=True)):
            todo = [batch]
            for part in todo:  # grows: a batch that failed is tried again, ticket by ticket
                self._begin()
                try:
                    copy(part[0].layer, part)
                except Exception as failure:
                    todo += self._failed(part, failure)
                except BaseException:  # Ctrl-C
                    self._finish([t for t in batch if not t.finished], "the copy was interrupted")
                    raise
                else:
                    self._finish(part)

    def _cancel(self, request_id: int | None, why: str) -> None:
        self._stats.cancelled += len(self._book.cancel(request_id, why))
        self._clock.notify(self._changed)

    # --- the event loop's side ----------------------------------------------------------------
    async def _main(self) -> None:
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._link.lanes)]
        try:
            await asyncio.gather(*self._lanes)
        except asyncio.CancelledError:
            log.error("the prefetch link did not end in time; its tickets are given up")
        except Exception:
            log.exception("the prefetch coordinator died")

    async def _lane(self) -> None:
        while True:
            self._work.clear()
            batch = self._take()
            if batch:
                await self._copy(batch)
            elif self._state != "running":
                return
            else:
                await self._work.wait()

    def _take(self, only_promoted: bool = False) -> list[Ticket]:
        with self._changed:
            batch = self._book.take(self._batch_bytes, only_promoted)
            self._stats.enqueued += len(batch)
            if only_promoted:
                self._here.update(batch)
            else:
                self._idle = self._idle or not batch
            return batch

    async def _copy(self, batch: list[Ticket]) -> None:
        todo = [batch]
        for part in todo:  # as in _copy_here
            self._begin()
            try:
                await self._link.copy(part[0].layer, part)
            except asyncio.CancelledError:
                self._finish(part, "given up: the coordinator was stopped before the link was done")
                raise
            except Exception as failure:
                todo += self._failed(part, failure)
            else:
                self._finish(part)

    def _begin(self) -> None:
        with self._changed:
            self._meter.begin(self._clock.now())

    def _failed(self, batch: list[Ticket], failure: Exception) -> list[list[Ticket]]:
        """What to try again: the tickets of a batch one by one, so that only broken ones fail."""
        error = f"{type(failure).__name__}: {failure}"
        log.debug("a copy of %d blocks of layer %d failed: %s", len(batch), batch[0].layer, error)
        alone = [[ticket] for ticket in batch] if len(batch) > 1 else []
        self._finish([] if alone else batch, error)
        with self._changed:
            self._stats.retried += len(alone)
        return alone

    def _finish(self, batch: list[Ticket], error: str | None = None) -> None:
        """A copy is over, and with it these tickets."""
        with self._changed:
            self._book.finish(batch, error)
            self._here.difference_update(batch)
            if error:
                self._stats.failed += len(batch)
            else:
                size = sum(t.nbytes for t in batch)
                self._stats.completed += len(batch)
                self._stats.late += sum(t.step > NOW and t.deadline <= self._reached for t in batch)
                self._stats.bytes += size
            self._meter.end(self._clock.now(), 0 if error else size)
            self._clock.notify(self._changed)

    def _give_up(self) -> None:
        for lane in self._lanes:
            lane.cancel()

    def _ended(self) -> None:
        """The loop is over, by stop() or by accident: nobody may wait for it any more."""
        try:
            self._link.close()  # nothing writes after this
        except Exception:
            log.exception("the prefetch link could not be closed")
        with self._changed:
            if self._state == "running":
                self._state = "dead"
            self._cancel(None, f"the prefetch coordinator is {self._state}")
            left = [t for t in self._book.enqueued() if t not in self._here]
            self._book.finish(left, f"the prefetch coordinator is {self._state}")
            self._stats.failed += len(left)
            self._clock.notify(self._changed)
