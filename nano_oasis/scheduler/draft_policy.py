"""Whether drafts pay: what a draft token costs against what a token is worth, both measured.

Owns: how many draft tokens a step may have. Must not know: torch, how drafts are made or how likely they are.

A step of n decoding requests without drafts takes T0 seconds; with D draft tokens it takes T. So a draft
token costs c = (T - T0) / D seconds, drafting included. The batch gives R tokens a second anyway. A draft
token accepted with chance p brings p tokens for c seconds: it pays while p > c * R, its *price*. The draft
compares each of its tokens with the price and proposes those that are likelier. T0, c and R are medians of
the last steps of about the same n; steps that also compute prompts are left out. While drafts are used, a
step now and then goes without, to know T0, and one is *bold*: its price is 0, so that the draft proposes all
it can, and only such steps tell c. (With few draft tokens what drafting costs at all falls on few, each looks
dear, and next time there would be fewer still.) And a draft that proposes little must be quick: over the last
steps in which it was asked, what it brought in tokens is compared with the time that it took itself. What
does not pay is off for a while, then tried anew.
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
CHECK = 48  # steps with drafts after which one goes without, and after which one is bold
OFF = 4 * CHECK  # steps without drafts after they did not pay
JUDGED = 16  # steps over which drafting as a whole must pay,
NOISE = 0.03  # up to this share of their time


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
    cost: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))  # of a draft token, bold steps
    rate: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    plain_rate: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    asked: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=JUDGED))  # gained, lost
    since_plain: int = 0
    since_bold: int = 0
    off: int = 0  # steps left without drafts
    doubtful: bool = False  # it was off: one token at a time until there are new figures

    @property
    def bold(self) -> bool:
        return len(self.cost) < FIRST or self.since_bold > CHECK

    @property
    def price(self) -> float:
        """Of the next step's tokens."""
        return 0.0 if self.bold else self.fair_price

    @property
    def fair_price(self) -> float:
        return max(median(self.cost), 0.0) * median(self.rate) if len(self.cost) >= FIRST else 0.0

    @property
    def pays(self) -> bool:
        """Tokens gained against the tokens that the time taken would have given."""
        if self.fair_price >= 1:
            return False
        if len(self.asked) < JUDGED:
            return True
        gained, lost = (sum(x) for x in zip(*self.asked, strict=True))
        allowed = NOISE * JUDGED * median(self.plain)
        return gained >= (lost - allowed) * median(self.plain_rate)


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
            size.off, size.doubtful = OFF, True
            size.cost.clear()
            size.asked.clear()
        elif size.doubtful and len(size.cost) >= FIRST:  # even one token pays: more will tell what they cost
            size.doubtful = False
            size.cost.clear()
        self.price = size.price
        if size.off or len(size.plain) < FIRST or size.since_plain > CHECK:
            return [0] * len(requests)
        few = size.doubtful and len(size.cost) < FIRST
        return [1 if few else self.most] * len(requests)

    def record(self, requests: int, drafts: int, tokens: int, seconds: float, drafting: float) -> None:
        """A step that only decoded: its requests, draft tokens verified, tokens kept, duration, and how much
        of that the draft took; 0 if it was not asked."""
        size = self._size(requests)
        size.rate.append(tokens / max(seconds, 1e-9))
        if drafting:
            size.asked.append((tokens - requests, drafting))
        if drafts == 0:
            size.plain.append(seconds - drafting)
            size.plain_rate.append(requests / max(seconds - drafting, 1e-9))
            size.since_plain = 0
            return
        size.since_plain += 1
        size.since_bold += 1
        if size.plain and self.price == 0.0:
            size.cost.append((seconds - median(size.plain)) / drafts)
            size.since_bold = 0

    def _size(self, requests: int) -> _Size:
        return self._sizes.setdefault(requests.bit_length(), _Size())
