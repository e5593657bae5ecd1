"""Where the coordinator's event loop runs, and whose time it keeps.

Owns: an event loop on a thread of its own, or one in virtual time that runs while its caller waits.
Must not know: tickets, links, or what is waited for.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

Main = Callable[[], Coroutine[Any, Any, None]]


class Clock(Protocol):
    """An event loop as the step thread sees it."""

    def start(self, main: Main, on_exit: Callable[[], None]) -> None:
        """Run main() on the loop. `on_exit` is called on it or its thread when that ended, however it did."""

    def now(self) -> float:
        """Seconds; the loop's own time()."""

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop. Does nothing once the loop has ended."""

    def wait_for(self, changed: threading.Condition, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Block until predicate() or the timeout; returns predicate(). `changed` must not be held."""

    def notify(self, changed: threading.Condition) -> None:
        """Wake whoever waits for `changed`, which must be held."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the loop to end; False if it has not by then."""


class RealClock:
    """The loop runs on a daemon thread, in real time."""

    def start(self, main: Main, on_exit: Callable[[], None]) -> None:
        def run() -> None:
            try:
                self._loop.run_until_complete(main())
            finally:
                on_exit()
                self._loop.close()

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=run, name="nano-oasis-prefetch", daemon=True)
        self._thread.start()

    def now(self) -> float:
        return time.monotonic()

    def call_soon(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def wait_for(self, changed: threading.Condition, predicate: Callable[[], bool], timeout_s: float) -> bool:
        with changed:
            return changed.wait_for(predicate, timeout_s)

    def notify(self, changed: threading.Condition) -> None:
        changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class VirtualClock:
    """No thread and no waiting: the loop runs inside elapse() and wait_for(), and skips idle time.

    A simulation of minutes takes milliseconds, and repeats exactly. Only for links that wait by
    asyncio.sleep: a worker thread's real work has no place in virtual time.
    """

    def __init__(self) -> None:
        self._loop = _VirtualLoop()

    def start(self, main: Main, on_exit: Callable[[], None]) -> None:
        def ended(_: object) -> None:
            on_exit()
            self._loop.stop()

        self._main = self._loop.create_task(main())
        self._main.add_done_callback(ended)

    def now(self) -> float:
        return self._loop.time()

    def elapse(self, seconds: float) -> None:
        """The caller is busy for so long, while the loop goes about its work."""
        self._run_until(lambda: False, seconds)

    def call_soon(self, callback: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon(callback)

    def wait_for(self, changed: threading.Condition, predicate: Callable[[], bool], timeout_s: float) -> bool:
        return self._run_until(predicate, timeout_s)

    def notify(self, changed: threading.Condition) -> None:
        self._loop.stop()  # back to the predicate in _run_until

    def join(self, timeout_s: float) -> bool:
        done = self._run_until(self._main.done, timeout_s)
        if done:
            self._loop.close()
        return done

    def _run_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            self._loop.stop()

        timer = self._loop.call_later(timeout_s, expire)
        while not predicate() and not expired:
            self._loop.run_forever()
        timer.cancel()
        return predicate()


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual_now = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self.virtual_now


class _SkippingSelector(selectors.SelectSelector):
    """Where the loop would sleep until its next timer, moves its clock there instead."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "_run_until always leaves a timer"
            self._loop.virtual_now += timeout
        return events
