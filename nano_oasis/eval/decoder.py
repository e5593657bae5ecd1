"""The model without a scheduler: load it, and decode requests step by step over any KV store.

Owns: loading, the decode loop (what the engine's runner and scheduler do for running requests).
Must not know: what is in the store, tasks, settings, scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nano_oasis.config import ModelConfig
from nano_oasis.kernels.dispatch import Kernels, select_kernels
from nano_oasis.memory.dense_kv import KVStore
from nano_oasis.model import Model
from nano_oasis.request import Request, ScheduledRow
from nano_oasis.tokenizer import Tokenizer
from nano_oasis.weights import load_checkpoint

See = Callable[[int, list[int], Tensor], None]  # (step, indices of the requests in it, logits [n, V])


def draft_next(tokens: Sequence[int]) -> int:
    """A guess at what follows: what followed the longest earlier match of the last 3, 2 or 1 tokens, the
    newest match first; without one, the last token again. Prompt lookup (Saxena, 2023)."""
    for n in (3, 2, 1):
        tail = list(tokens[-n:])
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at] == tail[0] and list(tokens[at : at + n]) == tail:
                return tokens[at + n]
    return tokens[-1]


@dataclass
class Decoder:
    """One loaded model. max_len: the longest prompt plus answer."""

    config: ModelConfig
    model: Model
    tokenizer: Tokenizer
    dtype: torch.dtype
    kernels: Kernels = field(init=False)

    def __post_init__(self) -> None:
        self.kernels = select_kernels("cpu", self.dtype)
        self.num_tokens = min(self.tokenizer.vocab_size, self.config.vocab_size)  # ids that mean something

    @classmethod
    def load(
        cls, path: Path, tokenizer: Tokenizer, max_len: int, dtype: torch.dtype = torch.float32,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:  # fmt: skip
        """Raises weights.CheckpointError."""
        checkpoint = load_checkpoint(path, dtype, "cpu", progress)
        return cls(
            checkpoint.config, Model(checkpoint.config, checkpoint.tensors, max_len, dtype), tokenizer, dtype
        )

    @torch.inference_mode()
    def play(
        self, store: KVStore, requests: list[Request], lengths: Sequence[int], see: See | None = None,
        teacher: Sequence[Sequence[int]] | None = None, drafts: bool = False,
    ) -> tuple[list[list[int]], dict[int, str]]:  # fmt: skip
        """Decode every request for lengths[i] tokens, all requests in each step, as the engine's runner does.

        Each request has exactly one token whose KV is not computed. teacher: what follows, instead of the
        likeliest token; without it a request also ends with an end token, which is part of its output.
        drafts: a guess of the next token runs beside each, for the store to look ahead by, and is dropped.
        Returns the outputs, and what went wrong by index.
        """
        outputs: list[list[int]] = [[] for _ in requests]
        errors: dict[int, str] = {}
        going = [i for i in range(len(requests)) if lengths[i] > 0]
        for step in range(max(lengths, default=0)):
            if not going:
                break
            rows = [ScheduledRow(requests[i], requests[i].num_computed, 1, samples=True) for i in going]
            asked = [self._with_guess(r) if drafts else r for r in rows]
            tokens = torch.tensor([t for r in asked for t in r.token_ids()])
            positions = torch.cat([torch.arange(r.start, r.start + r.num_tokens) for r in asked])
            hidden = self.model.forward(tokens, positions, store.begin(asked))
            failures = store.end(rows)
            first = positions.new_tensor([0, *[r.num_tokens for r in asked[:-1]]]).cumsum(0)
            logits = self.model.logits(hidden[first])[:, : self.num_tokens]
            if see is not None:
                see(step, going, logits)
            best = logits.argmax(-1).tolist()
            left = []
            for at, i in enumerate(going):
                request = requests[i]
                request.num_computed += 1
                if request.id in failures:
                    errors[i] = failures[request.id]
                    continue
                token = best[at] if teacher is None else teacher[i][step]
                outputs[i].append(token)
                request.output_ids.append(token)
                if step + 1 < lengths[i] and (teacher is not None or token not in self.tokenizer.eos_ids):
                    left.append(i)
            going = left
        return outputs, errors

    @staticmethod
    def _with_guess(row: ScheduledRow) -> ScheduledRow:
        request = row.request
        if row.start + 2 > request.max_len:
            return row
        return row.with_drafts([draft_next(request.prompt_ids + request.output_ids)])
