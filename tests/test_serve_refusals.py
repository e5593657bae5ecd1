"""What the server refuses, with which status and message, and what it accepts instead."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from typing import Any

import pytest
from fake_engine import EOS, VOCAB
from live_server import (
    BODIES,
    CHAT,
    COMPLETIONS,
    TOKENIZER,
    LiveServer,
    chat,
    chat_ids,
    chunks_by_index,
    completion,
    text_of,
)

pytest_plugins = ["live_server"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_b006_token_limits(live: LiveServer, path: str, streamed: bool) -> None:
    context = live.engine.max_model_len

    def outcome(**fields: Any) -> tuple[int, str]:
        body = BODIES[path](**fields)
        if not streamed:
            reply = live.ask(path, body)
            return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]
        events = live.stream(path, body | {"stream_options": {"include_usage": True}})
        return events[-2]["usage"]["completion_tokens"], events[-3]["choices"][0]["finish_reason"]

    rest = context - (1 if path == COMPLETIONS else len(chat_ids("hello")))
    default = 16 if path == COMPLETIONS else rest
    assert outcome() == outcome(max_tokens=None) == outcome(max_completion_tokens=None) == (default, "length")
    assert outcome(max_tokens=1) == (1, "length")
    assert outcome(max_tokens=0) == (0, "length")
    assert outcome(max_tokens=10**9) == (rest, "length")
    assert outcome(max_completion_tokens=3) == (3, "length")
    assert outcome(max_completion_tokens=3, max_tokens=5) == (3, "length")
    for field in ("max_tokens", "max_completion_tokens"):
        for bad in (-1, 1.5, "10", True, 2**31, 10**30, []):
            reply = live.post(path, BODIES[path](stream=streamed, **{field: bad}))
            assert (reply.status, reply.error["param"]) == (400, field), bad


def bad_requests() -> dict[str, tuple[Any, int, str | None]]:
    """Name -> a completions body, the status it must get, and the field its error names."""
    return {
        "context": (completion("x" * 256), 400, "prompt"),
        "broken json": (b'{"prompt": "a', 400, None),
        "empty": (b"", 400, None),
        "array": (b"[1]", 400, None),
        "nan": (b'{"prompt":"a","temperature":NaN}', 400, None),
        "infinity": (b'{"prompt":"a","temperature":-Infinity}', 400, None),
        "huge number": (b'{"prompt":"a","temperature":1e999}', 400, "temperature"),
        "utf-8": (b'{"prompt":"\xff"}', 400, None),
        "surrogate": (b'{"prompt":"\\ud800"}', 400, None),
        "deep": (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None),
        "no prompt": ({}, 400, "prompt"),
        "null prompt": (completion(None), 400, "prompt"),
        "empty list": (completion([]), 400, "prompt"),
        "empty ids": (completion([[]]), 400, "prompt"),
        "empty text": (completion(""), 400, "prompt"),
        "mixed": (completion(["a", 1]), 400, "prompt"),
        "mixed ids": (completion([1, [2]]), 400, "prompt"),
        "float id": (completion([1.5]), 400, "prompt"),
        "id too large": (completion([VOCAB]), 400, "prompt"),
        "id negative": (completion([-1]), 400, "prompt"),
        "too many": (completion(["a"] * 100, n=100), 400, "prompt"),
        "temperature": (completion(temperature="hot"), 400, "temperature"),
        "n": (completion(n=0), 400, "n"),
        "best_of": (completion(n=1, best_of=2), 400, "best_of"),
        "logprobs": (completion(logprobs=21), 400, "logprobs"),
        "logprobs type": (completion(logprobs=True), 400, "logprobs"),
        "model": (completion(model="no-such"), 404, "model"),
        "model type": (completion(model=3), 400, "model"),
        "stream": (completion(stream="yes"), 400, "stream"),
        "unsupported": (completion(frequency_penalty=0.5), 400, "frequency_penalty"),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_requests())
def test_b007_refused_before_headers_and_alike_in_both_modes(live: LiveServer, name: str) -> None:
    body, status, param = bad_requests()[name]
    errors = []
    for streamed in (False, True):
        if isinstance(body, dict) and name != "stream":
            body = {**body, "stream": streamed}
        reply = live.post(COMPLETIONS, body, Content_Type="application/json")
        assert (reply.status, reply.error["param"]) == (status, param), reply.body
        errors.append(reply.error)
    assert errors[0] == errors[1]
    assert errors[0]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ],
)
def test_b007_bad_chats(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    plain = live.post(CHAT, chat() | fields)
    streamed = live.post(CHAT, chat() | fields | {"stream": True})
    assert plain.error == streamed.error and plain.status == streamed.status == 400
    assert plain.error["param"] == param


def test_b007_messages_of_errors_help(live: LiveServer) -> None:
    def message(body: Any) -> str:
        return live.post(COMPLETIONS, body, Content_Type="application/json").error["message"]

    assert (
        message(b'{"prompt":"a","temperature":NaN}') == "temperature: NaN is not JSON; numbers must be finite"
    )
    assert "top_p: -Infinity is not JSON" in message(b'{"top_p" : -Infinity}')
    assert message(completion(max_tokens="10")) == "max_tokens: expected int, got str"
    assert "256" in message(completion("x" * 256))
    assert live.post(COMPLETIONS, completion("x" * 256)).error["code"] == "context_length_exceeded"
    assert "half a surrogate pair" in message(b'{"prompt":"\\ud800"}')
    assert message(b"[]") == "the body must be a JSON object: expected object, got array"
    chat_error = live.post(CHAT, chat() | {"messages": [{"role": "user", "content": "a"}] * 2}).error
    assert chat_error["message"] == "Conversation roles must alternate user/assistant"
    assert live.post(COMPLETIONS, completion(model="x")).error["code"] == "model_not_found"


def test_b007_routes_methods_and_content_types(live: LiveServer) -> None:
    assert (r := live.get("/v1/nothing")).status == 404 and r.error["code"] == "not_found"
    r = live.get(COMPLETIONS)
    assert r.status == 405 and r.error["code"] == "method_not_allowed" and r.headers["Allow"] == "POST"
    assert live.post("/v1/models", {}).status == 405
    body = json.dumps(completion(max_tokens=1)).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "application/problem+json", ""):
        assert live.post(COMPLETIONS, body, Content_Type=kind).status == 200
    assert live.send("POST", COMPLETIONS, body).status == 200  # no Content-Type at all
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        r = live.post(COMPLETIONS, body, Content_Type=kind)
        assert r.status == 415 and r.error["code"] == "unsupported_media_type"


def test_b007_nulls_and_unknown_fields_change_nothing(live: LiveServer) -> None:
    base = live.ask(COMPLETIONS, completion(seed=5, max_tokens=6))
    nulls = dict.fromkeys(
        ("n", "temperature", "top_p", "top_k", "min_p", "stop", "stream", "echo", "logprobs", "model",
         "best_of", "stream_options", "frequency_penalty", "logit_bias", "suffix", "stop_token_ids",
         "ignore_eos")
    )  # fmt: skip
    ignored = {
        "user": "me",
        "metadata": {"a": 1},
        "store": True,
        "service_tier": "auto",
        "no_such_field": [1],
    }
    for extra in (nulls, ignored):
        other = live.ask(COMPLETIONS, completion(seed=5, max_tokens=6) | extra)
        assert other["choices"] == base["choices"]


def test_content_parts_equal_strings(live: LiveServer) -> None:
    forms = (
        "hello world",
        [{"type": "text", "text": "hello world"}],
        [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}],
    )
    replies = [
        live.ask(CHAT, {"messages": [{"role": "user", "content": c}], "max_tokens": 5, "temperature": 0})
        for c in forms
    ]
    assert replies[0]["choices"] == replies[1]["choices"] == replies[2]["choices"]
    assert replies[0]["usage"]["prompt_tokens"] == replies[2]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"])
def test_b058_sampling_values(live: LiveServer, field: str) -> None:
    bad = {
        "temperature": [-1, 101, "x", True],
        "top_p": [0, -0.1, 1.1],
        "top_k": [-2, 1.5, "x"],
        "min_p": [-0.1, 1.1],
        "repetition_penalty": [0, -1, 1.1],
        "seed": [-1, 2**63, "x", 1.5],
    }[field]
    good = {
        "temperature": [0, 1e-12, 1e-6, 1e-4, 2, 100],
        "top_p": [1e-9, 1],
        "top_k": [-1, 0, 1, 10**6],
        "min_p": [0, 1],
        "repetition_penalty": [1, 1.0],
        "seed": [0, 2**63 - 1],
    }[field]
    for value in bad:
        for path, body in BODIES.items():
            reply = live.post(path, body(**{field: value}))
            assert (reply.status, reply.error["param"]) == (400, field), value
    greedy = text_of(live.ask(COMPLETIONS, completion(temperature=0))["choices"][0])
    for value in good:
        said = text_of(live.ask(COMPLETIONS, completion(**{field: value}))["choices"][0])
        if field == "temperature" and value < 0.01:
            assert said == greedy


def test_b009_prompt_shapes(live: LiveServer) -> None:
    prompts = ["A", "BB", "CCC"]
    for length, prompt in zip((4, 2, 6), prompts, strict=True):
        live.model.force(TOKENIZER.encode(prompt), [*b"123456"[: length - 1], EOS])
    single = [live.ask(COMPLETIONS, completion(p, n=2, temperature=0, max_tokens=6)) for p in prompts]
    wanted = [text_of(c) for reply in single for c in reply["choices"]]
    assert wanted == ["123", "123", "1", "1", "12345", "12345"]
    ids = [TOKENIZER.encode(p) for p in prompts]
    for shape in (prompts, ids):
        body = completion(shape, n=2, temperature=0, max_tokens=6)
        reply = live.ask(COMPLETIONS, body)
        assert [c["index"] for c in reply["choices"]] == list(range(6))
        assert [text_of(c) for c in reply["choices"]] == wanted
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert reply["usage"][key] == sum(s["usage"][key] for s in single)
        streamed = chunks_by_index(live.stream(COMPLETIONS, body))
        assert ["".join(map(text_of, streamed[i])) for i in range(6)] == wanted
    one = live.ask(COMPLETIONS, completion(ids[2], temperature=0, max_tokens=6))
    assert text_of(one["choices"][0]) == wanted[4] and one["usage"]["prompt_tokens"] == 3


def test_b011_body_limit(own: Any) -> None:
    live = own(max_body=2**21)
    padded = completion(max_tokens=1, metadata="x" * 3 * 2**19)
    assert live.post(COMPLETIONS, padded).status == 200
    too_long = live.post(COMPLETIONS, completion("x" * 2**18))
    assert too_long.status == 400 and too_long.error["code"] == "context_length_exceeded"
    big = json.dumps(completion("x" * 2**21)).encode()
    for body in (big, iter([big[: 2**20], big[2**20 :]])):  # with Content-Length, and in chunks without it
        r = live.post(COMPLETIONS, body, Content_Type="application/json")
        assert r.status == 413 and r.error["code"] == "body_too_large" and str(2**21) in r.error["message"]
    assert live.ask(COMPLETIONS, completion(max_tokens=1))


def test_b011_compressed_bodies(live: LiveServer) -> None:
    plain = json.dumps(completion(max_tokens=1)).encode()
    packed, bomb = gzip.compress(plain), gzip.compress(b"a" * 2**24)
    cases: list[tuple[str, Any, int, str | None]] = [
        ("gzip", packed, 200, None),
        ("GZIP", iter([packed[:9], packed[9:]]), 200, None),
        ("deflate", zlib.compress(plain), 200, None),
        ("identity", plain, 200, None),
        ("", plain, 200, None),
        ("gzip", gzip.compress(b"not JSON"), 400, "invalid_json"),
        ("gzip", b"no gzip", 400, "unreadable_body"),
        ("gzip", b"", 400, "unreadable_body"),
        ("gzip", packed[:-1], 400, "unreadable_body"),
        ("gzip", packed + b"more", 400, "unreadable_body"),
        ("gzip", bomb, 413, "body_too_large"),
        ("gzip", iter([bomb]), 413, "body_too_large"),
        *((name, plain, 415, "unsupported_media_type") for name in ("foo", "br", "zstd", "gzip, gzip")),
    ]
    for encoding, body, status, code in cases:
        r = live.post(COMPLETIONS, body, Content_Type="application/json", Content_Encoding=encoding)
        assert r.status == status, (encoding, r.body)
        assert status == 200 or r.error["code"] == code, (encoding, r.body)
    message = live.post(COMPLETIONS, plain, Content_Type="application/json", Content_Encoding="zstd").error
    assert message["message"] == "Content-Encoding 'zstd' is not supported; use gzip, deflate, or none"


def test_b011_packed_bytes_count_too(live: LiveServer) -> None:
    """Compressed data that unpacks to nothing, without end."""
    empty_blocks = b"\x00\x00\x00\xff\xff" * 10_000
    blocks = [empty_blocks] * (live.state.max_body // len(empty_blocks) + 1)
    body = iter([zlib.compress(b"")[:2], *blocks])
    r = live.post(COMPLETIONS, body, Content_Type="application/json", Content_Encoding="deflate")
    assert r.status == 413 and r.error["code"] == "body_too_large"


def test_the_http_library_answers_what_never_reaches_a_handler(live: LiveServer) -> None:
    """The rule book says that these have plain text."""
    for lines, status in (
        (b"FOO /v1/models HTTP/1.1\r\nHost: x", b"400"),
        (b"hello", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000, b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: a miracle", b"417"),
    ):
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as sock:
            sock.sendall(lines + b"\r\n\r\n")
            answer = sock.makefile("rb").read().lower()
        assert answer.split()[1] == status and b"content-type: text/plain" in answer, answer
    assert live.send("PROPFIND", "/v1/models").error["code"] == "method_not_allowed"
