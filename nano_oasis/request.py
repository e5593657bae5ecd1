"""A request and everything that is said about it: parameters, states, the step plan, token events.

Owns: SamplingParams and their limits, the life of a Request, and the shapes that pass between
scheduler, runner, engine and callers. Must not know: torch, blocks' contents, sockets.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_N = 128
KV_MODES = ("dense", "oasis", "lossless")
MISS_POLICIES = ("wait", "repair", "estimate", "skip")


class RequestError(ValueError):
    """A request refused at the door. `param` names the field; the message gives the limit."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDead(RuntimeError):
    """The engine does not take requests: it has stopped, is stopping, or its loop died."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. Names, defaults and meaning are vLLM's.

    temperature 0 (or under 1e-5) is greedy; top_k 0 or -1 is off; seed makes the result the same
    whatever else is in the batch. Raises RequestError naming the field and its limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None = up to the context limit
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per output token, 0..20; None = off
    prompt_logprobs: int | None = None  # the same for prompt tokens
    skip_special_tokens: bool = True
    kv_mode: str | None = None  # None = the engine's; others than dense, and the rest, need kv_mode=oasis
    kv_budget: int | None = None  # tokens attention reads per layer under pressure
    miss_policy: str | None = None  # wait, repair, estimate or skip

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._integer("top_k", -1, 2**31 - 1)
        self._integer("n", 1, MAX_N)
        self._integer("seed", 0, 2**63 - 1, optional=True)
        self._integer("max_tokens", 0, 2**31 - 1, optional=True)
        self._integer("min_tokens", 0, 2**31 - 1)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("kv_budget", 1, 2**24, optional=True)
        self._choice("kv_mode", KV_MODES)
        self._choice("miss_policy", MISS_POLICIES)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        stop = self._list("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}", "stop")
        for s in stop:
            if not isinstance(s, str) or not s:
                raise RequestError(f"stop must be a non-empty string or a list of them, got {s!r}", "stop")
        ids = self._list("stop_token_ids", self.stop_token_ids)
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31:
                raise RequestError(f"stop_token_ids must be from 0 to 2^31 - 1, got {i!r}", "stop_token_ids")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @staticmethod
    def _list(name: str, value: Any) -> list[Any]:
        if value is not None and not isinstance(value, (list, tuple)):
            raise RequestError(f"{name} must be a list, got {value!r}", name)
        return list(value or ())

    def _choice(self, name: str, allowed: Sequence[str]) -> None:
        v = getattr(self, name)
        if v is not None and v not in allowed:
            raise RequestError(f"{name} must be one of {', '.join(allowed)}; got {v!r}", name)

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        v = getattr(self, name)
        ok = isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
        if not ok or not (low < v if open_low else low <= v) or v > high:
            bound = f"above {low:g}" if open_low else f"at least {low:g}"
            raise RequestError(f"{name} must be a number {bound} and at most {high:g}, got {v!r}", name)

    def _integer(self, name: str, low: int, high: int, optional: bool = False) -> None:
        v = getattr(self, name)
        if v is None and optional:
            return
        if isinstance(v, bool) or not isinstance(v, int) or not low <= v <= high:
            raise RequestError(f"{name} must be an integer between {low} and {high}, got {v!r}", name)


class Status(enum.Enum):
    NEW = "new"  # not handed to the scheduler yet
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model (before temperature and filters), and the likeliest."""

    token_id: int
    logprob: float
    rank: int  # 1 = the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step did for one choice of a request; deltas, never rewritten afterwards.

    `text` is settled text only: it never ends inside a character or inside a possible stop string,
    so it can lag behind `token_ids`. The event with a finish_reason is the last one of its index.
    `prompt_logprobs` (first event of index 0 only) has one entry per prompt token, the first None.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    error: str | None = None
    num_cached_tokens: int = 0
    kv_bytes: tuple[int, int] | None = None  # on the device and in the host tier, with the last event
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


def add_kv_bytes(total: tuple[int, int] | None, more: tuple[int, int]) -> tuple[int, int]:
    """Of several choices: (device, host)."""
    device, host = total or (0, 0)
    return device + more[0], host + more[1]


_next_id = iter(range(1, 2**62)).__next__


@dataclass(eq=False)
class Request:
    """One sequence being generated. Engine-internal; `id` is unique whatever the client calls it.

    Positions count from 0. `num_computed` tokens have their KV in the block table's blocks.
    """

    prompt_ids: list[int]
    params: SamplingParams
    max_len: int  # prompt plus output never exceeds this many tokens
    seed: int  # of this choice; every draw is a function of (seed, position)
    end_ids: frozenset[int] = frozenset()  # model end tokens; empty under ignore_eos
    index: int = 0  # choice index among n
    salt: bytes = b""  # prefixes are shared only under the same salt
    id: int = field(default_factory=lambda: _next_id())
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.NEW
    output_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)  # logical position // block_size -> block id
    num_computed: int = 0
    num_hashed: int = 0  # leading full blocks already published to the prefix index
    num_exact: int | None = None  # leading tokens whose KV owes nothing to sparse attention; None = all
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    kv_bytes: tuple[int, int] | None = None  # device, host: what it held when it last left the device
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    siblings: list[Request] = field(default_factory=list)  # choices 1.. wait for choice 0's prefill
    sink: Any = None  # engine-owned: where this request's events go
    text: Any = None  # engine-owned: its detokeniser and stop matcher
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_decode(self) -> bool:
        """True when only the newest token is still to be computed."""
        return self.num_computed == self.num_tokens - 1 and bool(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop), prompt then output."""
        p = len(self.prompt_ids)
        if stop <= p:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:p] + self.output_ids[max(start - p, 0) : stop - p]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True, eq=False)
class Submission:
    """A submitted prompt: one Request per choice."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Positions [start, start + num_tokens) of `request` are computed this step.

    `samples`: the last known token is among them, so the row yields the next one. `max_drafts`: so many
    draft tokens may follow it, their places are reserved; what is accepted with less chance than `price` does
    not pay. `drafts`: those that do follow; they count in num_tokens.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    max_drafts: int = 0
    price: float = 0.0
    drafts: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """The newest token, with or without drafts: one query each, and no prompt to finish."""
        return self.num_tokens == 1 + len(self.drafts) and self.start >= len(self.request.prompt_ids)

    def with_drafts(self, drafts: Sequence[int]) -> ScheduledRow:
        """This row with draft tokens after its own."""
        count = self.num_tokens - len(self.drafts) + len(drafts)
        return replace(self, num_tokens=count, drafts=tuple(drafts))

    def token_ids(self) -> list[int]:
        """What is computed, drafts last."""
        known = self.start + self.num_tokens - len(self.drafts)
        return self.request.tokens(self.start, known) + list(self.drafts)


@dataclass(slots=True)
class StepPlan:
    """One mixed batch: decode rows first, then prefill chunks."""

    rows: list[ScheduledRow] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.rows)


@dataclass(slots=True)
class SampledToken:
    """What the runner drew for one row, and its log-probability if the request asked."""

    token_id: int
    logprob: TokenLogprob | None = None
