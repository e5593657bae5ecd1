"""The threads of the compiled CPU kernels.

Owns: the threads, when they sleep, and one job at a time. Must not know: what they run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from nano_oasis.kernels.simd_share import make_mailbox, watch

_PATIENCE = 20_000  # looks of a worker into the mailbox before it sleeps: about half a millisecond


class Workers:
    """`count` threads that watch a mailbox, asleep when nothing has come for a while. Plain threads: a second
    OpenMP pool would spin against torch's."""

    def __init__(self, count: int) -> None:
        self.box = make_mailbox()
        self.busy = threading.Lock()
        self._wake = [threading.Event() for _ in range(count)]
        for event in self._wake:
            threading.Thread(target=self._work, args=(event,), name="kernel", daemon=True).start()

    def wake(self) -> None:
        for event in self._wake:
            if not event.is_set():
                event.set()

    def _work(self, event: threading.Event) -> None:
        job = np.int64(0)
        while True:
            event.wait()
            job = watch(self.box, job, _PATIENCE)
            event.clear()  # a job posted just now is done by its poster; the next one wakes this thread


@cache
def _workers(count: int) -> Workers:
    return Workers(count)


@cache
def _mailbox_of(thread: int) -> np.ndarray:
    return make_mailbox()


def run_shares(kernel: Callable[..., Any], shares: int, *args: Any) -> None:
    """kernel(box, shares, args), which posts a job of that many shares; returns when all are done.

    torch.get_num_threads() threads at most, this one included. While they are busy with another caller's
    job (two engines in one process) this thread does it alone.
    """
    threads = min(torch.get_num_threads(), shares)
    if threads > 1:
        workers = _workers(torch.get_num_threads() - 1)
        if workers.busy.acquire(blocking=False):
            try:
                workers.wake()
                kernel(workers.box, shares, args)
            finally:
                workers.busy.release()
            return
    kernel(_mailbox_of(threading.get_ident()), shares, args)
