"""The step loop: requests in, token events out, on one thread of its own.

Owns: the inbox, the life of every live request, containment of failures, drain and shutdown.
Must not know: asyncio, sockets, files, or how tokens are computed.

    submit ──> inbox ──> scheduler.plan ──> runner.execute ──> commit ──> events ──> deliver
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nano_oasis.config import EngineInfo, ModelConfig
from nano_oasis.door import check_mode, longest
from nano_oasis.metrics import Metrics
from nano_oasis.request import (
    EngineDead,
    Request,
    SampledToken,
    SamplingParams,
    ScheduledRow,
    Status,
    Submission,
    TokenEvent,
)
from nano_oasis.runner import Drawn, Runner
from nano_oasis.scheduler.scheduler import Scheduler
from nano_oasis.text import TextStream, make_event, take_token
from nano_oasis.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Sink = Callable[[TokenEvent], None]
Deliver = Callable[[list[tuple[Sink, TokenEvent]]], None]


def call_sinks(events: list[tuple[Sink, TokenEvent]]) -> None:
    """Deliver on this thread. A sink that raises costs only its own event."""
    for sink, event in events:
        try:
            sink(event)
        except Exception:
            log.exception("a caller's sink failed")


class Engine:
    """Runs requests until stopped. All public methods may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        info: EngineInfo,
        metrics: Metrics,
        seed: int | None = None,
        stall_timeout: float = 120.0,
        deliver: Deliver = call_sinks,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.info = info
        self.metrics = metrics
        self.deliver = deliver
        self._on_stop = on_stop  # after the last step: closes what the step thread used
        self.end_ids = frozenset(model_config.eos_token_ids) | tokenizer.eos_ids
        self._seeds: random.Random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._stall_timeout = stall_timeout
        self._live: dict[int, Request] = {}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Condition()
        self._events: list[tuple[Sink, TokenEvent]] = []
        self._state = "ok"  # ok -> draining -> stopped, or dead
        self._drawn = 0  # tokens given out in this step
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="nano-oasis-step", daemon=True)

    # --- callers' side ------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, sink: Sink) -> Submission:
        """Queue a prompt; `sink` gets its events. Raises RequestError if it can never run, EngineDead."""
        max_len = self.check(prompt_ids, params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        ends = frozenset() if params.ignore_eos else self.end_ids
        requests = []
        for index in range(params.n):
            request = Request(list(prompt_ids), params, max_len, seed, ends, index, sink=sink)
            request.text = TextStream(
                self.tokenizer, prompt_ids, params.stop or (), params.skip_special_tokens
            )
            requests.append(request)
            check_mode(request, self.scheduler.gate)
        # The other choices wait for the first one's prefill and then find it in the prefix cache.
        requests[0].siblings = requests[1:]
        with self._wake:
            if self._state != "ok":
                raise EngineDead(f"the engine is {self._state} and takes no requests")
            for request in requests:
                self._live[request.id] = request
            self._inbox.append(("add", requests[0]))
            self._wake.notify()
        for _ in requests:
            self.metrics.request_received()
        return Submission(requests)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """The most tokens prompt plus output may reach. Raises RequestError if the prompt can never run."""
        return longest(prompt_ids, params, self.info.max_model_len, self.model_config.vocab_size)

    def abort(self, submission: Submission) -> None:
        """End it soon with finish_reason "abort". Does nothing to choices that have finished."""
        with self._wake:
            self._inbox.append(("abort", submission))
            self._wake.notify()

    def health(self) -> str:
        """ok, stuck (work pending but no step finished within stall_timeout), draining, stopped, dead."""
        if self._state == "ok" and self._live and time.monotonic() - self._progress > self._stall_timeout:
            return "stuck"
        return self._state

    @property
    def num_live(self) -> int:
        return len(self._live)

    def stop(self, timeout: float = 0.0) -> None:
        """Refuse new requests, give running ones `timeout` seconds, abort the rest, end the thread."""
        with self._wake:
            if self._state == "ok":
                self._state = "draining"
            deadline = time.monotonic() + timeout
            while self._live and self._state == "draining" and time.monotonic() < deadline:
                self._wake.wait(min(0.1, max(deadline - time.monotonic(), 0)))
            self._inbox.append(("stop", None))
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    # --- the step thread ----------------------------------------------------------------------
    def _loop(self) -> None:
        try:
            while self._take_inbox():
                self.step()
        except BaseException as error:
            log.exception("the step loop died")
            self._end_all("error", f"the engine died: {error!r}", "dead")
        else:
            self._end_all("abort", None, "stopped")

    def _take_inbox(self) -> bool:
        """Apply what callers asked for; sleep while there is nothing to do. False: stop."""
        with self._wake:
            while not self._inbox and not self.scheduler.has_work:
                self._progress = time.monotonic()
                self._wake.wait(timeout=0.5)
            messages, self._inbox = self._inbox, deque()
        for kind, what in messages:
            if kind == "stop":
                return False
            if kind == "add" and what.status is Status.NEW:
                self.scheduler.add(what)
            elif kind == "abort":
                for request in reversed(what.requests):  # siblings first, so none is released
                    self._finish(request, "abort")
        if messages:
            self._flush()
            self._gauges()
        return True

    def step(self) -> None:
        """One batch: plan, execute, commit, deliver."""
        began = time.monotonic()
        plan = self.scheduler.plan()
        if not plan.rows:
            self._no_progress()
        executing = time.monotonic()
        results = self._execute(plan.rows) if plan.rows else []
        self._learn(plan.rows, results, time.monotonic() - executing)
        before = [len(row.request.output_ids) for row in plan.rows]
        for row, result in zip(plan.rows, results, strict=True):
            try:
                self._commit(row, result)
            except Exception as error:
                log.exception("request %d failed", row.request.id)
                self._finish(row.request, "error", f"request failed: {error!r}")
        # What was given: an accepted draft after a stop string was not.
        given = [
            (result.num_drafts, len(row.request.output_ids) - had - 1)
            for row, result, had in zip(plan.rows, results, before, strict=True)
            if row.is_decode and isinstance(result, Drawn)
        ]
        self.metrics.decodes([pair for pair in given if pair[1] >= 0])
        self._flush()
        self._progress = time.monotonic()
        self._count(plan.rows, len(plan.preempted), self._progress - began)

    def _execute(self, rows: list[ScheduledRow]) -> list[Drawn | Exception | None]:
        """Run a batch. If it fails, run its rows one by one, so that only the guilty ones fail."""
        try:
            return list(self.runner.execute(rows))
        except Exception as error:
            log.exception("a step of %d rows failed", len(rows))
            if len(rows) == 1 and not rows[0].max_drafts:
                return [error]
            # Without guesses: one of them may be what fails.
            return [self._execute([replace(row, max_drafts=0)])[0] for row in rows]

    def _learn(
        self, rows: list[ScheduledRow], results: list[Drawn | Exception | None], seconds: float
    ) -> None:
        """What drafts brought and cost: for the next steps' drafts."""
        pairs = zip(rows, results, strict=True)
        drawn = [d for row, d in pairs if row.is_decode and isinstance(d, Drawn)]
        policy, whole = self.scheduler.drafts, 0 < len(drawn) == len(rows)
        if policy is not None and whole and not self.runner.draft_behind:
            tokens = sum(len(d.tokens) for d in drawn)
            drafts, drafting = sum(d.num_drafts for d in drawn), self.runner.draft_seconds
            policy.record(len(rows), drafts, tokens, seconds, drafting)

    def _commit(self, row: ScheduledRow, result: Drawn | Exception | None) -> None:
        request = row.request
        if isinstance(result, Exception):
            raise result
        if result is not None and request.num_tokens >= request.max_len:
            result = None  # max_tokens = 0: the prompt was all there was to compute
            self.scheduler.commit(row, None)
            self._finish(request, "length")
        elif result is None:
            self.scheduler.commit(row, None)
        else:
            first, *more = result.tokens
            self.scheduler.commit(row, first.token_id)
            self._advance(request, first)
            for drawn in more:  # what follows an accepted draft, unless the request has ended
                if not request.finished:
                    self.scheduler.accept(request, drawn.token_id)
                    self._advance(request, drawn)
            if row.max_drafts and not request.finished:
                self.scheduler.give_back(request)

    def _advance(self, request: Request, drawn: SampledToken) -> None:
        """A new token: its text, its event, and whether it is the last."""
        now = time.monotonic()
        self._drawn += 1
        if request.first_token_time is None:
            request.first_token_time = now
            self.metrics.first_token(now - request.arrival)
        elif request.last_token_time is not None:
            self.metrics.inter_token(now - request.last_token_time)
        request.last_token_time = now
        text, reason = take_token(request, drawn.token_id)
        self._release_siblings(request)
        if reason:
            self._finish(request, reason, text=text, drawn=drawn)
        else:
            self._emit(request, text, drawn)

    def _release_siblings(self, request: Request) -> None:
        for sibling in request.siblings:
            if sibling.status is Status.NEW:
                self.scheduler.add(sibling)
        request.siblings = []

    def _finish(
        self,
        request: Request,
        reason: str,
        error: str | None = None,
        text: str = "",
        drawn: SampledToken | None = None,
    ) -> None:
        if request.finished:
            return
        self.scheduler.finish(request, reason)
        request.error = error
        self._release_siblings(request)
        try:
            text += request.text.finish()
        except Exception:
            log.exception("request %d: the end of its text is lost", request.id)
        self._emit(request, text, drawn)
        request.sink = request.text = None
        self.runner.forget(request)
        with self._wake:
            self._live.pop(request.id, None)
            self._wake.notify_all()
        self._count_finished(request)

    def _emit(self, request: Request, text: str, drawn: SampledToken | None) -> None:
        self._events.append((request.sink, make_event(request, text, drawn)))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self.deliver(events)

    def _no_progress(self) -> None:
        """Nothing could be scheduled. With work pending this must not become a silent hang."""
        if not self.scheduler.running and self.scheduler.num_waiting:
            stuck = self.scheduler.waiting_requests()[0]
            self._finish(stuck, "error", "the request cannot be scheduled: it does not fit the KV pool")

    def _end_all(self, reason: str, error: str | None, state: str) -> None:
        """No more steps will run: everyone who waits is told."""
        with self._wake:
            self._state = state
            waiting = list(self._live.values())
            self._live.clear()
            self._wake.notify_all()
        for request in waiting:
            if not request.finished:
                request.status, request.finish_reason, request.error = Status.FINISHED, reason, error
                self._emit(request, "", None)
                self._count_finished(request)
        self._flush()
        self.metrics.step(0, 0, 0, self.info.num_blocks, 0, 0, 0.0)
        self._on_stop()

    def _count(self, rows: list[ScheduledRow], preempted: int, seconds: float) -> None:
        prompt = sum(min(r.num_tokens, max(len(r.request.prompt_ids) - r.start, 0)) for r in rows)
        drawn, self._drawn = self._drawn, 0
        self._gauges(prompt, drawn, seconds)
        self.metrics.preempted(preempted)
        self.metrics.prefix_cache(*self.scheduler.take_hit_counts())

    def _gauges(self, prompt_tokens: int = 0, drawn: int = 0, seconds: float = 0.0) -> None:
        s = self.scheduler
        used, total = s.blocks.num_used, s.blocks.num_blocks
        self.metrics.step(len(s.running), s.num_waiting, used, total, prompt_tokens, drawn, seconds)
        report = self.runner.kv.report()
        if report is not None:
            self.metrics.tiers(*report)

    def _count_finished(self, request: Request) -> None:
        age = time.monotonic() - request.arrival
        reason = request.finish_reason or "error"
        self.metrics.request_finished(reason, len(request.prompt_ids), len(request.output_ids), age)
