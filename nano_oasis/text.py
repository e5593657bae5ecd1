"""From a request's token ids to its settled text: detokenising, and what ends a request.

Owns: what text may be shown already, whether a new token is the last, the event that says so.
Must not know: where tokens come from, blocks, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from nano_oasis.request import Request, SampledToken, TokenEvent
from nano_oasis.tokenizer import IncrementalDecoder, Tokenizer


class TextStream:
    """The text of one choice. What was returned is final; what might begin a stop string is held back."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str], skip_special_tokens: bool
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], may_stop: bool = True) -> str:
        """New settled text. If `stopped_by` is set afterwards, the text ended before that stop string.

        Under min_tokens (`may_stop` False) nothing is matched and nothing held back.
        """
        return self._take(self._decoder.push(token_ids), may_stop)

    def finish(self) -> str:
        """Everything still held back; half a character becomes U+FFFD, as in a full decode."""
        if self.stopped_by is not None:
            return ""
        rest = self._take(self._decoder.flush(), may_stop=True)
        rest, self._held = rest + self._held, ""
        return rest

    def _take(self, new: str, may_stop: bool) -> str:
        text = self._held + new
        self._held = ""
        if not self._stop or not may_stop or not text:
            return text
        found = [(text.find(s), s) for s in self._stop if s in text]
        if found:
            at, self.stopped_by = min(found, key=lambda hit: hit[0])
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0


def take_token(request: Request, token: int) -> tuple[str, str | None]:
    """The newest token -> settled text, and the finish reason if it is the last; sets stop_reason."""
    params = request.params
    if token in request.end_ids or token in (params.stop_token_ids or ()):
        request.stop_reason = None if token in request.end_ids else token
        return "", "stop"
    text = request.text.push([token], len(request.output_ids) >= params.min_tokens)
    if request.text.stopped_by is not None:
        request.stop_reason = request.text.stopped_by
        return text, "stop"
    return text, "length" if request.num_tokens >= request.max_len else None


def make_event(request: Request, text: str, drawn: SampledToken | None) -> TokenEvent:
    """What is said about a token, or about an end without one."""
    prompt_logprobs = None
    if request.index == 0 and request.prompt_logprobs and not request.prompt_logprobs_sent:
        prompt_logprobs, request.prompt_logprobs_sent = tuple(request.prompt_logprobs), True
    wants = request.params.logprobs is not None and drawn is not None
    return TokenEvent(
        index=request.index,
        text=text,
        token_ids=() if drawn is None else (drawn.token_id,),
        logprobs=(drawn.logprob,) if wants and drawn and drawn.logprob else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        num_cached_tokens=request.num_cached,
        kv_bytes=request.kv_bytes if request.finished else None,
        prompt_logprobs=prompt_logprobs,
    )
