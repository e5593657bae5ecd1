"""Drafts by looking up what followed the newest tokens when they occurred before.

Owns: an index of every request's n-grams. Must not know: the model, verification, what it pays.

Prompt lookup decoding (as in vLLM's `ngram`): edited code and summarised text repeat the prompt. The
index maps the last n tokens to where they were followed by another; a step adds the n-grams that end in its
new tokens, so it costs the same at any context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nano_oasis.request import Request, ScheduledRow
from nano_oasis.spec.draft import TRY_AGAIN, Chance

LONGEST, SHORTEST = 4, 2  # tokens that must agree; longer agreement is preferred


@dataclass
class _Index:
    indexed: int = 0  # tokens whose n-grams are in; tokens of a request only ever grow
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> position after its latest
    chances: dict[int, Chance] = field(default_factory=dict)  # by how many tokens agreed
    agreed: int = 0  # in the last look-up
    declined: int = 0  # look-ups since the last proposal

    @property
    def chance(self) -> Chance:
        return self.chances.setdefault(self.agreed, Chance())


class NGramDraft:
    name = "ngram"

    def __init__(self) -> None:
        self._of: dict[int, _Index] = {}

    def propose(self, rows: Sequence[ScheduledRow], kv: Any = None) -> list[list[int]]:
        return [self.likely(row) for row in rows]

    def likely(self, row: ScheduledRow, rival: float = 0.0) -> list[int]:
        """As many tokens as are likely enough to pay.

        None where a rival is likelier (its chance of a right token). But now and then one token all the same,
        to see whether it is still so.
        """
        index = self._of.setdefault(row.request.id, _Index())
        found = self._look_up(index, row.request, row.max_drafts)
        if not found:
            return []
        chance = index.chance
        count = chance.worth(len(found), row.price) if chance.value >= rival else 0
        index.declined = 0 if count else index.declined + 1
        if index.declined > TRY_AGAIN:
            index.declined, count = 0, 1
        return found[:count]

    def _look_up(self, index: _Index, request: Request, count: int) -> list[int]:
        """Up to `count` tokens: what followed the latest earlier occurrence of the longest tail."""
        if count <= 0:
            return []
        self._add(index, request)
        total = request.num_tokens
        tail = request.tokens(max(total - LONGEST, 0), total)
        for n in range(min(LONGEST, len(tail)), SHORTEST - 1, -1):
            at = index.after.get(tuple(tail[-n:]))
            if at is not None:
                index.agreed = n
                found = request.tokens(at, min(at + count, total))
                # A text that repeats itself goes on as it did: the copy may run into what it has copied.
                while len(found) < count:
                    found.append(found[len(found) - (total - at)])
                return found
        return []

    @staticmethod
    def _add(index: _Index, request: Request) -> None:
        """Every n-gram that is followed by a token that is known now."""
        total = request.num_tokens
        first = max(index.indexed - LONGEST, 0)
        tokens = request.tokens(first, total)
        for end in range(max(index.indexed, 1), total):  # n-grams that end before `end`; token `end` follows
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                index.after[tuple(tokens[end - n - first : end - first])] = end
        index.indexed = total

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int], hidden: torch.Tensor) -> None:
        """Which of its drafts were right; of those after the first wrong one nothing is known."""
        for row, count in zip(rows, right, strict=True):
            if row.drafts and row.request.id in self._of:
                self._of[row.request.id].chance.learn(count, len(row.drafts))

    def forget(self, request_id: int) -> None:
        self._of.pop(request_id, None)
