"""`bench step`: where the time of a decode step goes.

Owns: which function belongs to which part, exclusive times. Must not know: what the functions do.

The functions are wrapped from outside. A part's time is that of its functions without the wrapped ones that
they call, so the parts add up to the step; wrapping costs each call about a microsecond, which is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nano_oasis.bench.offline import Floor, StepLog, at_least_one, greedy, open_llm, token_prompts
from nano_oasis.bench.report import save, show
from nano_oasis.bench.roofline import measure_ceilings
from nano_oasis.cli import LoadProgress, add_engine_options, engine_config
from nano_oasis.config import ConfigError

REST = "commit, text, events"
SKIP = 8  # decode steps that fill caches first


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--streams", type=int, default=1, help="requests that decode together (default: 1)")
    add("--input-len", type=int, default=100, help="tokens of a prompt (default: 100)")
    add("--steps", type=int, default=64, help="decode steps that are measured (default: 64)")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    add_engine_options(parser)


class Parts:
    """Exclusive seconds and calls of each part, since clear(). One thread: the engine's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls = 0
        self._inner = [0.0]  # time that wrapped functions took within each open one

    def clear(self) -> None:
        self.seconds.clear()
        self.calls = 0

    def wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                took = time.perf_counter() - start
                own = took - self._inner.pop()
                self._inner[-1] += took
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                self.calls += 1

        return call


def attach(parts: Parts, llm: Any) -> None:
    """Wrap the parts of an engine's step. They stay wrapped for the life of the process."""
    from nano_oasis.layer import Layer
    from nano_oasis.memory.oasis_view import OasisView

    engine = llm.engine
    runner, kv = engine.runner, engine.runner.kv
    parts.wrap(engine.scheduler, "plan", "scheduler")
    parts.wrap(runner, "execute", "rows to tensors, results")
    parts.wrap(runner.model, "forward", "embedding, angles, the last norm")
    parts.wrap(runner.model, "logits", "logits")
    for name in ("before", "after"):
        parts.wrap(Layer, name, "layers without attention")
    runner.sampler = _Sampler(runner.sampler, parts)
    if runner.draft is not None:
        parts.wrap(runner.draft, "propose", "draft")
    for name in ("begin", "end"):
        parts.wrap(kv, name, "KV store: tables, sealing")
    kernels = kv.kernels
    names = {
        "write_kv": "attention: write", "paged_decode": "attention", "paged_prefill": "attention",
        "choose_now": "choice of blocks", "choose_read": "choice of blocks",
    }  # fmt: skip
    kv.kernels = dataclasses.replace(
        kernels, **{n: parts.timed(getattr(kernels, n), part) for n, part in names.items()}
    )
    if hasattr(kv, "sketches"):
        parts.wrap(kv.sketches, "mass", "sketch scores")
        for name in ("bring", "start", "start_and_wait", "land", "flush"):
            parts.wrap(kv.flights, name, "copies and tickets")
        for name in ("attend", "close"):
            parts.wrap(OasisView, name, "selection around the kernels")
    parts.wrap(engine, "step", REST)


class _Sampler:
    def __init__(self, sampler: Any, parts: Parts) -> None:
        self.num_tokens = sampler.num_tokens
        self._call = parts.timed(sampler, "sampler")

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(*args, **named)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError, CheckpointError."""
    at_least_one(args, "streams", "input_len", "steps")
    config = engine_config(args)
    with LoadProgress(), open_llm(config) as llm:
        ceilings, floor, parts = measure_ceilings(), Floor(llm), Parts()
        print(ceilings)
        attach(parts, llm)
        log, per_step = StepLog(llm), []
        step = llm.engine.step

        def split() -> None:
            parts.clear()
            step()
            if log.steps[-1].is_decode and log.steps[-1].contexts:
                per_step.append((log.steps[-1], dict(parts.seconds), parts.calls))

        llm.engine.step = split  # type: ignore[method-assign]
        prompts = token_prompts(llm, args.streams, args.input_len, config.seed or 0)
        # The first stream decodes while the last one's prompt is computed: those steps are not counted.
        apart = args.streams + args.streams * args.input_len // config.max_num_batched_tokens
        llm.generate(prompts, greedy(args.steps + SKIP + apart), use_tqdm=False)
    full = [x for x in per_step if len(x[0].contexts) == args.streams][SKIP:][: args.steps]
    if not full:
        raise ConfigError("no step decoded all streams at once: raise --max-num-seqs or the KV memory")
    full.sort(key=lambda x: x[0].seconds)
    quarter = len(full) // 4
    middle = full[quarter : len(full) - quarter]  # a mean, so that the parts add up, without the outliers
    names = sorted({n for _, seconds, _ in full for n in seconds})
    ms = {n: 1000 * statistics.fmean(seconds.get(n, 0.0) for _, seconds, _ in middle) for n in names}
    whole = 1000 * statistics.fmean(s.seconds for s, _, _ in middle)
    least = 1000 * statistics.fmean(floor.decode(ceilings, s.contexts) for s, _, _ in middle)
    calls = statistics.median(c for _, _, c in middle)
    order = sorted(ms, key=lambda n: -ms[n])
    rows: list[list[object]] = [[n, ms[n], f"{ms[n] / whole:.0%}"] for n in order]
    rows += [["whole step", whole, ""], ["floor of its bytes or products", least, f"{least / whole:.0%}"]]
    what = f"{args.streams} streams after {args.input_len} tokens, {config.kv_mode}"
    show(f"{what}: mean of the middle half of {len(full)} steps", ("", "ms", "of the step"), rows)
    print(f"{calls:.0f} timed calls a step, about {calls / 1000:.1f} ms of it")
    if args.output:
        result = {"ms": ms, "step_ms": whole, "floor_ms": least, "steps": len(full), "calls": calls}
        save(args.output, "step", vars(args), result)
    return 0
