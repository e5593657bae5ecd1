"""The real thing: `python -m nano_oasis.serve` with the default model, one process for the whole file."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import chunks_by_index, parse_events, strict_json, until
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from test_serve_process import SERVE, Process

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY: Any = {"model": "smollm2", "temperature": 0}
CONTEXT = 2048


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    process = Process(SERVE, "--port", "0", "--max-model-len", str(CONTEXT), "--device-kv-memory", "512MiB")
    try:
        process.listening()
        # B074: not ready until it is, and the first 200 is followed at once by a success.
        assert process.call("GET", "/health")[0] == 503
        until(lambda: process.call("GET", "/health")[0] == 200, 120)
        assert ask(process, "/v1/completions", {"prompt": "Hi", "max_tokens": 1})["choices"]
        process.read_until(r": smollm2, float32 on \w+, KV cache [\d,]+ tokens \(51[12]\.\d MiB\), .*/v1\n")
        yield process
        process.popen.send_signal(signal.SIGTERM)
        code, err = process.finish()
        assert code == 0 and "Traceback" not in err and "ERROR" not in err, err
    finally:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def client(server: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server: Process, path: str, body: dict[str, Any]) -> Any:
    status, data = server.call("POST", path, body)
    assert status == 200, data
    return strict_json(data)


def stream(server: Process, path: str, body: dict[str, Any]) -> list[Any]:
    status, data = server.call("POST", path, body | {"stream": True})
    assert status == 200, data
    return parse_events(data.decode())


def gauge(server: Process, name: str) -> float:
    for line in server.call("GET", "/metrics")[1].decode().splitlines():
        if line.startswith("nano_oasis:" + name):
            return float(line.split()[-1])
    raise AssertionError(name)


def idle(server: Process) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "num_kv_blocks_used")
    return all(gauge(server, name) == 0 for name in names)


def test_chat_answers_and_streams_the_same(client: OpenAI) -> None:
    plain = client.chat.completions.create(messages=MESSAGES, max_tokens=8, **GREEDY)
    assert "Paris" in (plain.choices[0].message.content or "")
    assert plain.usage and plain.usage.prompt_tokens > 20
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    usage = chunks[-1].usage
    assert usage and usage.completion_tokens == plain.usage.completion_tokens


async def test_every_endpoint_with_the_async_client(server: Process) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == ["smollm2"]
        plain = await client.chat.completions.create(messages=MESSAGES, max_tokens=6, **GREEDY)
        texts: list[str] = []
        async for chunk in await client.chat.completions.create(
            messages=MESSAGES, max_tokens=6, stream=True, **GREEDY
        ):
            texts.append(chunk.choices[0].delta.content or "")
        assert "".join(texts) == plain.choices[0].message.content
        done = await client.completions.create(prompt=["One, two,", "A, B,"], max_tokens=4, **GREEDY)
        assert [c.index for c in done.choices] == [0, 1] and "three" in done.choices[0].text
        pieces = [
            c.choices[0].text
            async for c in await client.completions.create(
                prompt="One, two,", max_tokens=4, stream=True, **GREEDY
            )
        ]
        assert "".join(pieces) == done.choices[0].text


def test_errors_with_the_client(client: OpenAI) -> None:
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")
    for streamed in (False, True):
        with pytest.raises(BadRequestError) as error:
            client.completions.create(prompt="word " * CONTEXT, stream=streamed, **GREEDY)
        assert error.value.code == "context_length_exceeded" and str(CONTEXT) in error.value.message
        with pytest.raises(BadRequestError):
            client.chat.completions.create(messages=[], stream=streamed, **GREEDY)


def test_b002_choices_of_a_seeded_call(server: Process) -> None:
    body = {"prompt": "Once upon a time", "n": 3, "max_tokens": 5, "temperature": 1, "seed": 7}
    plain = ask(server, "/v1/completions", body)["choices"]
    streamed = chunks_by_index(stream(server, "/v1/completions", body))
    for choice in plain:
        chunks = streamed[choice["index"]]
        assert "".join(c["text"] for c in chunks) == choice["text"]
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [choice["finish_reason"]]


def test_b005_echo_with_logprobs(server: Process) -> None:
    body = {"prompt": "The quick brown fox", "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    nothing = ask(server, "/v1/completions", body)["choices"][0]
    assert (nothing["text"], nothing["finish_reason"]) == ("The quick brown fox", "length")
    choice = ask(server, "/v1/completions", body | {"max_tokens": 3})["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(v) for v in logprobs.values()} == {len(nothing["logprobs"]["tokens"]) + 3}
    assert logprobs["token_logprobs"][0] is None
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    spans = zip(logprobs["text_offset"], ends, strict=True)
    assert [choice["text"][a:b] for a, b in spans] == logprobs["tokens"]
    known = nothing["logprobs"]["token_logprobs"][1:]
    assert logprobs["token_logprobs"][1 : len(known) + 1] == pytest.approx(known, abs=1e-4)
    ids = ask(server, "/tokenize", {"prompt": body["prompt"]})["tokens"]
    by_ids = ask(server, "/v1/completions", body | {"max_tokens": 3, "prompt": ids})["choices"][0]
    assert by_ids["text"] == choice["text"]


def test_b017_b060_bytes_and_alternatives(server: Process) -> None:
    body = {
        "messages": [{"role": "user", "content": "Repeat exactly: 🫠🫠🫠"}],
        "logprobs": True, "top_logprobs": 20, "max_tokens": 12, "temperature": 0, "top_k": 1,
    }  # fmt: skip
    choice = ask(server, "/v1/chat/completions", body)["choices"][0]
    entries = choice["logprobs"]["content"]
    said = bytes(b for e in entries for b in e["bytes"])
    assert said.decode("utf-8", "replace") == choice["message"]["content"]
    assert all(len(e["top_logprobs"]) == 20 and e["top_logprobs"][0]["token"] == e["token"] for e in entries)
    chunks = chunks_by_index(stream(server, "/v1/chat/completions", body))[0]
    streamed = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [e["bytes"] for e in streamed] == [e["bytes"] for e in entries]


def test_tokens_there_and_back(server: Process) -> None:
    text = "naïve 世界 🫠  two spaces\n\ttab <|im_end|>"
    reply = ask(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == CONTEXT
    assert ask(server, "/detokenize", {"tokens": reply["tokens"]}) == {"prompt": text}
    chat = ask(server, "/tokenize", {"messages": MESSAGES})
    usage = ask(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})["usage"]
    assert chat["count"] == usage["prompt_tokens"]


def test_repeated_prompts_come_from_the_cache(server: Process) -> None:
    body = {
        "prompt": "A prompt that is long enough to fill some blocks. " * 5,
        "max_tokens": 4,
        "temperature": 0,
    }
    first, second = (ask(server, "/v1/completions", body) for _ in range(2))
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_b030_disconnects_free_everything(server: Process) -> None:
    until(lambda: idle(server), 10)
    for streamed in (True, False) * 3:
        body = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True, "stream": streamed}
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
            )
            sock.sendall(data)
            if streamed:
                assert sock.recv(1000)
            else:
                until(lambda: gauge(server, "num_requests_running") == 1)
        until(lambda: idle(server), 2)


def test_b011_b075_huge_bodies_hold_nothing_up(server: Process) -> None:
    """Five bodies of 5 MB, beyond the context, while a stream runs and health is polled."""
    latencies: list[float] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            began = time.monotonic()
            assert server.call("GET", "/health")[0] == 200
            latencies.append(time.monotonic() - began)
            time.sleep(0.05)

    statuses: list[tuple[int, bytes]] = []
    text = "some words and more of them, " * 180_000
    bodies = [("/v1/completions", {"prompt": text})] * 3  # refused by its length alone
    bodies += [("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})] * 2  # tokenized

    def send(path: str, body: Any) -> None:
        statuses.append(server.call("POST", path, body))

    threads = [threading.Thread(target=poll), *(threading.Thread(target=send, args=b) for b in bodies)]
    for thread in threads:
        thread.start()
    events = stream(
        server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "ignore_eos": True}
    )
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert events[-1] == "[DONE]"
    assert [s for s, _ in statuses] == [400] * 5
    assert {json.loads(data)["error"]["code"] for _, data in statuses} == {"context_length_exceeded"}
    assert max(latencies) < 0.5, sorted(latencies)[-5:]
