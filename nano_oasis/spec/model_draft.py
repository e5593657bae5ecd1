"""Drafts of a separate, smaller model with the same vocabulary.

Owns: the draft model's own KV and how it is kept in step with the requests. Must not know: the target,
verification, what drafts pay.

A request's shadow holds the tokens whose KV the draft model has. Before drafting, the shadow drops what the
request did not keep (drafts that were rejected) and computes what it lacks. It depends on the request's
tokens only, so preemption and recomputation of the target's KV do not concern it. When blocks run out, the
shadow that was used least recently gives its own up and is computed again when it is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.spec.chain import Chains
from nano_oasis.spec.self_draft import best_of

FEW = 8  # tokens that a shadow may lack when nothing unusual happens
CATCH_UP = (
    512  # tokens computed before drafting, in one step, for all requests; longer texts take several steps
)


@dataclass(eq=False)
class _Shadow(Request):
    """prompt_ids: the tokens computed; block_table: the draft model's blocks."""

    settled: int = 0  # leading tokens that the request is known to have kept


class ModelDraft:
    name = "model"

    def __init__(self, model: Model, kv: DenseKV, max_len: int, num_tokens: int) -> None:
        """max_len: positions the draft model has. num_tokens: ids the tokenizer knows."""
        self.model, self.kv, self.max_len, self.num_tokens = model, kv, max_len, num_tokens
        self.blocks = BlockManager(kv.cache.num_blocks, kv.cache.block_size, enable_prefix_caching=False)
        self._shadows: OrderedDict[int, _Shadow] = OrderedDict()  # by request id, least recently used first
        self._chains = Chains()
        self.behind = False  # the last propose() was mostly catching up: its time is not what drafts cost

    def propose(self, rows: Sequence[ScheduledRow], kv: Any = None) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in rows]
        ready = self._catch_up(rows)
        shadows = [self._shadows[rows[i].request.id] for i in ready]

        def step(going: list[int], tokens: Tensor, done: int) -> tuple[Tensor, Tensor]:
            hidden = self._forward([(shadows[i], [t]) for i, t in zip(going, tokens.tolist(), strict=True)])
            return best_of(self.model.logits(hidden)[:, : self.num_tokens])

        for i, drafts in zip(ready, self._chains.draft([rows[i] for i in ready], step), strict=True):
            found[i] = drafts
        return found

    def _catch_up(self, rows: Sequence[ScheduledRow]) -> list[int]:
        """Bring the shadows up to all but the newest token; which rows can draft now."""
        ready, todo, budget = [], [], CATCH_UP
        busy = {row.request.id for row in rows}
        for i, row in enumerate(rows):
            known = row.request.num_tokens - 1
            if known + row.max_drafts > self.max_len:
                continue
            shadow = self._shadow(row.request)
            lacking = row.request.tokens(len(shadow.prompt_ids), known)[:budget]
            reach = len(shadow.prompt_ids) + len(lacking)
            if not self._reserve(shadow, reach + (row.max_drafts if reach == known else 0), busy):
                continue
            budget -= len(lacking)
            if lacking:
                todo.append((shadow, lacking))
            if reach == known:
                ready.append(i)
        if todo:
            self._forward(todo)
        # Full acceptance leaves a token to compute; many are a new request's, or the end of a pause.
        self.behind = any(len(lacking) > FEW for _, lacking in todo)
        return ready

    def _shadow(self, request: Request) -> _Shadow:
        """Cut to what the request still says; a new one for a new request."""
        shadow = self._shadows.setdefault(request.id, _Shadow([], SamplingParams(), self.max_len, 0))
        self._shadows.move_to_end(request.id)
        mine, first = shadow.prompt_ids, shadow.settled
        truth = request.tokens(first, min(len(mine), request.num_tokens - 1))
        same = next((j for j, t in enumerate(truth) if mine[first + j] != t), len(truth))
        del mine[first + same :]
        shadow.settled = first + same
        return shadow

    def _reserve(self, shadow: _Shadow, tokens: int, busy: set[int]) -> bool:
        """Blocks for so many tokens; shadows of requests that do not draft now give theirs up."""
        missing = self.blocks.blocks_for(tokens) - len(shadow.block_table)
        idle = [i for i in self._shadows if i not in busy]
        while missing > self.blocks.num_free and idle:
            self.forget(idle.pop(0))
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            shadow.block_table += self.blocks.allocate(missing)
        return True

    def _forward(self, parts: Sequence[tuple[_Shadow, list[int]]]) -> Tensor:
        """Compute these tokens after what each shadow has; hidden [T, H], shadows with one token first."""
        rows = [ScheduledRow(s, len(s.prompt_ids), len(tokens), samples=True) for s, tokens in parts]
        # Single tokens first: a row with one query is a decode.
        order = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens > 1)
        tokens = torch.tensor([t for i in order for t in parts[i][1]], device=self.kv.device)
        positions = torch.tensor(
            [p for i in order for p in range(rows[i].start, rows[i].start + rows[i].num_tokens)],
            device=self.kv.device,
        )
        hidden = self.model.forward(tokens, positions, self.kv.begin([rows[i] for i in order]))
        for shadow, new in parts:
            shadow.prompt_ids += new
        return hidden

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int], hidden: Tensor) -> None:
        self._chains.observe(rows, right)

    def forget(self, request_id: int) -> None:
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self.blocks.release(shadow.block_table)
