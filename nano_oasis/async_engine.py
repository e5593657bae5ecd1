"""The engine for asyncio: the same Engine, its events delivered to the event loop.

Owns: the crossing between the step thread and the loop, and work kept off the loop.
Must not know: HTTP, or how a step works.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nano_oasis.build import Progress, build_engine
from nano_oasis.config import EngineConfig, EngineInfo, ModelConfig
from nano_oasis.engine import Engine, Sink, call_sinks
from nano_oasis.metrics import Metrics
from nano_oasis.outputs import OutputBuilder, RequestOutput, parse_prompt
from nano_oasis.request import EngineDead, SamplingParams, Submission, TokenEvent
from nano_oasis.tokenizer import Tokenizer


class TokenStream:
    """The events of one submission; iterate once. Leaving early does not abort: call abort()."""

    def __init__(self, engine: Engine, prompt_ids: list[int], params: SamplingParams) -> None:
        self.num_prompt_tokens = len(prompt_ids)
        self._engine = engine
        self._unfinished = params.n
        self._events: deque[TokenEvent] = deque()
        self._ready = asyncio.Event()
        self._submission: Submission = engine.submit(prompt_ids, params, self._put)

    def _put(self, event: TokenEvent) -> None:  # on the event loop
        self._events.append(event)
        self._ready.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if not self._unfinished:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._pop()

    def ready(self) -> list[TokenEvent]:
        """Events that wait already, without waiting for more; a slow reader takes many at once."""
        return [self._pop() for _ in range(len(self._events))]

    def _pop(self) -> TokenEvent:
        event = self._events.popleft()
        self._unfinished -= event.finish_reason is not None
        return event

    def abort(self) -> None:
        """End every choice that has not finished; iterating on yields their last events."""
        self._engine.abort(self._submission)


class AsyncEngine:
    """One model served to one event loop. Construct, `await start()`, submit, `await shutdown()`."""

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise TypeError("give either a config or options, not both")
        self.config = config or EngineConfig.make(**options)
        self._engine: Engine | None = None
        self._failed = False
        # Two workers: one long text being encoded does not hold up every short one.
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="nano-oasis-encode")
        self._streams: dict[str, set[TokenStream]] = {}
        self._ids = itertools.count()

    async def start(self, progress: Progress | None = None) -> None:
        """Load (on a thread) and start stepping. Raises what build_engine raises."""
        loop = asyncio.get_running_loop()

        def deliver(events: list[tuple[Sink, TokenEvent]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(call_sinks, events)

        try:
            engine = await loop.run_in_executor(
                self._workers, lambda: build_engine(self.config, progress, deliver)
            )
        except BaseException:
            self._failed = True
            raise
        engine.start()
        self._engine = engine

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineDead("the engine has not started")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def model_name(self) -> str:
        return self.engine.info.model_name

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len

    @property
    def metrics(self) -> Metrics:
        return self.engine.metrics

    def health(self) -> str:
        """loading, ok, stuck, draining, stopped or dead."""
        if self._engine is None:
            return "dead" if self._failed else "loading"
        return self._engine.health()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._off_loop(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Render the chat template and encode. Raises TemplateError with the template's own message."""
        return await self._off_loop(self.tokenizer.encode_chat, messages, **options)

    async def _off_loop(self, call: Any, *args: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, lambda: call(*args, **options))

    def submit(self, prompt_ids: list[int], params: SamplingParams) -> TokenStream:
        """Queue a prompt now. Raises RequestError if it can never run, EngineDead if none is taken."""
        return TokenStream(self.engine, prompt_ids, params)

    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Snapshots of the growing result; the last one is finished. Closing the iterator aborts.

        Raises RequestError, GenerationError, EngineDead.
        """
        params = params or SamplingParams()
        text, ids = parse_prompt(prompt)
        ids = await self.encode(text or "") if ids is None else ids
        request_id = request_id if request_id is not None else f"req-{next(self._ids)}"
        stream = self.submit(ids, params)
        self._streams.setdefault(request_id, set()).add(stream)
        builder = OutputBuilder(request_id, text, ids, params.n, self.tokenizer)
        try:
            async for event in stream:
                for each in (event, *stream.ready()):
                    builder.add(each)
                yield builder.snapshot()
        finally:
            stream.abort()
            self._streams[request_id].discard(stream)
            if not self._streams[request_id]:
                del self._streams[request_id]

    def abort(self, request_id: str) -> None:
        """Abort generate() calls of this id; their iterators end with finish_reason "abort"."""
        for stream in self._streams.get(request_id, ()):
            stream.abort()

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `timeout` seconds, abort the rest."""
        if self._engine is not None:
            loop = asyncio.get_running_loop()  # not our workers: a second call finds them gone
            await loop.run_in_executor(None, self._engine.stop, timeout)
        self._workers.shutdown(wait=False)
