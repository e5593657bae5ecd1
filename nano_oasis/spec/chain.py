"""Drafting token by token with a small model: the loop that the head, the target's own layers and a draft
model share.

Owns: when a chain of drafts stops, and the calibration of a draft's confidence. Must not know: what computes
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_oasis.request import ScheduledRow

# (which of the rows go on, the token each goes on from [n] int64, how many drafts it has so far)
#     -> likeliest next tokens [n] int64, their probabilities by the draft [n] fp32
Step = Callable[[list[int], Tensor, int], tuple[Tensor, Tensor]]


@dataclass
class Calibration:
    """A draft's confidence against how often it was right: small models are too sure, or not sure enough."""

    right: float = 1.0
    expected: float = 1.0
    memory: float = 0.98

    @property
    def factor(self) -> float:
        return self.right / self.expected

    def learn(self, confidence: Sequence[float], right: int) -> None:
        """Of drafts of this confidence the first `right` were right; those after the first wrong one are
        unknown.
        """
        self.right = self.memory * self.right + right
        self.expected = self.memory * self.expected + sum(confidence[: right + 1])


class Chains:
    """Drafts of several requests side by side, each as long as its next token is likely enough."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._confidence: dict[int, list[float]] = {}  # of the last drafts, by request

    def draft(self, rows: Sequence[ScheduledRow], step: Step) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in rows]
        sure: list[list[float]] = [[] for _ in rows]
        chance = [1.0] * len(rows)
        going = [i for i, row in enumerate(rows) if row.max_drafts > 0]
        tokens = torch.tensor([row.request.tokens(row.start, row.start + 1)[0] for row in rows])
        factor, done = self.calibration.factor, 0
        while going:
            best, confidence = step(going, tokens[going], done)
            done += 1
            tokens[going] = best
            on = []
            for i, token, p in zip(going, best.tolist(), confidence.tolist(), strict=True):
                chance[i] *= min(p * factor, 1.0)
                if chance[i] < rows[i].price:
                    continue
                found[i].append(token)
                sure[i].append(p)
                if done < rows[i].max_drafts:
                    on.append(i)
            going = on
        self._confidence = {row.request.id: s for row, s in zip(rows, sure, strict=True)}
        return found

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int]) -> None:
        for row, count in zip(rows, right, strict=True):
            confidence = self._confidence.pop(row.request.id, None)
            if confidence and row.drafts:
                self.calibration.learn(confidence[: len(row.drafts)], count)
