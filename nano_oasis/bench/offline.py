"""The engine without a server, each of its steps timed from outside.

Owns: prompts of token ids, the log of steps, the floor of a step. Must not know: how a step works, tables.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nano_oasis import LLM, SamplingParams
from nano_oasis.bench.roofline import Ceilings
from nano_oasis.config import ConfigError, EngineConfig
from nano_oasis.request import ScheduledRow
from nano_oasis.runner import Drawn


@dataclass(frozen=True)
class Step:
    """One step of the engine. contexts: tokens of each row's request, this step's included."""

    seconds: float
    prefill_tokens: int
    drawn: int  # output tokens that it gave
    contexts: tuple[int, ...]
    pairs: int  # query and key pairs of its prefill chunks, under the causal mask

    @property
    def is_decode(self) -> bool:
        return self.prefill_tokens == 0


class StepLog:
    """Wraps an engine's step and its runner's execute; `steps` grows while the engine runs."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[Step] = []
        self._rows: Sequence[ScheduledRow] = ()
        self._drawn = 0
        engine: Any = llm.engine
        step, execute = engine.step, engine.runner.execute

        def spy(rows: Sequence[ScheduledRow]) -> list[Any]:
            self._rows, results = rows, execute(rows)
            self._drawn = sum(len(r.tokens) for r in results if isinstance(r, Drawn))
            return list(results)

        def timed() -> None:
            self._rows, self._drawn = (), 0
            start = time.perf_counter()
            step()
            self._add(time.perf_counter() - start)

        engine.runner.execute, engine.step = spy, timed

    def _add(self, seconds: float) -> None:
        chunks = [r for r in self._rows if r.start < len(r.request.prompt_ids)]
        ends = tuple(r.start + r.num_tokens for r in self._rows)
        pairs = sum(r.num_tokens * r.start + r.num_tokens * (r.num_tokens + 1) // 2 for r in chunks)
        self.steps.append(Step(seconds, sum(r.num_tokens for r in chunks), self._drawn, ends, pairs))


def at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError that names the option."""
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: at least 1, got {getattr(args, name)}")


def open_llm(config: EngineConfig) -> LLM:
    return LLM(**{k: v for k, v in vars(config).items() if v is not None})


def token_prompts(llm: LLM, count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Random ids, none of them special; no two prompts begin alike but by chance."""
    draw = random.Random(str(seed))  # as text: of an integer the sign is ignored
    limit = min(llm.tokenizer.vocab_size, llm.engine.model_config.vocab_size)
    low = min(300, limit // 2)  # special tokens come first or last
    return [
        {"prompt_token_ids": [draw.randrange(low, limit - limit // 10) for _ in range(length)]}
        for _ in range(count)
    ]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class Floor:
    """The least time of a step: weights once, what attention reads once; or the products."""

    def __init__(self, llm: LLM) -> None:
        model: Any = llm.engine.runner.model
        self._config = llm.engine.model_config
        self._kv: Any = llm.engine.runner.kv
        self._item = model.dtype.itemsize  # of KV too
        self._products, self._head_products = model.num_weights, model.lm_head.numel()
        self._weights = model.weight_bytes
        self._options = llm.config
        self._windows = [self._config.window(i) for i in range(self._config.num_layers)]

    def decode(self, ceilings: Ceilings, contexts: Sequence[int]) -> float:
        """One token of each row."""
        read = self._weights + sum(map(self._row_bytes, contexts))
        flops = 2.0 * self._products * len(contexts)
        return ceilings.floor(read, flops)

    def prefill(self, ceilings: Ceilings, tokens: int, pairs: int) -> float:
        """Chunks of so many tokens: products are what limits. Windows, which save some, are not counted."""
        c = self._config
        flops = 2.0 * (self._products - self._head_products) * tokens
        return ceilings.floor(self._weights, flops + 4.0 * pairs * c.num_heads * c.head_dim * c.num_layers)

    def _row_bytes(self, context: int) -> float:
        """What attention must read for one query: the context, or the working set and the sketches."""
        c, o = self._config, self._options
        token = c.kv_bytes_per_token(self._item) / c.num_layers
        total = 0.0
        for window in self._windows:
            seen = min(context, window) if window else context
            if window is None and o.kv_mode == "oasis" and context > o.kv_budget:
                seen, size = o.kv_budget, int(o.block_size or 1)
                sketch = self._kv.sketches.selector.bytes_per_block(size, c.num_kv_heads, c.head_dim)
                total += context / size * sketch
            total += seen * token
        return total
