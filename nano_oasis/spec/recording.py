"""The target writes, and its final hidden states are kept: what a draft head is trained on.

Owns: a small decode loop over many prompts, and the shards on disk.
Must not know: prompts' wording, training.

The loop is the engine's own step (mixed rows over a paged cache) without its queues: every state is a
by-product of the pass that wrote the token, so nothing is computed twice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nano_oasis.config import ConfigError
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.sampler import Sampler
from nano_oasis.spec.head import write_atomically
from nano_oasis.spec.prompts import Prompt

BLOCK = 16  # tokens
PREFILL = 512  # prompt tokens beside the decodes of a step
SEATS = 96  # texts written at once


@dataclass
class Recording:
    """One text: tokens [T] int32, of which the first `prompt` were given; hidden [T - 1, H] fp16.

    hidden[t] is the target's final state after tokens[: t + 1], the one that token t + 1 was drawn from.
    """

    number: int
    tokens: Tensor
    hidden: Tensor
    prompt: int
    held: bool


@dataclass(eq=False)
class _Seat:
    prompt: Prompt
    request: Request
    hidden: Tensor  # [T, H] fp16, filled from the front


class Recorder:
    """Runs prompts on one model. num_tokens: ids the tokenizer knows; ends: ids that end a text."""

    def __init__(
        self, model: Model, num_tokens: int, ends: frozenset[int], max_tokens: int, seed: int
    ) -> None:
        self.model, self.ends, self.max_tokens, self.seed = model, ends, max_tokens, seed
        self.sampler = Sampler(num_tokens)
        self.max_prompt = min(1024, model.rope.shape[0] - max_tokens - 1)
        per_seat = -(-(self.max_prompt + max_tokens) // BLOCK)
        self._blocks = [list(range(i * per_seat, (i + 1) * per_seat)) for i in range(SEATS)]
        device, dtype = model.device.type, model.dtype
        cache = KVCache.allocate(model.config, SEATS * per_seat, BLOCK, dtype, device)
        self.kv = DenseKV(cache, select_kernels(device, dtype), device)

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Prompt], progress: Callable[[int], None] = lambda tokens: None
    ) -> list[Recording]:
        """The texts of all prompts, in order. progress(n) is told of n more tokens written."""
        waiting, running, done = deque(prompts), list[_Seat](), list[Recording]()
        free = list(self._blocks)
        while waiting or running:
            rows = [ScheduledRow(s.request, s.request.num_computed, 1, samples=True) for s in running]
            room = PREFILL
            while waiting and free and (room >= len(waiting[0].ids) or room == PREFILL):
                seat = self._sit(waiting.popleft(), free.pop())
                running.append(seat)
                rows.append(ScheduledRow(seat.request, 0, len(seat.request.prompt_ids), samples=True))
                room -= rows[-1].num_tokens
            self._step(rows, running)
            progress(len(running))
            for seat in [s for s in running if self._ended(s.request)]:
                running.remove(seat)
                free.append(seat.request.block_table)
                done.append(self._finish(seat))
        return sorted(done, key=lambda r: r.number)

    def _sit(self, prompt: Prompt, blocks: list[int]) -> _Seat:
        ids = list(prompt.ids[-self.max_prompt :])
        params = SamplingParams(temperature=prompt.temperature, max_tokens=self.max_tokens)
        length = len(ids) + self.max_tokens
        request = Request(ids, params, length, seed=(self.seed << 20) + prompt.number, block_table=blocks)
        return _Seat(prompt, request, torch.empty(length, self.model.config.hidden_size, dtype=torch.float16))

    def _step(self, rows: list[ScheduledRow], seats: list[_Seat]) -> None:
        """rows[i] belongs to seats[i]."""
        device = self.model.device
        ids = [i for row in rows for i in row.request.tokens(row.start, row.start + row.num_tokens)]
        positions = [p for row in rows for p in range(row.start, row.start + row.num_tokens)]
        hidden = self.model.forward(
            torch.tensor(ids, device=device), torch.tensor(positions, device=device), self.kv.begin(rows)
        )  # [T, H]
        self.kv.end(rows)
        parts = hidden.split([row.num_tokens for row in rows])
        logits = self.model.logits(torch.stack([part[-1] for part in parts]))  # [N, V]
        drawn = self.sampler(logits, [row.request for row in rows])
        for row, seat, part, token in zip(rows, seats, parts, drawn, strict=True):
            seat.hidden[row.start : row.start + row.num_tokens] = part
            row.request.num_computed += row.num_tokens
            row.request.output_ids.append(token.token_id)

    def _ended(self, request: Request) -> bool:
        return request.output_ids[-1] in self.ends or len(request.output_ids) >= self.max_tokens

    @staticmethod
    def _finish(seat: _Seat) -> Recording:
        request = seat.request
        hidden = seat.hidden[: request.num_computed].clone()
        if not bool(hidden.isfinite().all()):
            raise ConfigError("model: its final hidden states exceed float16, in which they are recorded")
        tokens = torch.tensor(request.prompt_ids + request.output_ids, dtype=torch.int32)
        return Recording(seat.prompt.number, tokens, hidden, len(request.prompt_ids), seat.prompt.held)


def save_recordings(path: Path, recordings: Sequence[Recording]) -> None:
    """Atomically: a file with the final name is always complete."""
    table = [[r.number, len(r.tokens), r.prompt, int(r.held)] for r in recordings]
    tensors = {
        "tokens": torch.cat([r.tokens for r in recordings]),
        "hidden": torch.cat([r.hidden for r in recordings]),
    }
    write_atomically(path, tensors, {"recordings": json.dumps(table)})


def load_recordings(path: Path) -> list[Recording]:
    """Raises ConfigError for a file that save_recordings did not write."""
    try:
        with safe_open(path, framework="pt") as file:
            table = json.loads(file.metadata()["recordings"])
            tokens, hidden = file.get_tensor("tokens"), file.get_tensor("hidden")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"work: {path}: is damaged ({error}); delete it to have it made again") from error
    lengths = [length for _, length, _, _ in table]
    parts = zip(table, tokens.split(lengths), hidden.split([n - 1 for n in lengths]), strict=True)
    return [Recording(number, t, h, prompt, bool(held)) for (number, _, prompt, held), t, h in parts]
