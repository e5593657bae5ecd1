"""Drafts that are always right, always wrong, random, or broken.

Owns: test hooks for speculation. Must not know: how drafts are verified.
"""

import random

import torch
from oasis_engines import GREEDY, LIMIT, B

from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.request import Request, ScheduledRow
from nano_oasis.spec.model_draft import ModelDraft


class FakeDraft:
    """Counts what it is asked and told."""

    name = "fake"

    def __init__(self) -> None:
        self.proposed = self.right = 0
        self.forgotten: list[int] = []

    def propose(self, rows, kv):
        found = [self.guess(row.request, row.max_drafts) for row in rows]
        self.proposed += sum(map(len, found))
        return found

    def observe(self, rows, right, hidden):
        assert len(rows) == len(right) == len(hidden)
        self.right += sum(right)

    def forget(self, request_id):
        self.forgotten.append(request_id)


class KnownDraft(FakeDraft):
    """Says what each request will say, or that plus one (wrong), or either at random.

    expected: (prompt, index, parameters) -> the whole output, as decoding without drafts gives it.
    """

    def __init__(self, expected, vocab: int, chance: float, seed: int = 0) -> None:
        super().__init__()
        self.expected, self.vocab, self.chance = expected, vocab, chance
        self.rng = random.Random(seed)

    def guess(self, request, count):
        truth = self.expected[tuple(request.prompt_ids), request.index, request.params]
        ahead = truth[len(request.output_ids) : len(request.output_ids) + count]
        ahead = ahead + [0] * (count - len(ahead))  # beyond its end: cut by whoever verifies
        return [t if self.rng.random() < self.chance else (t + 1) % self.vocab for t in ahead]


class RandomDraft(FakeDraft):
    def __init__(self, vocab: int, seed: int = 0) -> None:
        super().__init__()
        self.vocab, self.rng = vocab, random.Random(seed)

    def guess(self, request, count):
        return [self.rng.randrange(self.vocab) for _ in range(self.rng.randrange(count + 1))]


class BrokenDraft(FakeDraft):
    def propose(self, rows, kv):
        raise RuntimeError("injected draft failure")


def row_of(request, count, price=0.0):
    """The row of a request's newest token, which may have so many drafts."""
    return ScheduledRow(request, request.num_tokens - 1, 1, True, max_drafts=count, price=price)


def request_of(tokens, prompt=None):
    """A request with these tokens, of which the first `prompt` (all) are its prompt."""
    prompt = len(tokens) if prompt is None else prompt
    return Request(list(tokens[:prompt]), GREEDY, 10_000, 0, output_ids=list(tokens[prompt:]))


def model_draft(model, blocks=120):
    """The same model as its own draft, on a KV cache of its own: nearly always right."""
    cache = KVCache.allocate(model.config, blocks, B, torch.float32, "cpu")
    return ModelDraft(model, DenseKV(cache, select_kernels("cpu")), LIMIT, model.config.vocab_size)
