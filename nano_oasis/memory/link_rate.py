"""How fast the link is, and how much may be asked of it in a step.

Owns: the bandwidth meter and the admission cap. Must not know: tickets, threads, clocks.
"""

from __future__ import annotations

import math


def admission_cap(
    step_s: float, bandwidth: float, bytes_per_block: int, layers: int, rows: int, headroom: float = 0.3
) -> int:
    """Blocks that each row may fetch per layer and step without the step ever waiting for the link.

    step_s: a step's seconds; bandwidth: measured bytes per second; bytes_per_block: keys and values of one
    block in one layer. The share `headroom` of the link is left for repairs and for copies that run late.
    0 means that the link cannot bring every row a block: ask again with rows=1 and share the result out.
    """
    if bytes_per_block < 1 or layers < 1 or rows < 1 or not 0 <= headroom < 1:
        raise ValueError(
            f"bytes_per_block {bytes_per_block}, layers {layers} and rows {rows} must be at least 1, "
            f"headroom {headroom} from 0 to below 1"
        )
    budget = (1 - headroom) * max(step_s, 0.0) * max(bandwidth, 0.0)
    return math.floor(budget / (bytes_per_block * layers * rows))


class Meter:
    """Bandwidth while busy: decayed bytes over decayed seconds with at least one copy under way."""

    def __init__(self, expected: float) -> None:
        self._expected = expected
        self._seconds = 0.0
        self._bytes = 0.0
        self._active = 0
        self._mark = 0.0

    def begin(self, now: float) -> None:
        self._count(now, 0)
        self._active += 1

    def end(self, now: float, size: int) -> None:
        self._count(now, size)
        self._active -= 1

    def _count(self, now: float, size: int) -> None:
        if self._active:
            decay = 0.98 if size else 1.0
            self._seconds = self._seconds * decay + now - self._mark
            self._bytes = self._bytes * decay + size
        self._mark = now

    @property
    def bandwidth(self) -> float:
        return self._bytes / self._seconds if self._bytes and self._seconds else self._expected
