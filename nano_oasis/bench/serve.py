"""`bench serve`: a load on any OpenAI-compatible server, and the latencies it gives.

Owns: the command's options, passes, what is computed from the times of the chunks.
Must not know: which server it is, how a request is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano_oasis.bench.idle import Others
from nano_oasis.bench.load import LoadError, Sent, Target, first_model, random_prompts, send_all
from nano_oasis.bench.report import percentile, save, show
from nano_oasis.cli import WorkProgress

METRICS = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token after the first, ms",
    "itl": "inter-token latency, ms",
    "e2el": "end-to-end latency, ms",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="without /v1 (default: %(default)s)")
    add("--model", help="default: the first of GET /v1/models")
    add("--backend", default="openai", choices=("openai", "openai-chat"),
        help="completions or chat completions (default: %(default)s)")  # fmt: skip
    add("--num-prompts", type=int, default=100, help="default: %(default)s")
    add("--request-rate", type=float, default=math.inf, help="requests per second; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; less: in bursts; more: evenly")
    add("--max-concurrency", type=int, help="requests under way at once; default: no limit")
    add("--random-input-len", type=int, default=1024, help="words of a prompt, about tokens (default: 1024)")
    add("--random-output-len", type=int, default=128, help="max_tokens of a request (default: 128)")
    add("--random-prefix-len", type=int, default=0, help="words that all prompts begin with (default: 0)")
    add(
        "--random-range-ratio", type=float, default=0.0, help="0 to 1: prompts differ in length by this share"
    )
    add("--passes", type=int, default=1,
        help="send the very same prompts again: with prefix caching that is nearly all decode")  # fmt: skip
    add("--num-warmups", type=int, default=1, help="short requests before the first pass (default: 1)")
    add("--respect-eos", action="store_true", help="an answer may end before max_tokens")
    add("--metric-percentiles", default="50,90,99", help="default: %(default)s")
    add("--extra-body", default="{}", help="more fields of every request, as JSON")
    add("--server-pid", type=int, help="on this machine: its CPU time is not counted as that of others")
    add("--wait-idle", type=float, default=0, metavar="SECONDS",
        help="before each pass wait so long for a machine that is otherwise idle")  # fmt: skip
    add("--timeout", type=float, default=3600, metavar="SECONDS", help="of one request")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 when a request failed. Raises LoadError for what cannot be run."""
    shares = _check(args)
    key = os.environ.get("OPENAI_API_KEY", "")
    model = args.model or asyncio.run(first_model(args.base_url, key))
    chat = args.backend == "openai-chat"
    url = args.base_url.rstrip("/") + ("/v1/chat/completions" if chat else "/v1/completions")
    target = Target(
        url, model, chat, key, not args.respect_eos, args.timeout, extra=json.loads(args.extra_body)
    )
    prompts = random_prompts(
        args.num_prompts, args.random_input_len, args.random_prefix_len, args.random_range_ratio, args.seed
    )
    if args.num_warmups:
        warm = random_prompts(args.num_warmups, 16, 0, 0.0, args.seed + 1)
        _refuse_broken(asyncio.run(send_all(target, warm, 4)))
    others, passes = Others(args.server_pid), []
    for number in range(1, args.passes + 1):
        idle = others.wait(args.wait_idle) if args.wait_idle else None
        others.reset()
        with WorkProgress("{done} of {total} requests") as bar:
            sent = asyncio.run(
                send_all(
                    target, prompts, args.random_output_len, rate=args.request_rate,
                    burstiness=args.burstiness, at_once=args.max_concurrency, seed=args.seed,
                    progress=lambda done, n=number: bar(f"pass {n}", done, len(prompts)),  # type: ignore[misc]
                )
            )  # fmt: skip
        figures = summarise(sent, shares)
        figures |= {"pass": number, "other_cores": others.cores(), "was_idle": idle}
        passes.append(figures)
    _show(model, passes, shares)
    if args.output:
        options = vars(args) | {"model": model}
        save(args.output, "serve", {k: str(v) if v == math.inf else v for k, v in options.items()}, passes)
    return 1 if any(p["failed"] for p in passes) else 0


def _check(args: argparse.Namespace) -> list[float]:
    for name, low in (
        ("num_prompts", 1), ("random_input_len", 1), ("random_output_len", 1), ("random_prefix_len", 0),
        ("passes", 1), ("num_warmups", 0), ("max_concurrency", 1),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < low:
            raise LoadError(f"--{name.replace('_', '-')}: at least {low}, got {value}")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(args, name) > 0:
            raise LoadError(f"--{name.replace('_', '-')}: above 0, got {getattr(args, name)}")
    if not 0 <= args.random_range_ratio <= 1:
        raise LoadError(f"--random-range-ratio: 0 to 1, got {args.random_range_ratio}")
    if not args.base_url.startswith(("http://", "https://")):
        raise LoadError(f"--base-url: begins with http:// or https://, got {args.base_url!r}")
    try:
        if not isinstance(json.loads(args.extra_body), dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise LoadError(f"--extra-body: expected a JSON object: {error}") from None
    try:
        shares = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= p <= 100 for p in shares):
        raise LoadError(f"--metric-percentiles: numbers from 0 to 100, got {args.metric_percentiles!r}")
    return shares


def _refuse_broken(sent: Sequence[Sent]) -> None:
    """A server that cannot answer a short request is not worth a benchmark."""
    for one in sent:
        if one.error:
            raise LoadError(f"the warm-up request failed: {one.error}")


def summarise(sent: Sequence[Sent], shares: Sequence[float]) -> dict[str, Any]:
    """Figures of one pass over the requests that succeeded; times in ms. NaN is null in the file."""
    good = [s for s in sent if s.error is None]
    figures: dict[str, Any] = {
        "requests": len(sent), "failed": len(sent) - len(good),
        "errors": sorted({s.error for s in sent if s.error is not None})[:5],
    }  # fmt: skip
    if not good:
        return figures
    seconds = max(s.ended for s in good) - min(s.began for s in sent)
    prompt, output = sum(s.prompt_tokens for s in good), sum(s.output_tokens for s in good)
    figures |= {
        "seconds": seconds, "prompt_tokens": prompt, "output_tokens": output,
        "requests_per_s": len(good) / seconds, "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds, "decode_tokens_per_s": together(good),
    }  # fmt: skip
    for name, values in (
        ("ttft", [s.ttft for s in good]),
        ("tpot", [s.tpot for s in good if not math.isnan(s.tpot)]),
        ("itl", [gap for s in good for gap in s.gaps]),
        ("e2el", [s.ended - s.began for s in good]),
    ):
        if values:
            figures[name] = {"mean": 1000 * sum(values) / len(values)} | {
                f"p{share:g}": 1000 * percentile(values, share) for share in shares
            }
    return figures


def together(sent: Sequence[Sent]) -> float | None:
    """Output tokens per second, of all streams, while every one of them decodes; None if they never do."""
    low, high = max(s.chunks[0] for s in sent), min(s.chunks[-1] for s in sent)
    if high <= low:
        return None
    tokens = sum(sum(low < t <= high for t in s.chunks) * s.output_tokens / len(s.chunks) for s in sent)
    return tokens / (high - low)


def _show(model: str, passes: Sequence[dict[str, Any]], shares: Sequence[float]) -> None:
    rows: list[list[object]] = []

    def line(name: str, get: Any) -> None:
        values = [get(p) for p in passes]
        if any(v is not None for v in values):
            rows.append([name, *("-" if v is None else v for v in values)])

    for name, title in (
        ("failed", "failed requests"), ("seconds", "duration, s"), ("prompt_tokens", "prompt tokens"),
        ("output_tokens", "output tokens"), ("requests_per_s", "requests/s"),
        ("output_tokens_per_s", "output tokens/s"), ("total_tokens_per_s", "prompt and output tokens/s"),
        ("decode_tokens_per_s", "decode tokens/s, all streams decoding"),
    ):  # fmt: skip
        line(title, lambda p, n=name: p.get(n))
    for name, title in METRICS.items():
        for which in ("mean", *(f"p{share:g}" for share in shares)):
            line(f"{title}: {which}", lambda p, n=name, w=which: p.get(n, {}).get(w))
    line("CPU cores used by others meanwhile", lambda p: p.get("other_cores"))
    show(f"{model}, {passes[0]['requests']} requests", ["", *(f"pass {p['pass']}" for p in passes)], rows)
    for error in {e for p in passes for e in p["errors"]}:
        print(f"failed: {error}")
