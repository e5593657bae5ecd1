"""Jobs handed to threads through the mailbox: every share once, whoever is late, absent or busy.

Owns: these checks. Must not know: what real kernels compute.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the compiled CPU kernels need numba")
from nano_oasis.kernels import simd_share as s
from nano_oasis.kernels.simd import jit
from nano_oasis.kernels.workers import run_shares


@jit
def _count(share, shares, counts):
    for _ in range(200):
        counts[share] += 1


@jit
def count(box, shares, args):
    s.begin(box, s.entry(_count, args), s.place(args), shares)
    s.finish(box)


@jit
def late(box, first, second):
    """A worker that has seen job 1 to its end looks again at every moment of job 2's posting."""
    s.begin(box, s.entry(_count, first), s.place(first), 2)
    s.finish(box)
    job, seen = s.peek(box, s.WORD) >> 32, s.peek(box, s.WORD)
    s.poke(box, s.WORD, job << 32 | s._NEXT)
    s.poke(box, s.SHARES, 16)
    s._help(box, job)
    taken = s._swap(box, s.WORD, seen, seen + 1)
    s.begin(box, s.entry(_count, second), s.place(second), 16)
    s._help(box, job)
    s.finish(box)
    return taken


def test_a_worker_late_for_the_last_job_takes_nothing_of_the_next() -> None:
    first, second = np.zeros(16, np.int64), np.zeros(16, np.int64)
    assert not late(s.make_mailbox(), (first,), (second,))
    assert first.tolist() == [200] * 2 + [0] * 14 and second.tolist() == [200] * 16


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_share_is_done_once(three_threads) -> None:
    """Sizes that grow and shrink from job to job, from two threads at once."""

    def post(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for shares in draw.integers(1, 20, 1500):
            counts = np.zeros(20, np.int64)
            run_shares(count, int(shares), counts)
            if counts.tolist() != [200] * shares + [0] * (20 - shares):
                wrong.append(counts)

    wrong: list[np.ndarray] = []
    threads = [threading.Thread(target=post, args=(seed,)) for seed in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_workers_and_needs_none(three_threads) -> None:
    run_shares(count, 8, np.zeros(8, np.int64))
    child = os.fork()
    if child == 0:
        counts = np.zeros(8, np.int64)
        run_shares(count, 8, counts)
        os._exit(0 if counts.tolist() == [200] * 8 else 1)
    assert os.waitpid(child, 0)[1] == 0
