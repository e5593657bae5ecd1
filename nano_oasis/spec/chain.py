"""Drafting token by token with a small model: the loop that the head, the target's own layers and a draft
model share.

Owns: when a chain of drafts stops, and the calibration of a draft's confidence. Must not know: what computes
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nano_oasis.request import ScheduledRow
from nano_oasis.spec.draft import TRY_AGAIN

# (which of the rows go on, the token each goes on from [n] int64, how many drafts it has so far)
#     -> likeliest next tokens [n] int64, their probabilities by the draft [n] fp32
Step = Callable[[list[int], Tensor, int], tuple[Tensor, Tensor]]

BINS = 8


class Calibration:
    """How often drafts of a confidence were right. Confidence is not chance: small models are too sure, and a
    draft that thinks as the target does is right however unsure both are."""

    memory = 0.98

    def __init__(self) -> None:
        self.seen = [2.0] * BINS  # of each range of confidence; begins as if it were the chance
        self.right = [2.0 * (i + 0.5) / BINS for i in range(BINS)]

    def chance(self, confidence: float) -> float:
        i = self._bin(confidence)
        return self.right[i] / self.seen[i]

    def learn(self, confidence: Sequence[float], right: int) -> None:
        """Of drafts of this confidence the first `right` were right; later ones are unknown."""
        for j, sure in enumerate(confidence[: right + 1]):
            i = self._bin(sure)
            self.seen[i] = self.memory * self.seen[i] + 1
            self.right[i] = self.memory * self.right[i] + (j < right)

    @staticmethod
    def _bin(confidence: float) -> int:
        return min(max(int(confidence * BINS), 0), BINS - 1)


class Chains:
    """Drafts of several requests side by side, each as long as its next token is likely enough."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._confidence: dict[int, list[float]] = {}  # of the last drafts, by request
        self._silent = 0  # calls in a row that proposed nothing

    def draft(self, rows: Sequence[ScheduledRow], step: Step) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in rows]
        sure: list[list[float]] = [[] for _ in rows]
        chance = [1.0] * len(rows)
        going = [i for i, row in enumerate(rows) if row.max_drafts > 0]
        tokens = torch.tensor([row.request.tokens(row.start, row.start + 1)[0] for row in rows])
        done = 0
        # Then one token whatever it costs, or what was learned would never be unlearned.
        again = self._silent >= TRY_AGAIN
        while going:
            best, confidence = (x.cpu() for x in step(going, tokens[going], done))
            done += 1
            tokens[going] = best
            on = []
            for i, token, p in zip(going, best.tolist(), confidence.tolist(), strict=True):
                chance[i] *= self.calibration.chance(p)
                if chance[i] < rows[i].price and not (again and done == 1):
                    continue
                found[i].append(token)
                sure[i].append(p)
                if done < rows[i].max_drafts:
                    on.append(i)
            going = on
        self._silent = 0 if any(found) else self._silent + 1
        self._confidence = {row.request.id: s for row, s in zip(rows, sure, strict=True)}
        return found

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int]) -> None:
        for row, count in zip(rows, right, strict=True):
            confidence = self._confidence.pop(row.request.id, None)
            if confidence and row.drafts:
                self.calibration.learn(confidence[: len(row.drafts)], count)
