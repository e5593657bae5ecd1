"""One step on the device: a plan in, tokens out.

Owns: turning rows into flat tensors and hidden states into samples; drafting before, verifying after.
Must not know: why these rows were chosen, what becomes of the tokens, text, sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nano_oasis.memory.dense_kv import KVStore, KVView
from nano_oasis.request import Request, SampledToken, ScheduledRow
from nano_oasis.sampler import Sampler, token_logprobs
from nano_oasis.spec.draft import Draft, accepted

log = logging.getLogger(__name__)

_LOGIT_ROWS = 64  # prompt log-probabilities are made this many positions at a time: V is large


class Decoder(Protocol):
    """What the runner needs of a model; tests put a fake here."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, kv: KVView) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class KVFailure(RuntimeError):
    """A request's KV could not be brought to where it was needed."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a row gave: the accepted drafts and the token after them, in order; at least one."""

    tokens: list[SampledToken]
    num_drafts: int = 0  # verified; len(tokens) - 1 of them were right


def _kept(row: ScheduledRow, drawn: Drawn | None) -> ScheduledRow:
    """The row as far as it is valid: KV of drafts that were wrong is not kept, and will be written over."""
    return row.with_drafts(row.drafts[: len(drawn.tokens) - 1]) if drawn and row.drafts else row


class Runner:
    """Executes step plans against one model and one KV store."""

    def __init__(
        self, model: Decoder, kv: KVStore, sampler: Sampler, device: str = "cpu", draft: Draft | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.device = device
        self.draft = draft
        self.draft_seconds = 0.0  # that drafting took in the last step
        self.draft_behind = False  # and that was mostly catching up
        self._told: set[str] = set()  # of the draft's failures, what the log has

    @torch.inference_mode()
    def execute(self, plan: Sequence[ScheduledRow]) -> list[Drawn | KVFailure | None]:
        """Draft, compute every row, verify; one entry per row, None where the row does not sample.

        Prompt log-probabilities, if asked for, are appended to their requests on the way.
        """
        rows = self._with_drafts(plan)
        token_ids, positions, starts = self._flatten(rows)
        hidden = self.model.forward(token_ids, positions, self.kv.begin(rows))  # [T, H]
        for i, row in enumerate(rows):
            if row.request.params.prompt_logprobs is not None:
                self._prompt_logprobs(row, hidden[starts[i] : starts[i + 1]])
        results = self._sample(rows, hidden, starts)
        failures = self.kv.end([_kept(row, drawn) for row, drawn in zip(rows, results, strict=True)])
        return [
            KVFailure(failures[row.request.id]) if row.request.id in failures else drawn
            for row, drawn in zip(rows, results, strict=True)
        ]

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self.draft is not None:
            try:
                self.draft.forget(request.id)
            except Exception:
                self._draft_failed("could not forget a request")

    def _with_drafts(self, plan: Sequence[ScheduledRow]) -> list[ScheduledRow]:
        """The rows with the draft tokens that were found for them. A draft that fails costs only itself."""
        rows, asked = list(plan), [i for i, row in enumerate(plan) if row.max_drafts]
        self.draft_seconds, self.draft_behind = 0.0, False
        if self.draft is None or not asked:
            return rows
        began = time.perf_counter()
        try:
            found = self.draft.propose([rows[i] for i in asked], self.kv)
            for i, drafts in zip(asked, found, strict=True):
                rows[i] = rows[i].with_drafts(drafts[: rows[i].max_drafts])
        except Exception:
            self._draft_failed("failed; the step goes without")
            return list(plan)
        finally:
            self.draft_seconds = time.perf_counter() - began
            self.draft_behind = getattr(self.draft, "behind", False)
        return rows

    def _draft_failed(self, what: str) -> None:
        """Log it, once: a draft that is broken may fail at every step."""
        if what not in self._told:
            self._told.add(what)
            log.exception("the draft %s %s; not logged again", self.draft and self.draft.name, what)

    def _sample(
        self, rows: Sequence[ScheduledRow], hidden: torch.Tensor, starts: Sequence[int]
    ) -> list[Drawn | None]:
        """The target's token after each row's newest token and after each of its drafts; those to keep."""
        results: dict[int, Drawn] = {}
        sampling = [i for i, row in enumerate(rows) if row.samples]
        if not sampling:
            return [None] * len(rows)
        # A row's newest token, then its drafts, are the last tokens that it computed.
        places = [(i, j) for i in sampling for j in range(len(rows[i].drafts) + 1)]
        requests, ahead = [rows[i].request for i, _ in places], [j for _, j in places]
        at = [starts[i + 1] - 1 - len(rows[i].drafts) + j for i, j in places]
        states = hidden[torch.tensor(at, device=self.device)]  # [N, H]
        drawn, first, last = self.sampler(self.model.logits(states), requests, ahead), 0, []
        for i in sampling:
            drafts = rows[i].drafts
            kept = accepted(drafts, drawn[first : first + len(drafts) + 1])
            results[i] = Drawn(kept, len(drafts))
            last.append(first + len(kept) - 1)
            first += len(drafts) + 1
        if self.draft is not None:
            right = [len(results[i].tokens) - 1 for i in sampling]
            try:
                self.draft.observe([rows[i] for i in sampling], right, states[last])
            except Exception:
                self._draft_failed("did not take what became of its tokens")
        return [results.get(i) for i in range(len(rows))]

    def _flatten(self, rows: Sequence[ScheduledRow]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """token_ids [T], positions [T] (int64), and where each row starts in them (one more entry: T)."""
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for row in rows:
            tokens += row.token_ids()
            positions += range(row.start, row.start + row.num_tokens)
            starts.append(len(tokens))
        return torch.tensor(tokens).to(self.device), torch.tensor(positions).to(self.device), starts

    def _prompt_logprobs(self, row: ScheduledRow, hidden: torch.Tensor) -> None:
        """Position p predicts token p + 1. Entry 0 is None: nothing predicts the first token."""
        request, done = row.request, row.request.prompt_logprobs
        if not done:
            done.append(None)
        # After a preemption the chunk may start before what is already known.
        first = max(row.start, len(done) - 1)
        stop = min(row.start + row.num_tokens, len(request.prompt_ids) - 1)
        top = request.params.prompt_logprobs or 0
        for at in range(first, stop, _LOGIT_ROWS):
            end = min(at + _LOGIT_ROWS, stop)
            logits = self.model.logits(hidden[at - row.start : end - row.start])
            logits[:, self.sampler.num_tokens :] = -torch.inf
            done += token_logprobs(logits, request.prompt_ids[at + 1 : end + 1], top)
