"""Clients that vanish or do not read, steps that fail, loops that stall or die."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from live_server import (
    BODIES,
    CHAT,
    COMPLETIONS,
    LiveServer,
    chat,
    completion,
    metric,
    parse_events,
    raw_request,
    until,
)

from nano_oasis.server import stream as stream_module

pytest_plugins = ["live_server"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("when", ["before the first chunk", "after 3 chunks", "plain call"])
def test_b030_disconnect_aborts(live: LiveServer, path: str, when: str) -> None:
    live.model.delay = 0.02
    body = BODIES[path](max_tokens=240, ignore_eos=True, n=2, stream=when != "plain call")
    before = metric(live, 'request_success_total{finished_reason="abort"')
    for _ in range(5):
        sock = raw_request(live, path, body)
        if when == "after 3 chunks":
            received = b""
            while received.count(b"data: ") < 3 + 2 * (path == CHAT):
                received += sock.recv(4096)
        elif when == "plain call":
            until(lambda: live.engine.engine.num_live > 0)
        sock.close()
        until(lambda: live.engine.idle)
    live.model.delay = 0.0
    if when != "before the first chunk":  # there it may leave before it was submitted
        assert metric(live, 'request_success_total{finished_reason="abort"') == before + 10


def test_b031_disconnects_while_encoding_and_while_queued(
    live: LiveServer, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: Any, **__: Any) -> list[int]:
        reached.set()
        await asyncio.sleep(0.2)
        return [1]

    reached = threading.Event()
    received = metric(live, "request_received_total")
    monkeypatch.setattr(live.engine, "encode", slow)
    with raw_request(live, COMPLETIONS, completion(max_tokens=200)):
        assert reached.wait(5)
    time.sleep(0.4)
    assert metric(live, "request_received_total") == received, "it was gone before it was submitted"
    monkeypatch.undo()

    narrow = own(max_num_seqs=1)
    narrow.model.delay = 0.02
    running = raw_request(narrow, COMPLETIONS, completion(max_tokens=200))
    until(lambda: metric(narrow, "num_requests_running") == 1)
    with raw_request(narrow, COMPLETIONS, completion("queued", max_tokens=200)):
        until(lambda: metric(narrow, "num_requests_waiting") == 1)
    until(lambda: metric(narrow, "num_requests_waiting") == 0)
    assert metric(narrow, "num_requests_running") == 1
    running.close()
    until(lambda: narrow.engine.idle)


def test_b030_a_request_id_of_the_client_names_nothing(live: LiveServer) -> None:
    live.model.delay = 0.01
    body = completion(max_tokens=20, seed=1)
    gone = raw_request(live, COMPLETIONS, body | {"max_tokens": 200}, X_Request_Id="same")
    until(lambda: live.engine.engine.num_live > 0)
    replies: list[Any] = []

    def ask() -> None:
        replies.append(live.post(COMPLETIONS, body, X_Request_Id="same").json())

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    gone.close()
    for thread in threads:
        thread.join()
    assert [r["usage"]["completion_tokens"] for r in replies] == [20, 20]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_b080_gauges_and_totals_after_everyone_left(live: LiveServer) -> None:
    live.model.delay = 0.02
    received = metric(live, "request_received_total")
    socks = [raw_request(live, COMPLETIONS, completion(str(i), max_tokens=200)) for i in range(20)]
    until(lambda: metric(live, "num_requests_running") == 20)
    for sock in socks:
        sock.close()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    until(lambda: [metric(live, g) for g in gauges] == [0, 0, 0])
    reasons = ("stop", "length", "abort", "error")
    ended = sum(metric(live, f'request_success_total{{finished_reason="{r}"') for r in reasons)
    assert metric(live, "request_received_total") == ended >= received + 20


def test_b077_slow_readers_are_bounded_and_dropped(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's output waits in a bounded buffer; one that reads nothing is dropped after a time."""
    monkeypatch.setattr(stream_module, "SLOW_CLIENT_S", 0.5)
    tasks = live.tasks()
    # More than a megabyte each: the kernel's buffers do not take that when the reader's is small.
    body = completion("x" * 200, echo=True, max_tokens=4, logprobs=20, n=8, stream=True)
    socks = [raw_request(live, COMPLETIONS, body, receive_buffer=4096) for _ in range(5)]
    normal = live.stream(COMPLETIONS, completion(max_tokens=20))
    assert normal[-1] == "[DONE]"
    until(lambda: live.engine.idle, 10)
    until(lambda: live.tasks() <= tasks, 10)
    for sock in socks:  # reading now finds a cut stream, not an endless one
        received = b""
        try:
            while part := sock.recv(2**16):
                received += part
        except ConnectionResetError:
            pass
        assert b"[DONE]" not in received
        sock.close()


def test_a_reader_that_falls_behind_gets_fewer_larger_chunks(live: LiveServer) -> None:
    body = completion(max_tokens=200, seed=2)
    whole = live.ask(COMPLETIONS, body)
    sock = raw_request(live, COMPLETIONS, body | {"stream": True}, Connection="close")
    time.sleep(0.2)
    received = b""
    while part := sock.recv(2**16):
        received += part
    text = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in received.decode().splitlines()
        if line.startswith("data: {")
    )
    assert text == whole["choices"][0]["text"]


def test_b031_a_failing_request_fails_alone(live: LiveServer) -> None:
    live.model.fail_on = 200
    try:
        good = completion(max_tokens=20, seed=1)
        wanted = live.ask(COMPLETIONS, good)["choices"]
        results: dict[str, Any] = {}
        threads = [
            threading.Thread(target=lambda: results.update(good=live.ask(COMPLETIONS, good))),
            threading.Thread(target=lambda: results.update(bad=live.post(COMPLETIONS, completion([200, 1])))),
            threading.Thread(
                target=lambda: results.update(
                    streamed=live.stream(COMPLETIONS, completion([[1, 2], [200, 1]], max_tokens=200))
                )
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results["good"]["choices"] == wanted
        assert results["bad"].status == 500 and results["bad"].error["type"] == "server_error"
        errors = [e for e in results["streamed"] if "error" in e]
        assert len(errors) == 1 and errors[0] == results["streamed"][-1], "one error event, and no [DONE]"
        assert not [c for e in results["streamed"][:-1] for c in e["choices"] if c["finish_reason"]]
    finally:
        live.model.fail_on = None


def test_b031_b074_a_dead_loop_tells_everyone(own: Any) -> None:
    live = own()
    live.model.delay = 0.02
    results: list[Any] = []
    calls = [
        threading.Thread(target=lambda: results.append(live.post(COMPLETIONS, completion(max_tokens=200)))),
        threading.Thread(target=lambda: results.append(live.post(CHAT, chat(max_tokens=200, stream=True)))),
    ]
    for call in calls:
        call.start()
    until(lambda: live.engine.engine.num_live == 2)
    live.model.die = True
    for call in calls:
        call.join(5)
        assert not call.is_alive()
    plain, streamed = sorted(results, key=lambda r: -r.status)
    assert plain.status == 500 and "died" in plain.error["message"]
    assert "died" in parse_events(streamed.body.decode())[-1]["error"]["message"]
    assert live.get("/health").status == 503 and live.get("/health").error["code"] == "dead"
    refused = live.post(COMPLETIONS, completion(stream=True))
    assert refused.status == 503 and refused.error["code"] == "dead" and refused.headers["Retry-After"]


def test_b074_health_while_loading_and_when_stuck(own: Any) -> None:
    live = own(ready=False, stall_timeout=1.0)
    for reply in (live.get("/health"), live.post(CHAT, chat()), live.get("/v1/models"), live.get("/metrics")):
        assert reply.status == 503 and reply.error["code"] == "loading"
    assert live.get("/version").status == 200
    live.load()
    assert live.get("/health").status == 200
    assert live.ask(COMPLETIONS, completion(max_tokens=1))
    live.model.stalled.set()
    waiting = threading.Thread(target=lambda: live.ask(COMPLETIONS, completion(max_tokens=3)))
    waiting.start()
    until(lambda: live.get("/health").status == 503, 3)
    assert live.get("/health").error["code"] == "stuck"
    live.model.stalled.clear()
    waiting.join(5)
    until(lambda: live.get("/health").status == 200)


def test_an_unforeseen_failure_is_a_json_500(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> list[int]:
        raise KeyError("secret detail")

    monkeypatch.setattr(live.engine, "encode", broken)
    reply = live.post(COMPLETIONS, completion(stream=True))
    assert reply.status == 500 and reply.error["code"] == "internal_error"
    assert b"secret" not in reply.body
    monkeypatch.undo()


def test_b073_an_aborted_stream_ends_with_an_error_event(own: Any) -> None:
    live = own()
    live.model.delay = 0.02
    results: dict[str, Any] = {}

    def run(name: str, **fields: Any) -> None:
        results[name] = live.post(COMPLETIONS, completion(**fields))

    calls = {
        "short": {"max_tokens": 10, "stream": True},
        "long": {"max_tokens": 240, "stream": True},
        "plain": {"max_tokens": 240},
    }
    threads = [threading.Thread(target=run, args=(name,), kwargs=fields) for name, fields in calls.items()]
    for thread in threads:
        thread.start()
    until(lambda: live.engine.engine.num_live == 3)
    live.run(live.engine.shutdown(0.6))
    for thread in threads:
        thread.join(5)
    assert parse_events(results["short"].body.decode())[-1] == "[DONE]"
    last = parse_events(results["long"].body.decode())[-1]
    assert last["error"]["code"] == "aborted" and last["error"]["type"] == "server_error"
    assert results["plain"].status == 503 and results["plain"].error["code"] == "aborted"
    assert live.post(COMPLETIONS, completion()).status == 503


def test_b075_long_texts_do_not_hold_up_the_loop(live: LiveServer) -> None:
    """Encoding runs on threads: health answers and a stream goes on while large prompts are refused."""
    live.model.delay = 0.005
    gaps: list[float] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            began = time.monotonic()
            assert live.get("/health").status == 200
            gaps.append(time.monotonic() - began)
            time.sleep(0.02)

    poller = threading.Thread(target=poll)
    poller.start()
    senders = [
        threading.Thread(target=lambda: live.post(CHAT, chat("some text " * 20_000))) for _ in range(3)
    ]
    for sender in senders:
        sender.start()
    assert live.stream(CHAT, chat(max_tokens=30))[-1] == "[DONE]"
    for sender in senders:
        sender.join()
    stop.set()
    poller.join()
    assert max(gaps) < 0.5, max(gaps)
