"""Whether drafts pay: what a draft token costs against what a token is worth, both measured.

Owns: how many draft tokens a step may have. Must not know: torch, how drafts are made or how likely they are.

A step of n decoding requests takes T0 seconds without drafts; with D draft tokens it takes T0 + F + c * D:
F is what drafting and verifying cost at all. The batch gives R tokens a second anyway, so a draft token
accepted with chance p, which brings p tokens for c seconds, is worth it while p > c * R, its *price*. The
draft compares each of its tokens with the price and proposes those that are likelier. T0, c and R are
medians of the last steps of about the same n; steps that also compute prompts say nothing about them.

While drafts are used, a step now and then goes without, to know T0, and one is *bold*: its price is 0, so
that the draft proposes all it can, and only such steps tell c. (With few draft tokens F falls on few, each
looks dear, and next time there would be fewer still.) So F is in no price. It is in the *debt*: over the
last steps in which the draft was asked, the time they took beyond T0 less the time that the tokens gained
would have taken. With too much of it drafts are off for a while, longer each time, and then tried anew.
Bold steps, which are there to learn, count only against the heavy limit.
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
CHECK = 48  # steps with drafts after which one goes without, and after which one is bold,
BOLD = 100  # or later: bold tokens at their known cost are one part of so many of the time
OFF = 2 * CHECK  # steps without drafts after they did not pay, doubled each time up to
MOST_OFF = 16 * CHECK
JUDGED = 16  # steps over which drafting as a whole must pay,
NOISE = 0.03  # up to this share of their time,
HEAVY = 4.0  # and never so many plain steps' time must be lost
SILENT = 32  # steps with drafts in a row that taught nothing: all compute prompts, or a draft catches up


class FixedDrafts:
    """Always `count` tokens for each request, at any price."""

    price = 0.0

    def __init__(self, count: int) -> None:
        self.count = count

    def counts(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def record(self, requests: int, drafts: int, tokens: int, seconds: float, drafting: float) -> None:
        """Nothing to learn."""


@dataclass
class _Size:
    """What was seen of steps of about one size; seconds, tokens per second."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    cost: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))  # of a draft token, bold steps
    rate: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    plain_rate: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    # Seconds lost by asking the draft, below 0: gained. All steps; those that were not bold.
    asked: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED))
    judged: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED))
    since_plain: int = 0
    since_bold: int = 0
    silent: int = 0  # steps with drafts since one that taught something
    off: int = 0  # steps left without drafts
    off_for: int = OFF  # next time
    doubtful: bool = False  # it was off: one token at a time until there are new figures

    @property
    def known(self) -> bool:
        return len(self.cost) >= FIRST

    def bold(self, most: int) -> bool:
        if not self.known:
            return True
        dear = BOLD * most * median(self.cost) / median(self.plain)
        return self.since_bold > max(CHECK, dear)

    @property
    def price(self) -> float:
        """What a draft token costs, in tokens."""
        return max(median(self.cost), 0.0) * median(self.rate) if self.known else 0.0

    @property
    def pays(self) -> bool:
        if self.price >= 1:
            return False
        if self.asked and sum(self.asked) > HEAVY * median(self.plain):
            return False
        return len(self.judged) < JUDGED or sum(self.judged) <= NOISE * JUDGED * median(self.plain)


class PricedDrafts:
    """Up to `most` tokens for each request, as long as any could be worth its price."""

    def __init__(self, most: int = MOST_DRAFTS) -> None:
        self.most = most
        self.price = 0.0  # of this step's batch
        self._sizes: dict[int, _Size] = {}

    def counts(self, requests: Sequence[Request]) -> list[int]:
        size = self._size(len(requests))
        if size.off:
            size.off -= 1
        elif not size.pays:
            size.off, size.off_for = size.off_for, min(2 * size.off_for, MOST_OFF)
            size.doubtful = True
            size.cost.clear()
            size.asked.clear()
            size.judged.clear()
        elif size.doubtful and size.known:  # even one token pays: more will tell what they cost
            size.doubtful = False
            size.cost.clear()
        self.price = 0.0 if size.bold(self.most) else size.price
        if size.off or len(size.plain) < FIRST or size.since_plain > CHECK:
            return [0] * len(requests)
        if size.silent >= SILENT:  # nothing is learned now: what is known, or none
            self.price = size.price
            return [self.most if size.known else 0] * len(requests)
        size.silent += 1
        few = size.doubtful and not size.known
        return [1 if few else self.most] * len(requests)

    def record(self, requests: int, drafts: int, tokens: int, seconds: float, drafting: float) -> None:
        """A step that only decoded: its requests, draft tokens verified, tokens kept, duration, and how much
        of that the draft took; 0 if it was not asked."""
        size = self._size(requests)
        size.silent = 0
        size.rate.append(tokens / max(seconds, 1e-9))
        if drafting and size.plain:
            lost = seconds - median(size.plain) - (tokens - requests) / median(size.plain_rate)
            size.asked.append(lost)
            if self.price > 0:
                size.judged.append(lost)
            size.since_bold += 1
            if len(size.judged) == JUDGED and size.pays:
                size.off_for = OFF
        if drafts == 0:
            size.plain.append(seconds - drafting)
            size.plain_rate.append(requests / max(seconds - drafting, 1e-9))
            size.since_plain = 0
            return
        size.since_plain += 1
        if size.plain and self.price == 0.0:
            size.cost.append((seconds - median(size.plain)) / drafts)
            size.since_bold = 0

    def _size(self, requests: int) -> _Size:
        return self._sizes.setdefault(requests.bit_length(), _Size())
