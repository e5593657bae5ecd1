"""What a draft is, and how its tokens are verified.

Owns: the Draft interface and the rule of acceptance. Must not know: where the drafts of a kind come from, who
runs when, what it pays.

Verification (speculative decoding: arXiv 2211.17192, 2302.01318). The draft tokens d1..dk of a request are
computed in the target's forward pass beside the newest token, so one pass gives the target's distribution
after each of them. At every position the target's own token is drawn as if there were no draft: greedily, or
with the random number that belongs to (seed, position). While it equals the draft token, the pass has already
computed what follows; the first that differs is kept as well, and ends the run. So k drafts give 1 to k + 1
tokens, and these are the tokens that decoding one at a time would have drawn, whatever the draft says.

This is rejection sampling. A draft here proposes one certain token x, a proposal with all its mass on x.
The rule accepts x with probability min(1, p(x) / 1) = p(x), and otherwise draws from the residual, which is p
without x, normalised. A draw y from p equals x with probability p(x), and given that it does not, it is
distributed as p without x. Drawing y and comparing is both steps at once. Proposals drawn from a
distribution of the draft's own are accepted more often when the temperature is high, but then what a seed
gives would depend on the draft; here a seeded request gives the same with any draft and with none (as in
arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nano_oasis.request import SampledToken, ScheduledRow

TRY_AGAIN = 16  # times a draft holds its tongue before it proposes one token all the same, to keep learning


class Draft(Protocol):
    """Proposes what may come next. Called on the step thread only; may keep what it likes per request id."""

    name: str

    def propose(self, rows: Sequence[ScheduledRow], kv: Any) -> list[list[int]]:
        """For each row, up to max_drafts tokens that may follow the newest one of its request.

        Fewer, or none, where a guess is less likely to be right than row.price. kv: the step's KVStore,
        before its begin(), for drafts that run the target itself.
        """

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int], hidden: torch.Tensor) -> None:
        """After the target's pass over rows (their drafts included): the first right[i] drafts of row i were
        accepted; hidden[i] [H] is the final state that gave the token after them."""

    def forget(self, request_id: int) -> None:
        """The request has ended. Also called for requests that the draft never saw."""


@dataclass
class Chance:
    """How often drafts were right lately: the later, the more it counts. Begins as if one of one had been."""

    right: float = 1.0
    verified: float = 1.0
    memory: float = 0.8  # what is kept of the past at each observation

    @property
    def value(self) -> float:
        """That a draft token is right, given that those before it are."""
        return self.right / self.verified

    def learn(self, right: int, proposed: int) -> None:
        """The first `right` of `proposed` were accepted; those after the first wrong one are unknown."""
        self.right = self.memory * self.right + right
        self.verified = self.memory * self.verified + min(right + 1, proposed)

    def worth(self, count: int, price: float) -> int:
        """Of `count` tokens in a row, how many are accepted with a chance of at least `price`."""
        return next((j for j in range(count) if self.value ** (j + 1) < price), count)


def accepted(drafts: Sequence[int], drawn: Sequence[SampledToken]) -> list[SampledToken]:
    """The tokens to keep: drawn[j] [k + 1] is the target's token after j drafts [k]."""
    kept = 0
    while kept < len(drafts) and drawn[kept].token_id == drafts[kept]:
        kept += 1
    return list(drawn[: kept + 1])
