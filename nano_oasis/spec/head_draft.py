"""Drafts of a trained head (head.py), from the target's last final state.

Owns: the states of running requests. Must not know: the head's arithmetic, verification, what drafts pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_oasis.request import ScheduledRow
from nano_oasis.spec.chain import Chains
from nano_oasis.spec.head import DraftHead


class HeadDraft:
    name = "head"

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._chains = Chains()
        self._states: dict[int, Tensor] = {}  # request id -> [H], the final state that gave its newest token

    def propose(self, rows: Sequence[ScheduledRow], kv: Any = None) -> list[list[int]]:
        known = [i for i, row in enumerate(rows) if row.request.id in self._states]
        found: list[list[int]] = [[] for _ in rows]
        if known:
            states = torch.stack([self._states[rows[i].request.id] for i in known])  # [n, H]

            def step(going: list[int], tokens: Tensor, done: int) -> tuple[Tensor, Tensor]:
                states[going], best, sure = self.head.step(states[going], tokens)
                return best, sure

            for i, drafts in zip(known, self._chains.draft([rows[i] for i in known], step), strict=True):
                found[i] = drafts
        return found

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int], hidden: Tensor) -> None:
        self._chains.observe(rows, right)
        for row, state in zip(rows, hidden, strict=True):
            self._states[row.request.id] = state.float().clone()  # not a view that keeps the others' alive

    def forget(self, request_id: int) -> None:
        self._states.pop(request_id, None)
