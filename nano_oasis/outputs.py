"""What callers of the Python API get back, and how token events add up to it.

Owns: RequestOutput and its parts (the shapes and names of vLLM), and their assembly from deltas.
Must not know: the engine, threads, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

from nano_oasis.request import RequestError, TokenEvent, TokenLogprob, add_kv_bytes
from nano_oasis.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability before temperature and filters; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobDict = dict[int, Logprob]  # token id -> Logprob; the drawn (or given) token comes first


@dataclass
class CompletionOutput:
    """One choice. `token_ids` includes the token that ended it; `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's results so far; `finished` when every choice has a finish_reason."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[LogprobDict | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    kv_bytes: tuple[int, int] | None = None  # oasis: device and host bytes held at the end, of all choices


class GenerationError(RuntimeError):
    """A request failed inside the engine; others are not affected."""


class OutputBuilder:
    """Adds a request's TokenEvents up. `snapshot()` copies, so what was handed out never changes."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], n: int, tokenizer: Tokenizer
    ) -> None:
        self._tokenizer = tokenizer
        self.result = RequestOutput(request_id, prompt, prompt_ids, [CompletionOutput(i) for i in range(n)])

    def add(self, event: TokenEvent) -> None:
        """Raises GenerationError if the event reports a failure."""
        if event.finish_reason == "error":
            raise GenerationError(event.error or "the request failed")
        out = self.result.outputs[event.index]
        out.text += event.text
        out.token_ids += event.token_ids
        if event.logprobs is not None:
            out.logprobs = (out.logprobs or []) + [self._as_dict(x) for x in event.logprobs]
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + sum(x.logprob for x in event.logprobs)
        if event.prompt_logprobs is not None:
            self.result.prompt_logprobs = [
                None if x is None else self._as_dict(x) for x in event.prompt_logprobs
            ]
        if event.finish_reason is not None:
            out.finish_reason, out.stop_reason = event.finish_reason, event.stop_reason
        if event.kv_bytes is not None:
            self.result.kv_bytes = add_kv_bytes(self.result.kv_bytes, event.kv_bytes)
        self.result.num_cached_tokens = max(self.result.num_cached_tokens, event.num_cached_tokens)
        self.result.finished = all(o.finished() for o in self.result.outputs)

    def snapshot(self) -> RequestOutput:
        r = self.result
        outputs = [
            CompletionOutput(
                o.index, o.text, list(o.token_ids), o.cumulative_logprob,
                None if o.logprobs is None else list(o.logprobs), o.finish_reason, o.stop_reason,
            )
            for o in r.outputs
        ]  # fmt: skip
        return RequestOutput(
            r.request_id, r.prompt, list(r.prompt_token_ids), outputs, r.prompt_logprobs, r.finished,
            r.num_cached_tokens, r.kv_bytes,
        )  # fmt: skip

    def _as_dict(self, item: TokenLogprob) -> LogprobDict:
        def entry(token: int, value: float, rank: int) -> Logprob:
            return Logprob(value, rank, self._tokenizer.token_text(token))

        result = {item.token_id: entry(item.token_id, item.logprob, item.rank)}
        for rank, (token, value) in enumerate(item.top, 1):
            result.setdefault(token, entry(token, value, rank))
        return result


def parse_prompt(prompt: object) -> tuple[str | None, list[int] | None]:
    """A prompt of the Python API: a string, or {"prompt_token_ids": [...]}. Raises RequestError."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), (list, tuple)):
        unknown = set(prompt) - {"prompt_token_ids", "prompt"}
        if unknown:
            raise RequestError(f"prompt has unknown keys: {', '.join(sorted(map(str, unknown)))}", "prompt")
        # Integers of other libraries (numpy's) are integers too; what is none is refused by the engine.
        ids = [
            int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i
            for i in prompt["prompt_token_ids"]
        ]
        return prompt.get("prompt"), ids
    raise RequestError(
        f'prompt must be a string or {{"prompt_token_ids": [...]}}, got {type(prompt).__name__}', "prompt"
    )
