"""From token events to the reply objects of the OpenAI API, whole or in chunks.

Owns: ids, usage, choices, logprobs in both shapes, text offsets. Must not know: sockets, the engine.
A whole reply is the chunk of all events at once, so streamed and plain replies cannot drift apart.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nano_oasis.openai_api.parse import Call
from nano_oasis.request import TokenEvent, TokenLogprob, add_kv_bytes

if TYPE_CHECKING:
    from nano_oasis.tokenizer import IncrementalDecoder, Tokenizer

LOGPROB_FLOOR = -9999.0  # written for impossible tokens: JSON has no -Infinity

Json = dict[str, Any]


def join_events(events: Sequence[TokenEvent]) -> TokenEvent:
    """Consecutive events of one choice as one event."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    with_prompt = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
    has_logprobs = any(e.logprobs is not None for e in events)
    return TokenEvent(
        index=last.index,
        text="".join(e.text for e in events),
        token_ids=tuple(t for e in events for t in e.token_ids),
        logprobs=tuple(x for e in events for x in e.logprobs or ()) if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        num_cached_tokens=last.num_cached_tokens,
        kv_bytes=last.kv_bytes,
        prompt_logprobs=with_prompt[0] if with_prompt else None,
    )


class Reply:
    """One call's reply, choice by choice: index = position of the prompt x n + sample."""

    prefix = object = chunk_object = ""

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
        self.call = call
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self._completion_tokens = 0
        self._kv_bytes: tuple[int, int] | None = None
        self._cached: dict[int, int] = {}  # prompt -> tokens its first choice found in the cache
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.call.params.n

    def whole(self, events: Mapping[int, TokenEvent]) -> Json:
        """The plain reply. `events`: all of each choice's events, joined."""
        choices = [self._whole_choice(i, self._note(i, events[i])) for i in sorted(events)]
        return self._envelope(self.object, choices) | {"usage": self.usage()}

    def opening(self) -> list[Json]:
        """Chunks to send before any token."""
        return []

    def chunks(self, events: Mapping[int, TokenEvent]) -> list[Json]:
        """One chunk per choice that has something to say."""
        choices = (self._chunk_choice(i, self._note(i, events[i])) for i in sorted(events))
        return [self._chunk([choice]) for choice in choices if choice is not None]

    def closing(self) -> list[Json]:
        """The usage chunk, if it was asked for."""
        return [self._chunk([]) | {"usage": self.usage()}] if self.call.include_usage else []

    def usage(self) -> Json:
        prompt = sum(map(len, self.prompts))
        counts: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._kv_bytes is not None:
            counts["kv_bytes"] = dict(zip(("device", "host"), self._kv_bytes, strict=True))
        return counts

    def _note(self, index: int, event: TokenEvent) -> TokenEvent:
        """Count what the usage and the other choices of the same prompt need."""
        self._completion_tokens += len(event.token_ids)
        if event.kv_bytes is not None:
            self._kv_bytes = add_kv_bytes(self._kv_bytes, event.kv_bytes)
        prompt, sample = divmod(index, self.call.params.n)
        if sample == 0:
            self._cached[prompt] = event.num_cached_tokens
            if event.prompt_logprobs is not None:
                self._prompt_logprobs[prompt] = event.prompt_logprobs
        return event

    def _envelope(self, object: str, choices: list[Json]) -> Json:
        return {
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip

    def _chunk(self, choices: list[Json]) -> Json:
        # With include_usage every other chunk says "usage": null; without, no chunk has the key.
        chunk = self._envelope(self.chunk_object, choices)
        return chunk | {"usage": None} if self.call.include_usage else chunk

    def _whole_choice(self, index: int, event: TokenEvent) -> Json:
        raise NotImplementedError

    def _chunk_choice(self, index: int, event: TokenEvent) -> Json | None:
        raise NotImplementedError

    def _shown(self, event: TokenEvent) -> Sequence[TokenLogprob]:
        """Logprobs of the tokens that make up the text: the end token that stopped it is left out."""
        if event.logprobs is None or self.call.logprobs is None:
            return ()
        ended_by_token = event.finish_reason == "stop" and not isinstance(event.stop_reason, str)
        return event.logprobs[:-1] if ended_by_token else event.logprobs

    def _vllm_prompt_logprobs(self, prompt: int) -> list[Json | None]:
        k, text = self.call.prompt_logprobs or 0, self.tokenizer.token_text
        result: list[Json | None] = []
        for item in self._prompt_logprobs.get(prompt, ()):
            if item is None:
                result.append(None)
                continue
            ranked = {token: (value, rank) for rank, (token, value) in enumerate(item.top[:k], 1)}
            ranked = {item.token_id: (item.logprob, item.rank)} | ranked
            result.append(
                {
                    str(token): {"logprob": finite(value), "rank": rank, "decoded_token": text(token)}
                    for token, (value, rank) in ranked.items()
                }
            )
        return result


class ChatReply(Reply):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        def first(index: int) -> Json:
            delta = {"role": "assistant", "content": ""}
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

        return [self._chunk([first(i)]) for i in range(self.num_choices)]

    def whole(self, events: Mapping[int, TokenEvent]) -> Json:
        reply = super().whole(events)
        if self.call.prompt_logprobs is not None:
            reply["prompt_logprobs"] = self._vllm_prompt_logprobs(0)
        return reply

    def _whole_choice(self, index: int, event: TokenEvent) -> Json:
        message = {"role": "assistant", "content": event.text, "refusal": None}
        return {"index": index, "message": message} | self._rest(event)

    def _chunk_choice(self, index: int, event: TokenEvent) -> Json | None:
        if not (event.text or event.finish_reason or self._shown(event)):
            return None
        delta = {"content": event.text} if event.text or not event.finish_reason else {}
        return {"index": index, "delta": delta} | self._rest(event)

    def _rest(self, event: TokenEvent) -> Json:
        content = None
        if self.call.logprobs is not None:
            content = {"content": [self._entry(x) for x in self._shown(event)], "refusal": None}
        return {
            "logprobs": content, "finish_reason": event.finish_reason, "stop_reason": event.stop_reason
        }  # fmt: skip

    def _entry(self, item: TokenLogprob) -> Json:
        top = item.top[: self.call.logprobs]
        return self._token(item.token_id, item.logprob) | {"top_logprobs": [self._token(*t) for t in top]}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self.tokenizer.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


class CompletionReply(Reply):
    """/v1/completions. With echo, each choice's first chunk begins with its prompt."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, call: Call, model: str, tokenizer: Tokenizer, prompts: list[list[int]], texts: list[str]
    ) -> None:
        """`texts`: per prompt, the text that echo gives back; unused without echo."""
        super().__init__(call, model, tokenizer, prompts)
        self._texts = texts
        self._echoed: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    def _whole_choice(self, index: int, event: TokenEvent) -> Json:
        choice = self._choice(index, event)
        if self.call.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._vllm_prompt_logprobs(index // self.call.params.n)
        return choice

    def _chunk_choice(self, index: int, event: TokenEvent) -> Json | None:
        silent = not (event.text or event.finish_reason or self._shown(event))
        if silent and (index in self._echoed or not self.call.echo):
            return None
        return self._choice(index, event)

    def _choice(self, index: int, event: TokenEvent) -> Json:
        prompt = index // self.call.params.n
        text, items, offsets = event.text, list(self._shown(event)), None
        arrays: dict[str, list[Any]]
        arrays = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        echo = self.call.echo and index not in self._echoed
        self._echoed.add(index)
        if echo:
            text = self._texts[prompt] + text
        if self.call.logprobs is not None:
            if echo:
                ids = self.prompts[prompt]
                offsets = _prompt_offsets(self.tokenizer, ids, self._texts[prompt])
                self._extend(arrays, ids, self._prompt_logprobs.get(prompt, [None] * len(ids)), offsets)
            ids = [x.token_id for x in items]
            self._extend(arrays, ids, items, self._output_offsets(index).add(ids))
        return {
            "index": index,
            "text": text,
            "logprobs": arrays if self.call.logprobs is not None else None,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }

    def _output_offsets(self, index: int) -> _Offsets:
        if index not in self._offsets:
            prompt = index // self.call.params.n
            skip = self.call.params.skip_special_tokens
            decoder = _decoder(self.tokenizer, self.prompts[prompt], skip)
            self._offsets[index] = _Offsets(decoder, len(self._texts[prompt]) if self.call.echo else 0)
        return self._offsets[index]

    def _extend(
        self,
        arrays: dict[str, list[Any]],
        ids: Sequence[int],
        items: Iterable[TokenLogprob | None],
        offsets: Iterable[int],
    ) -> None:
        text = self.tokenizer.token_text
        for token, item, offset in zip(ids, items, offsets, strict=True):
            arrays["tokens"].append(text(token))
            arrays["text_offset"].append(offset)
            if item is None:  # the first prompt token: nothing precedes it
                arrays["token_logprobs"].append(None)
                arrays["top_logprobs"].append(None)
                continue
            top: dict[str, float] = {}
            for other, value in (*item.top[: self.call.logprobs], (item.token_id, item.logprob)):
                top.setdefault(text(other), finite(value))  # of two ids with one text the likelier counts
            arrays["token_logprobs"].append(finite(item.logprob))
            arrays["top_logprobs"].append(top)


class _Offsets:
    """Where each token begins in the text, in characters; parts of one character share its place."""

    def __init__(self, decoder: IncrementalDecoder, start: int) -> None:
        self._decoder = decoder
        self._at = start

    def add(self, ids: Iterable[int]) -> list[int]:
        result = []
        for token in ids:
            result.append(self._at)
            self._at += len(self._decoder.push([token]))
        return result


def _decoder(tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> IncrementalDecoder:
    # Imported late: the tokenizer package brings torch in, and the server answers before that is loaded.
    from nano_oasis.tokenizer import IncrementalDecoder

    return IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip_special)


def _prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Offsets of prompt tokens in `text`. Special tokens that the text does not show have no width."""
    decoder = _decoder(tokenizer, [], skip_special=False)
    at, result = 0, []
    for token in ids:
        result.append(at)
        piece = decoder.push([token])
        if token not in tokenizer.special_ids or text.startswith(piece, at):
            at += len(piece)
    return result


def finite(logprob: float) -> float:
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR  # also for NaN, which compares false
