"""The best of two drafts for each request: what the text repeats, else what the head says.

Owns: that choice. Must not know: how either drafts, verification, what drafts pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nano_oasis.request import ScheduledRow
from nano_oasis.spec.draft import Chance, Draft
from nano_oasis.spec.ngram import NGramDraft


class AutoDraft:
    """A request's draft is the n-gram's where it has found something that is more often right than the
    other's.
    """

    name = "auto"

    def __init__(self, other: Draft) -> None:
        self.ngram, self.other = NGramDraft(), other
        self._chance: dict[int, Chance] = {}  # of the other, by request
        self._copied: set[int] = set()  # requests whose last draft was the n-gram's

    def propose(self, rows: Sequence[ScheduledRow], kv: Any) -> list[list[int]]:
        found: list[list[int]] = []
        self._copied.clear()
        for row in rows:
            rival = self._chance.setdefault(row.request.id, Chance(0.5)).value
            drafts = self.ngram.likely(row, rival)
            if drafts:
                self._copied.add(row.request.id)
            found.append(drafts)
        rest = [i for i, row in enumerate(rows) if row.request.id not in self._copied]
        for i, drafts in zip(
            rest, self.other.propose([rows[i] for i in rest], kv) if rest else [], strict=True
        ):
            found[i] = drafts
        return found

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int], hidden: Tensor) -> None:
        copied = [row.request.id in self._copied for row in rows]
        self.ngram.observe(
            [r for r, c in zip(rows, copied, strict=True) if c],
            [n for n, c in zip(right, copied, strict=True) if c],
            hidden,
        )
        for row, count, was in zip(rows, right, copied, strict=True):
            if row.drafts and not was:
                self._chance.setdefault(row.request.id, Chance(0.5)).learn(count, len(row.drafts))
        # The head needs the state after every token; of its confidence it learns where it drafted.
        self.other.observe(rows, right, hidden)

    def forget(self, request_id: int) -> None:
        self._chance.pop(request_id, None)
        self._copied.discard(request_id)
        self.ngram.forget(request_id)
        self.other.forget(request_id)
