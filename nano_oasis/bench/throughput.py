"""`bench throughput`: prompts of one length through the engine in this process.

Owns: the command's options, repeats, which steps count as what. Must not know: how a step is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from nano_oasis.bench.offline import (
    Floor,
    Step,
    StepLog,
    at_least_one,
    greedy,
    open_llm,
    token_prompts,
)
from nano_oasis.bench.report import Spread, save, show
from nano_oasis.bench.roofline import measure_ceilings
from nano_oasis.cli import LoadProgress, add_engine_options, engine_config
from nano_oasis.config import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-prompts", type=int, default=8, help="sent at once (default: 8)")
    add("--input-len", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    add("--output-len", type=int, default=128, help="tokens of an answer (default: 128)")
    add("--same-prompts", action="store_true",
        help="repeats send the same prompts: with prefix caching they are nearly all decode")  # fmt: skip
    add("--repeats", type=int, default=5, help="medians are shown (default: 5)")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError, CheckpointError."""
    at_least_one(args, "num_prompts", "input_len", "output_len", "repeats")
    config = engine_config(args)
    if config.max_model_len is not None and args.input_len + args.output_len > config.max_model_len:
        raise ConfigError(
            f"--input-len and --output-len: {args.input_len + args.output_len} tokens are more than"
            f" max_model_len ({config.max_model_len})"
        )
    seed = config.seed or 0
    with LoadProgress(), open_llm(config) as llm:
        ceilings, floor, log = measure_ceilings(), Floor(llm), StepLog(llm)
        print(ceilings)
        llm.generate(token_prompts(llm, args.num_prompts, 16, seed - 1), greedy(2), use_tqdm=False)
        passes: list[dict[str, float]] = []
        for i in range(args.repeats):
            given = seed if args.same_prompts else seed + i
            prompts = token_prompts(llm, args.num_prompts, args.input_len, given)
            log.steps.clear()
            start = time.perf_counter()
            llm.generate(prompts, greedy(args.output_len), use_tqdm=False)
            passes.append(figures(log.steps, time.perf_counter() - start, args.num_prompts * args.output_len))
            decode = [s for s in log.steps if s.is_decode and s.contexts]
            chunks = [s for s in log.steps if not s.is_decode]
            passes[-1] |= {
                "decode_floor_ms": 1000 * _mean([floor.decode(ceilings, s.contexts) for s in decode]),
                "prefill_floor_s": sum(floor.prefill(ceilings, s.prefill_tokens, s.pairs) for s in chunks),
            }
        kv_stats = getattr(llm.engine.runner.kv, "stats", None)
    _show(args, passes, kv_stats)
    if args.output:
        save(args.output, "throughput", vars(args), {"ceilings": ceilings.figures(), "passes": passes})
    return 0


def figures(steps: list[Step], seconds: float, output: int) -> dict[str, float]:
    """Of one pass. A step with any prefill chunk counts as prefill, whatever else is in it."""
    decode, chunks = [s for s in steps if s.is_decode], [s for s in steps if not s.is_decode]
    spent = sum(s.seconds for s in decode)
    prefill = sum(s.seconds for s in chunks)
    return {
        "seconds": seconds,
        "output_tokens_per_s": output / seconds,
        "decode_tokens_per_s": sum(s.drawn for s in decode) / spent if spent else 0.0,
        "decode_ms": 1000 * _mean([s.seconds for s in decode]),
        "prefill_tokens": float(sum(s.prefill_tokens for s in chunks)),
        "prefill_s": prefill,
        "prefill_tokens_per_s": sum(s.prefill_tokens for s in chunks) / prefill if prefill else 0.0,
    }


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _show(args: argparse.Namespace, passes: list[dict[str, float]], kv_stats: Any) -> None:
    def of(name: str) -> Spread:
        return Spread(tuple(p[name] for p in passes))

    rows: list[list[object]] = [
        ["whole run, s", of("seconds"), ""],
        ["output tokens/s, prefill included", of("output_tokens_per_s"), ""],
        ["decode steps, ms", of("decode_ms"), of("decode_floor_ms")],
        ["decode tokens/s", of("decode_tokens_per_s"), ""],
        ["steps with prefill, s", of("prefill_s"), of("prefill_floor_s")],
        ["prefill tokens/s", of("prefill_tokens_per_s"), ""],
    ]
    if kv_stats is not None:
        looked_up = kv_stats.hits + kv_stats.misses
        rows.append(["hit rate, all passes", f"{kv_stats.hits / max(looked_up, 1):.1%}", ""])
    title = (
        f"{args.num_prompts} prompts of {args.input_len} tokens, {args.output_len} new each, {args.kv_mode}"
    )
    show(title, ("", "median", "floor"), rows)
