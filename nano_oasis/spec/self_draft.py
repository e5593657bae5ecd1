"""Drafts of the target itself, with some of its layers left out, on the KV that is already there.

Owns: the pass through the chosen layers, one token at a time. Must not know: how the layers were chosen
(calibrate.py), verification, what drafts pay.

As in self-speculative decoding (Draft & Verify, arXiv 2309.08168): no extra weights, no cache of its own. The
layers that run read the target's own keys and values of all earlier positions, and write theirs at the
drafted positions; verification writes over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_oasis.model import Model
from nano_oasis.request import ScheduledRow
from nano_oasis.spec.chain import Chains


class SelfDraft:
    name = "self"

    def __init__(self, model: Model, layers: Sequence[int], num_tokens: int) -> None:
        """layers: in order. num_tokens: ids the tokenizer knows; padded ids are never drafted."""
        self.model, self.layers, self.num_tokens = model, list(layers), num_tokens
        self._chains = Chains()

    def propose(self, rows: Sequence[ScheduledRow], kv: Any) -> list[list[int]]:
        def step(going: list[int], tokens: Tensor, done: int) -> tuple[Tensor, Tensor]:
            at = [ScheduledRow(rows[i].request, rows[i].start + done, 1, samples=True) for i in going]
            device = self.model.device
            positions = torch.tensor([row.start for row in at], device=device)
            hidden = self.model.forward(tokens.to(device), positions, kv.peek(at), self.layers)  # [n, H]
            return best_of(self.model.logits(hidden)[:, : self.num_tokens])

        return self._chains.draft(rows, step)

    def observe(self, rows: Sequence[ScheduledRow], right: Sequence[int], hidden: Tensor) -> None:
        self._chains.observe(rows, right)

    def forget(self, request_id: int) -> None:
        """Nothing is kept of a request."""


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, V] fp32 -> the likeliest token of each [n] int64 and its probability [n]."""
    best, tokens = logits.max(dim=1)
    return tokens, (best - logits.logsumexp(dim=1)).exp()


def parse_layers(text: str, num_layers: int) -> list[int]:
    """'0-5,28' -> [0, 1, 2, 3, 4, 5, 28]. Raises ValueError naming what is wrong."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a layer nor a range of them such as '0-5'")
        found += range(int(first), min(int(last if dash else first), num_layers) + 1)
    if not found or found != sorted(set(found)) or found[-1] >= num_layers:
        raise ValueError(f"layers must rise from 0 to at most {num_layers - 1}, without repetition")
    return found


def format_layers(layers: Sequence[int]) -> str:
    """The inverse of parse_layers."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
