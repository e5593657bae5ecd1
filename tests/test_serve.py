"""The server on a fake engine, over real sockets: streams, usage, endpoints, the official client."""

from __future__ import annotations

from collections.abc import Iterator
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
    strict_json,
    text_of,
)
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI

pytest_plugins = ["live_server"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_b001_usage_comes_once_and_only_when_asked(live: LiveServer, path: str, n: int) -> None:
    body = BODIES[path](max_tokens=4, n=n, seed=1)
    plain = live.ask(path, body)["usage"]
    assert plain["completion_tokens"] == 4 * n
    assert plain["total_tokens"] == plain["prompt_tokens"] + 4 * n
    for options, wanted in [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]:
        events = live.stream(path, body if options is None else {**body, "stream_options": options})
        assert events[-1] == "[DONE]"
        with_usage = [e for e in events[:-1] if e.get("usage") is not None]
        assert len(with_usage) == wanted
        if wanted:
            assert with_usage == [events[-2]] and events[-2]["choices"] == []
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [events[-2]["usage"][c] for c in counts] == [plain[c] for c in counts]
        else:
            assert all("usage" not in e for e in events[:-1])


@pytest.mark.parametrize("path", BODIES)
def test_b002_one_finish_reason_per_index(live: LiveServer, path: str) -> None:
    body = BODIES[path](n=3, max_tokens=5, temperature=1, seed=7)
    choices = chunks_by_index(live.stream(path, body))
    plain = live.ask(path, body)
    assert sorted(choices) == [0, 1, 2]
    for index, chunks in choices.items():
        assert all("finish_reason" in c for c in chunks)
        assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert "".join(map(text_of, chunks)) == text_of(plain["choices"][index])
        if path == CHAT:
            assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in c["delta"] for c in chunks[1:])
    assert len({text_of(c) for c in plain["choices"]}) == 3


def test_streams_of_one_call_share_id_and_time(live: LiveServer) -> None:
    events = live.stream(CHAT, chat(max_tokens=5, n=2))
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events[:-1]}) == 1
    other = live.stream(CHAT, chat(max_tokens=5))
    assert other[0]["id"] != events[0]["id"]
    assert events[0]["object"] == "chat.completion.chunk" and events[0]["model"] == "fake"


@pytest.mark.parametrize("path", BODIES)
def test_b004_empty_stops(live: LiveServer, path: str) -> None:
    ids = TOKENIZER.encode("stop me") if path == COMPLETIONS else chat_ids("stop me")
    live.model.force(ids, [*b"ends here", EOS])
    body = BODIES[path]("stop me", max_tokens=30)
    for stops in ({}, {"stop": None}, {"stop": []}):
        choice = live.ask(path, body | stops)["choices"][0]
        assert (text_of(choice), choice["finish_reason"]) == ("ends here", "stop")
    for bad in ("", [""], ["", "zz"], [3], 3, {"a": 1}, [None], ["x"] * 17):
        assert live.post(path, body | {"stop": bad}).error["param"] == "stop"
    choice = live.ask(path, body | {"stop": ["zz", " h", "1", "2", "3", "4"]})["choices"][0]
    assert (text_of(choice), choice["finish_reason"], choice["stop_reason"]) == ("ends", "stop", " h")


@pytest.mark.parametrize("path", BODIES)
def test_end_token_counts_but_is_not_text(live: LiveServer, path: str) -> None:
    ids = TOKENIZER.encode("count") if path == COMPLETIONS else chat_ids("count")
    live.model.force(ids, [*b"abc", EOS])
    logprobs = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True}
    reply = live.ask(path, BODIES[path]("count", max_tokens=30, **logprobs))
    assert reply["usage"]["completion_tokens"] == 4
    assert text_of(reply["choices"][0]) == "abc"
    shown = reply["choices"][0]["logprobs"]
    assert [t if isinstance(t, str) else t["token"] for t in shown.get("tokens") or shown["content"]] == [
        *"abc"
    ]


def test_models(live: LiveServer) -> None:
    data = live.get("/v1/models").json()
    assert data["object"] == "list"
    (model,) = data["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 256)
    assert live.get("/v1/models/fake").json() == model
    r = live.get("/v1/models/org/no-such")
    assert r.status == 404 and r.error["code"] == "model_not_found"


def test_tokenize_and_detokenize(live: LiveServer) -> None:
    reply = live.ask("/tokenize", {"prompt": "hello world é", "model": "fake", "return_token_strs": True})
    assert reply["tokens"] == TOKENIZER.encode("hello world é")
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 256)
    assert reply["token_strs"][:2] == ["hello", " world"]
    assert live.ask("/detokenize", {"tokens": reply["tokens"]}) == {"prompt": "hello world é"}
    assert live.ask("/detokenize", {"tokens": []}) == {"prompt": ""}
    chat_reply = live.ask("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})
    assert chat_reply["tokens"] == chat_ids("hello") and chat_reply["token_strs"] is None
    for body in (
        {},
        {"prompt": "a", "messages": []},
        {"prompt": 3},
        {"prompt": "a", "add_generation_prompt": False},
    ):
        assert live.post("/tokenize", body).status == 400
    for tokens in (None, [-1], [VOCAB], ["a"], 3):
        assert live.post("/detokenize", {"tokens": tokens}).error["param"] == "tokens"
    assert live.post("/tokenize", {"prompt": "a", "model": "x"}).status == 404


def test_version_health_metrics_and_head(live: LiveServer) -> None:
    assert live.get("/version").json() == {"version": "0.1.0"}
    assert live.get("/health").json() == {"status": "ok"}
    metrics = live.get("/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain")
    assert b'nano_oasis:num_requests_running{model_name="fake"} 0.0' in metrics.body
    for path in ("/health", "/metrics"):
        head = live.send("HEAD", path)
        assert (head.status, head.body) == (200, b"")


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_sync(client: OpenAI, live: LiveServer) -> None:
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    messages: Any = [{"role": "user", "content": "hello"}]
    options: Any = {"model": "fake", "messages": messages, "max_tokens": 6, "seed": 4}
    reply = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert reply.usage and reply.usage.completion_tokens == 6
    assert reply.choices[0].logprobs and len(reply.choices[0].logprobs.content or []) == 6
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == reply.choices[0].message.content
    done = client.completions.create(
        model="fake", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True, n=2
    )
    assert len(done.choices) == 4 and done.choices[3].text.startswith("b")
    streamed = list(client.completions.create(model="fake", prompt="a", max_tokens=3, stream=True))
    assert streamed[-1].choices[0].finish_reason == "length"
    live.model.force(chat_ids("hello"), [*b"well", EOS])
    with client.chat.completions.stream(**options) as events:
        assert events.get_final_completion().choices[0].message.content == "well"


def test_openai_client_errors(client: OpenAI, live: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    for stream in (False, True):
        with pytest.raises(BadRequestError) as bad:
            client.chat.completions.create(model="fake", messages=messages, temperature=-1, stream=stream)
        assert bad.value.param == "temperature" and "at least 0" in bad.value.message
        with pytest.raises(NotFoundError) as missing:
            client.completions.create(model="gpt-4o", prompt="a", stream=stream)
        assert missing.value.code == "model_not_found"
    live.model.fail_on = 200
    try:
        with pytest.raises(APIError, match="injected"):
            list(client.completions.create(model="fake", prompt=[200, 1], stream=True))
        with pytest.raises(InternalServerError, match="injected"):
            client.completions.create(model="fake", prompt=[200, 1])
    finally:
        live.model.fail_on = None


async def test_openai_client_async(live: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    async with AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == ["fake"]
        options: Any = {"model": "fake", "messages": messages, "max_completion_tokens": 5, "seed": 4, "n": 2}
        reply = await client.chat.completions.create(**options)
        texts = {0: "", 1: ""}
        stream = await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert [texts[0], texts[1]] == [c.message.content for c in reply.choices]
        assert usage and reply.usage and usage.completion_tokens == reply.usage.completion_tokens == 10
        done = await client.completions.create(model="fake", prompt=[[1, 2], [3]], max_tokens=3)
        assert [c.finish_reason for c in done.choices] == ["length"] * 2
        stream = await client.completions.create(model="fake", prompt="x", max_tokens=3, stream=True)
        assert "".join([c.choices[0].text async for c in stream])
        with pytest.raises(BadRequestError):
            await client.completions.create(model="fake", prompt="x", frequency_penalty=1)


def test_strict_json_helper_is_strict() -> None:
    with pytest.raises(AssertionError):
        strict_json('{"a": NaN}')
