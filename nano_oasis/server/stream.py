"""Delivery of one call's events: joined into a plain reply, or sent as server-sent events.

Owns: merging the streams of several prompts, slow and vanished clients, failures after the headers.
Must not know: the shape of replies, or what the events say beyond their finish_reason.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from nano_oasis.openai_api import ApiError, Reply, join_events
from nano_oasis.request import TokenEvent
from nano_oasis.server.app import STATE, as_api_error, json_response

if TYPE_CHECKING:
    from nano_oasis.async_engine import TokenStream

SLOW_CLIENT_S = 60.0  # a client that takes nothing for so long is dropped


class EventMerge:
    """The events of a call's streams by choice index, joined as long as nobody takes them.

    So a client that reads slowly gets fewer and larger chunks, and what waits for it is never more
    than its own output. Use as a context manager: leaving it, however, aborts what still runs.
    """

    def __init__(self, streams: Sequence[TokenStream], n: int) -> None:
        self._streams = streams
        self._waiting: dict[int, list[TokenEvent]] = defaultdict(list)
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._running = len(streams)
        self._tasks = [asyncio.create_task(self._pump(i * n, s)) for i, s in enumerate(streams)]

    async def __aenter__(self) -> EventMerge:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._running or self._failure:
            for stream in self._streams:
                stream.abort()  # does nothing to choices that have finished

    async def _pump(self, base: int, stream: TokenStream) -> None:
        try:
            async for event in stream:
                if event.finish_reason == "error":
                    raise ApiError(500, event.error or "the request failed", code="generation_failed")
                if event.finish_reason == "abort":
                    raise ApiError(503, "the request was aborted by the server", code="aborted")
                self._waiting[base + event.index].append(event)
                self._news.set()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._running -= 1
            self._news.set()

    async def take(self) -> dict[int, TokenEvent]:
        """What has come since the last call, waiting for something; empty at the end.

        Raises the first failure of any choice: the call as a whole has failed then.
        """
        while not self._waiting and self._running and self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        waiting, self._waiting = self._waiting, defaultdict(list)
        return {index: join_events(events) for index, events in waiting.items()}

    async def take_all(self) -> dict[int, TokenEvent]:
        """Everything, once all choices have ended. Raises like take()."""
        while self._running and self._failure is None:
            self._news.clear()
            await self._news.wait()
        return await self.take()


async def plain_reply(merge: EventMerge, reply: Reply) -> web.Response:
    events = await merge.take_all()
    if reply.call.echo:  # renders whole prompts: not on the event loop
        return json_response(await asyncio.to_thread(reply.whole, events))
    return json_response(reply.whole(events))


async def streamed_reply(request: web.Request, merge: EventMerge, reply: Reply) -> web.StreamResponse:
    """Server-sent events: chunks, then [DONE]; or, after a failure, one error event and no [DONE]."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # proxies: pass each event on at once
        }
    )
    await response.prepare(request)
    try:
        await _send(request, response, *map(_event, reply.opening()))
        while events := await merge.take():
            if reply.call.echo:
                chunks = await asyncio.to_thread(reply.chunks, events)
            else:
                chunks = reply.chunks(events)
            await _send(request, response, *map(_event, chunks))
        await _send(request, response, *map(_event, reply.closing()), b"data: [DONE]\n\n")
    except ConnectionError:
        raise
    except Exception as error:
        failure = as_api_error(error, request.app[STATE])
        response.force_close()
        await _send(request, response, b"data: " + failure.body() + b"\n\n")
    await response.write_eof()
    return response


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _send(request: web.Request, response: web.StreamResponse, *events: bytes) -> None:
    """One write. Waits while the client's buffers are full, but not for ever."""
    if not events:
        return
    try:
        async with asyncio.timeout(SLOW_CLIENT_S):
            await response.write(b"".join(events))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client read nothing for {SLOW_CLIENT_S:g} s") from None
