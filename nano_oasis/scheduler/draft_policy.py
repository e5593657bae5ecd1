"""Whether drafts pay: what a draft token costs against what a token is worth, both measured.

Owns: how many draft tokens a step may have. Must not know: torch, how drafts are made or how likely they are.

A step of n decoding requests without drafts takes T0 seconds; with D draft tokens it takes T. So a draft
token costs c = (T - T0) / D seconds, drafting included. The batch gives R tokens a second anyway. A draft
token accepted with chance p brings p tokens for c seconds: it pays while p > c * R, its *price*. The draft
compares each of its tokens with the price and proposes those that are likelier. T0, c and R are medians of
the last steps of about the same n; steps that also compute prompts are left out. While drafts are used, a
step now and then goes without, to know T0; while they are not, a step now and then has one, to know c.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from nano_oasis.config import MOST_DRAFTS
from nano_oasis.request import Request

FIRST = 3  # steps of a kind before anything is concluded from them
SEEN = 5  # steps of a kind that count
CHECK = 48  # steps after which the other kind of step is tried
LATER = 4 * CHECK  # and where drafts cost more than any could bring


class FixedDrafts:
    """Always `count` tokens for each request, at any price."""

    price = 0.0

    def __init__(self, count: int) -> None:
        self.count = count

    def counts(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def record(self, requests: int, drafts: int, tokens: int, seconds: float) -> None:
        """Nothing to learn."""


@dataclass
class _Size:
    """What was seen of steps of about one size; seconds, tokens per second."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    cost: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))  # of a draft token
    rate: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    since_plain: int = 0
    since_drafts: int = 0
    looks: int = 0  # steps left that have a draft token although it would not pay

    @property
    def price(self) -> float:
        return max(median(self.cost), 0.0) * median(self.rate) if len(self.cost) >= FIRST else 0.0


class PricedDrafts:
    """Up to `most` tokens for each request, as long as any could be worth its price."""

    def __init__(self, most: int = MOST_DRAFTS) -> None:
        self.most = most
        self.price = 0.0  # of this step's batch
        self._sizes: dict[int, _Size] = {}

    def counts(self, requests: Sequence[Request]) -> list[int]:
        size = self._size(len(requests))
        self.price = size.price
        if len(size.plain) < FIRST or (size.since_plain > CHECK and size.cost):
            return [0] * len(requests)
        if self.price < 1:
            return [self.most] * len(requests)
        # None could pay. Now and then one token for all, in a few steps, shows whether that is still so.
        if size.since_drafts > LATER:
            size.looks = FIRST
        if not size.looks:
            return [0] * len(requests)
        size.looks -= 1
        self.price = 0.0
        return [1] * len(requests)

    def record(self, requests: int, drafts: int, tokens: int, seconds: float) -> None:
        """A step that only decoded: its requests, draft tokens verified, tokens kept, and duration."""
        size = self._size(requests)
        size.since_plain += 1
        size.since_drafts += 1
        if drafts == 0:
            size.plain.append(seconds)
            size.since_plain = 0
        elif size.plain:
            size.cost.append((seconds - median(size.plain)) / drafts)
            size.since_drafts = 0
        size.rate.append(tokens / max(seconds, 1e-9))

    def _size(self, requests: int) -> _Size:
        return self._sizes.setdefault(requests.bit_length(), _Size())
