"""A server on the fake engine, in a thread of this process: fixtures, and helpers to talk to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from fake_engine import ASSISTANT, EOS, USER, ByteTokenizer, FakeEngine

from nano_oasis.server.app import ServerState, make_runner

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZER = ByteTokenizer()
RULE_BOOK = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, **fields}


BODIES = {COMPLETIONS: completion, CHAT: chat}


def chat_ids(text: str) -> list[int]:
    return [USER, *TOKENIZER.encode(text), EOS, ASSISTANT]


def text_of(choice: dict[str, Any]) -> str:
    for key in ("message", "delta"):
        if key in choice:
            return choice[key].get("content") or ""
    return choice["text"]


@dataclass
class Reply:
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        assert self.headers["Content-Type"].startswith("application/json"), self.headers
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refused call, whose shape it checks, and that the rule book knows its code."""
        assert self.status >= 400, (self.status, self.body)
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert f"`{error['code']}`" in RULE_BOOK, error
        return error


class LiveServer:
    """Started by the constructor; `url` is ready when it returns (the engine too, unless ready=False)."""

    def __init__(self, ready: bool = True, max_body: int = 2**22, **options: Any) -> None:
        self.options = options
        self.state = ServerState(max_body=max_body)
        self.loop = uvloop.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        if ready:
            self.load()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        self._ready.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        self.runner = make_runner(self.state)
        await self.runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # so that slow readers can be tested
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(self.runner, listener).start()
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def load(self) -> None:
        async def load() -> None:
            await self.state.load(FakeEngine(**self.options))

        self.run(load())

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    @property
    def engine(self) -> FakeEngine:
        assert isinstance(self.state.engine, FakeEngine)
        return self.state.engine

    @property
    def model(self) -> Any:
        return self.engine.model

    def tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return self.run(count())

    def close(self) -> None:
        async def stop() -> None:
            if self.state.engine is not None and self.engine.health() != "stopped":
                self.model.stalled.clear()
                await self.engine.shutdown(0)
            await self.runner.cleanup()

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """`body`: bytes go as they are, an iterator goes in chunks, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            if body is not None and not isinstance(body, (bytes, Iterator)):
                body, headers = (
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"} | (headers or {}),
                )
            connection.request(method, path, body, headers or {}, encode_chunked=isinstance(body, Iterator))
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.send("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a plain call that must succeed."""
        reply = self.post(path, body)
        assert reply.status == 200, reply.body
        return reply.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The payloads of a streamed call in order: chunks as dicts, and "[DONE]"."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status == 200, reply.body
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        return parse_events(reply.body.decode())


def parse_events(text: str) -> list[Any]:
    events = []
    for block in text.split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else strict_json(data))
    assert text.endswith("\n\n")
    return events


def strict_json(text: str | bytes) -> Any:
    """Python's parser accepts NaN and Infinity; JSON has neither."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def chunks_by_index(events: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """Choice index -> its choices in order; checks the end mark."""
    assert events[-1] == "[DONE]"
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def raw_request(
    live: LiveServer, path: str, body: dict[str, Any], receive_buffer: int = 0, **headers: str
) -> socket.socket:
    """Send a request and leave the reading to the test."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", live.port))
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    sock.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return sock


def metric(live: LiveServer, name: str) -> float:
    for line in live.get("/metrics").body.decode().splitlines():
        if line.startswith("nano_oasis:" + name):
            return float(line.split()[-1])
    raise AssertionError(name)


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    server = LiveServer()
    yield server
    server.close()


@pytest.fixture
def live(shared: LiveServer) -> Iterator[LiveServer]:
    """The shared server; afterwards it must be idle, healthy and able to answer."""
    tasks = shared.tasks()
    yield shared
    shared.model.delay = 0.0
    until(lambda: shared.engine.idle)
    until(lambda: shared.tasks() <= tasks)
    assert shared.get("/health").status == 200
    assert shared.ask(COMPLETIONS, completion(max_tokens=2))["usage"]["completion_tokens"] == 2


@pytest.fixture
def own() -> Iterator[Any]:
    """Makes servers that a test may break."""
    made: list[LiveServer] = []

    def make(**options: Any) -> LiveServer:
        made.append(LiveServer(**options))
        return made[-1]

    yield make
    for server in made:
        server.close()
