"""Whether the machine is otherwise idle: a benchmark on two shared cores says little when it is not.

Owns: reading /proc. Must not know: what is measured. Without /proc nothing is known, and nothing is claimed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

IDLE_CORES = 0.12  # of others: less is called idle


class Others:
    """CPU cores used since reset by processes that are neither this one nor `server` or its children."""

    def __init__(self, server: int | None = None) -> None:
        self._own = (os.getpid(), *((server,) if server else ()))
        self.reset()

    def reset(self) -> None:
        self._busy, self._mine, self._at = _busy(), self._ours(), time.perf_counter()

    def cores(self) -> float | None:
        """None where it cannot be told."""
        busy, began = _busy(), self._busy
        if busy is None or began is None:
            return None
        took = max(time.perf_counter() - self._at, 1e-9)
        return max(0.0, (busy - began) - (self._ours() - self._mine)) / took

    def _ours(self) -> float:
        table = _processes()
        pids = set().union(*(_tree(table, pid) for pid in self._own))
        return sum(table[pid][1] for pid in pids)

    def wait(self, seconds: float, look: float = 1.5) -> bool:
        """Wait until nothing else runs, at most so long; whether that came about."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.reset()
            time.sleep(look)
            cores = self.cores()
            if cores is None or cores < IDLE_CORES:
                return cores is not None
        return False


def _busy() -> float | None:
    """CPU seconds of the whole machine that were not idle."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in first[1:9])
    return float(user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _processes() -> dict[int, tuple[int, float]]:
    """pid -> (its parent, its CPU seconds)"""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found[int(folder.name)] = int(fields[1]), spent
    return found


def _tree(table: dict[int, tuple[int, float]], root: int) -> set[int]:
    """A process and its living descendants."""
    found, todo = set(), [root] if root in table else []
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += [child for child, (parent, _) in table.items() if parent == pid]
    return found
