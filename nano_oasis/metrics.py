"""Counters, gauges and histograms of one engine, in the Prometheus text format.

Owns: metric names (vLLM's, with the prefix `nano_oasis:`) and how events become numbers.
Must not know: the engine, requests, sockets. A fault in here never reaches the caller.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "nano_oasis:"

_FINISH_REASONS = ("stop", "length", "abort", "error")
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_INTERVAL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_RUN_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 17)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# Oasis mode. Blocks are blocks of one layer.
TIER_TOTALS = {
    "kv_block_hits": "blocks wanted and resident",
    "kv_block_misses": "blocks wanted and not resident",
    "kv_block_fetched_now": "missing blocks the step waited for",
    "kv_block_skipped": "missing blocks left out of attention",
    "kv_block_estimated": "missing blocks whose means stood in for them",
    "kv_prefetch_completed": "blocks that arrived on the device",
    "kv_prefetch_failed": "copies that failed",
    "kv_prefetch_cancelled": "copies cancelled before they began",
    "kv_prefetch_late": "blocks that arrived after the step that wanted them had passed",
    "kv_prefetch_bytes": "bytes brought to the device",
    "kv_exposed_wait_seconds": "time the step stood still for copies",
}
TIER_LEVELS = {
    "kv_device_bytes": "device bytes in use: slots, those in flight, sketches",
    "kv_host_bytes": "host bytes in use by running requests",
    "kv_in_flight_bytes": "bytes of copies under way",
    "kv_mass_recall": "audited share of true attention mass that was read, 0 to 1; 0 before any audit",
    "kv_agreement_lookahead": "share of wanted blocks that the drafts' queries had named, 0 to 1",
    "kv_agreement_previous": "share of wanted blocks that the query before had named, 0 to 1",
    "kv_link_bandwidth_bytes_per_second": "measured, while copies are under way",
}

F = TypeVar("F", bound=Callable[..., None])


def _contained(method: F) -> F:
    """Log a fault of `method` instead of raising it: serving must not depend on counting."""

    @functools.wraps(method)
    def safe(self: Metrics, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            if not self._fault_logged:  # once: a broken counter would otherwise log at every step
                self._fault_logged = True
                log.exception("metrics: %s failed; serving goes on", method.__name__)

    return safe  # type: ignore[return-value]


class Metrics:
    """All metrics of one engine on a registry of their own, so that several engines can share a process.

    Safe to call from any thread. Durations are in seconds. A request with n choices counts as n.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._fault_logged = False
        self._tiers: dict[str, Any] = {}
        self._last_totals: dict[str, float] = {}
        self._model = model_name
        ProcessCollector(registry=self.registry)  # resident memory, CPU time, open files

        self._running = self._gauge("num_requests_running", "requests in the running batch")
        self._waiting = self._gauge("num_requests_waiting", "requests waiting for a place")
        self._usage = self._gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1")
        self._blocks = self._gauge("num_kv_blocks_used", "KV blocks in use")
        self._capacity = self._gauge("num_kv_blocks_total", "KV blocks there are")

        self._received = self._counter("request_received", "requests accepted by the engine")
        self._finished = self._counter(
            "request_success", "requests ended, by reason (abort and error too)", "finished_reason"
        )
        self._prompt = self._counter("prompt_tokens", "prompt tokens computed")
        self._generated = self._counter("generation_tokens", "output tokens computed")
        self._queried = self._counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache")
        self._hit = self._counter("prefix_cache_hits", "prompt tokens found in the prefix cache")
        self._preempted = self._counter("num_preemptions", "requests put back to be recomputed")

        self._drafts = self._counter(
            "spec_decode_num_drafts", "times draft tokens of a request were verified"
        )
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "draft tokens verified")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "draft tokens accepted")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "accepted, by place in the draft", "position"
        )

        self._decode_tokens = self._histogram(
            "request_tokens_per_step", "output tokens that a decoding request got from a step", _RUN_TOKENS
        )

        self._ttft = self._histogram("time_to_first_token_seconds", "arrival to first token", _LATENCY_S)
        self._itl = self._histogram("inter_token_latency_seconds", "between two tokens", _INTERVAL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "arrival to last token", _LATENCY_S)
        self._prompt_size = self._histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self._output_size = self._histogram(
            "request_generation_tokens", "output tokens of a request", _TOKENS
        )
        self._step_size = self._histogram("iteration_tokens", "tokens computed in a step", _STEP_TOKENS)
        self._step_time = self._histogram("step_seconds", "duration of a step", _INTERVAL_S)
        for reason in _FINISH_REASONS:  # so that every series exists from the start, at 0
            self._finished.labels(model_name, reason)

    def _gauge(self, name: str, help: str) -> Any:
        return Gauge(PREFIX + name, help, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, help: str, label: str | None = None) -> Any:
        labels = ["model_name"] + ([label] if label else [])
        counter = Counter(PREFIX + name, help, labels, registry=self.registry)
        return counter if label else counter.labels(self._model)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(PREFIX + name, help, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)

    @_contained
    def request_received(self) -> None:
        self._received.inc()

    @_contained
    def request_finished(self, reason: str, prompt_tokens: int, output_tokens: int, e2e_s: float) -> None:
        """Call exactly once for each request_received, whatever ended the request."""
        self._finished.labels(self._model, reason).inc()
        self._prompt_size.observe(prompt_tokens)
        self._output_size.observe(output_tokens)
        self._e2e.observe(e2e_s)

    @_contained
    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    @_contained
    def inter_token(self, itl_s: float) -> None:
        self._itl.observe(itl_s)

    @_contained
    def step(
        self,
        running: int,
        waiting: int,
        blocks_used: int,
        blocks_total: int,
        prompt_tokens: int,
        generation_tokens: int,
        step_s: float,
    ) -> None:
        """The state after a step and what it computed.

        Call it also when work ends without a step (all requests aborted): gauges show the last call.
        """
        self._running.set(running)
        self._waiting.set(waiting)
        self._blocks.set(blocks_used)
        self._capacity.set(blocks_total)
        self._usage.set(blocks_used / blocks_total if blocks_total else 0.0)
        tokens = prompt_tokens + generation_tokens
        if tokens:  # a mere update of the gauges is no step
            self._prompt.inc(prompt_tokens)
            self._generated.inc(generation_tokens)
            self._step_size.observe(tokens)
            self._step_time.observe(step_s)

    @_contained
    def prefix_cache(self, query_tokens: int, hit_tokens: int) -> None:
        self._queried.inc(query_tokens)
        self._hit.inc(hit_tokens)

    @_contained
    def decodes(self, results: Sequence[tuple[int, int]]) -> None:
        """A step's decoding requests: for each, (draft tokens verified, of these given)."""
        for proposed, right in results:
            self._decode_tokens.observe(right + 1)
            if not proposed:
                continue
            self._drafts.inc()
            self._draft_tokens.inc(proposed)
            self._accepted.inc(right)
            for position in range(right):
                self._accepted_at.labels(self._model, str(position)).inc()

    @_contained
    def preempted(self, count: int) -> None:
        self._preempted.inc(count)

    @_contained
    def tiers(self, totals: dict[str, float], levels: dict[str, float]) -> None:
        """KV tiers (oasis mode). totals: counts since start, which only grow; levels: as of now.

        The names are those of TIER_TOTALS and TIER_LEVELS; they appear once this is first called.
        """
        if not self._tiers:
            self._tiers = {n: self._counter(n, text) for n, text in TIER_TOTALS.items()}
            self._tiers |= {n: self._gauge(n, text) for n, text in TIER_LEVELS.items()}
        for name, value in totals.items():
            self._tiers[name].inc(value - self._last_totals.get(name, 0.0))
        self._last_totals = dict(totals)
        for name, value in levels.items():
            self._tiers[name].set(value)

    def render(self) -> bytes:
        """The text to serve under /metrics, with content type CONTENT_TYPE."""
        return generate_latest(self.registry)
