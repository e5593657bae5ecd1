"""One step on the device: a plan in, tokens out.

Owns: turning rows into flat tensors and hidden states into samples.
Must not know: why these rows were chosen, what becomes of the tokens, text, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from nano_oasis.memory.dense_kv import KVStore, KVView
from nano_oasis.request import SampledToken, ScheduledRow
from nano_oasis.sampler import Sampler, token_logprobs

_LOGIT_ROWS = 64  # prompt log-probabilities are made this many positions at a time: V is large


class Decoder(Protocol):
    """What the runner needs of a model; tests put a fake here."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, kv: KVView) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class KVFailure(RuntimeError):
    """A request's KV could not be brought to where it was needed."""


class Runner:
    """Executes step plans against one model and one KV store."""

    def __init__(self, model: Decoder, kv: KVStore, sampler: Sampler, device: str = "cpu") -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.device = device

    @torch.inference_mode()
    def execute(self, rows: Sequence[ScheduledRow]) -> list[SampledToken | KVFailure | None]:
        """Compute every row; one entry per row, None where the row does not sample.

        Prompt log-probabilities, if asked for, are appended to their requests on the way.
        """
        token_ids, positions, starts = self._flatten(rows)
        hidden = self.model.forward(token_ids, positions, self.kv.begin(rows))  # [T, H]
        failures = self.kv.end(rows)
        for i, row in enumerate(rows):
            if row.request.params.prompt_logprobs is not None:
                self._prompt_logprobs(row, hidden[starts[i] : starts[i + 1]])
        sampling = [i for i, row in enumerate(rows) if row.samples]
        last = torch.tensor([starts[i + 1] - 1 for i in sampling], dtype=torch.int64, device=self.device)
        results: list[SampledToken | KVFailure | None] = [None] * len(rows)
        if sampling:
            logits = self.model.logits(hidden[last])
            for i, token in zip(
                sampling, self.sampler(logits, [rows[i].request for i in sampling]), strict=True
            ):
                results[i] = token
        for i, row in enumerate(rows):
            if row.request.id in failures:
                results[i] = KVFailure(failures[row.request.id])
        return results

    def _flatten(self, rows: Sequence[ScheduledRow]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """token_ids [T], positions [T] (int64), and where each row starts in them (one more entry: T)."""
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for row in rows:
            end = row.start + row.num_tokens
            tokens += row.request.tokens(row.start, end)
            positions += range(row.start, end)
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
