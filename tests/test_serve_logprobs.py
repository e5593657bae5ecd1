"""Echo and logprobs through the server, in the shapes of both endpoints."""

from __future__ import annotations

from typing import Any

from fake_engine import EOS
from live_server import (
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


def check_legacy(choice: dict[str, Any], count: int) -> None:
    logprobs = choice["logprobs"]
    assert {k: len(v) for k, v in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
    )
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert choice["text"][start:end] == token


def test_b005_echo(live: LiveServer) -> None:
    text = "The quick brown fox"
    ids = TOKENIZER.encode(text)
    assert len(ids) < len(text)
    body = completion(text, echo=True, logprobs=1, max_tokens=0)
    choice = live.ask(COMPLETIONS, body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    check_legacy(choice, len(ids))
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    assert all(x < 0 for x in choice["logprobs"]["token_logprobs"][1:])
    assert live.ask(COMPLETIONS, body)["usage"]["completion_tokens"] == 0

    body["max_tokens"] = 3
    longer = live.ask(COMPLETIONS, body | {"temperature": 0})
    check_legacy(longer["choices"][0], len(ids) + 3)
    known = choice["logprobs"]["token_logprobs"]
    assert longer["choices"][0]["logprobs"]["token_logprobs"][: len(ids)] == known

    by_ids = live.ask(COMPLETIONS, body | {"prompt": ids, "temperature": 0})
    assert by_ids["choices"] == longer["choices"]
    check_streamed_echo(live, body | {"temperature": 0}, longer["choices"][0])

    plain = live.ask(COMPLETIONS, body | {"echo": False, "temperature": 0})["choices"][0]
    assert text + plain["text"] == longer["choices"][0]["text"]
    check_legacy(plain, 3)


def check_streamed_echo(live: LiveServer, body: dict[str, Any], whole: dict[str, Any]) -> None:
    chunks = chunks_by_index(live.stream(COMPLETIONS, body))[0]
    assert chunks[0]["text"].startswith(body["prompt"])
    assert "".join(c["text"] for c in chunks) == whole["text"]
    for key, values in whole["logprobs"].items():
        assert [x for c in chunks for x in c["logprobs"][key]] == values


def test_b005_echo_for_every_choice_and_prompt(live: LiveServer) -> None:
    body = completion(["The fox", "hello"], echo=True, logprobs=0, max_tokens=2, n=2, seed=3)
    choices = live.ask(COMPLETIONS, body)["choices"]
    assert [c["text"].startswith(p) for c, p in zip(choices, ["The fox"] * 2 + ["hello"] * 2, strict=True)]
    for choice in choices:
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert all(len(t) == 1 for t in choice["logprobs"]["top_logprobs"][1:])
        check_legacy(choice, len(choice["logprobs"]["tokens"]))
    assert (
        live.ask(COMPLETIONS, completion("hello", echo=True, max_tokens=0))["choices"][0]["text"] == "hello"
    )


def test_b017_bytes_are_the_tokens_own(live: LiveServer) -> None:
    said = "a🫠é"
    live.model.force(chat_ids("emoji"), [*said.encode(), EOS])
    body = chat("emoji", logprobs=True, top_logprobs=5, max_tokens=20)
    choice = live.ask(CHAT, body)["choices"][0]
    assert choice["message"]["content"] == said
    entries = choice["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]) == said.encode()
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5
        assert all(bool(t["bytes"]) == bool(t["token"]) for t in entry["top_logprobs"])
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    streamed = chunks_by_index(live.stream(CHAT, body))[0]
    assert [e for c in streamed if c["logprobs"] for e in c["logprobs"]["content"]] == entries
    assert "�" not in "".join(map(text_of, streamed))

    legacy = live.ask(COMPLETIONS, completion(chat_ids("emoji"), logprobs=2, max_tokens=20))["choices"][0]
    assert legacy["text"] == said
    assert legacy["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 2]  # parts of a character share its place


def test_b060_impossible_tokens_are_strict_json(live: LiveServer) -> None:
    bias = live.model.bias.clone()
    try:
        live.model.bias[:] = -float("inf")
        live.model.bias[97:100] = 0.0
        body = chat(logprobs=True, top_logprobs=20, top_k=1, temperature=1e-6, max_tokens=2)
        for entry in live.ask(CHAT, body)["choices"][0]["logprobs"]["content"]:
            values = [t["logprob"] for t in entry["top_logprobs"]]
            assert len(values) == 20 and values[3:] == [-9999.0] * 17 and entry["logprob"] > -50
        body = completion("zz", logprobs=20, echo=True, max_tokens=1)
        logprobs = live.ask(COMPLETIONS, body)["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][1] == -9999.0
    finally:
        live.model.bias[:] = bias


def test_logprobs_do_not_depend_on_temperature(live: LiveServer) -> None:
    replies = [
        live.ask(CHAT, chat(logprobs=True, top_logprobs=3, max_tokens=1, temperature=t, seed=1))
        for t in (0, 0.5, 2)
    ]
    tops = [r["choices"][0]["logprobs"]["content"][0]["top_logprobs"] for r in replies]
    assert tops[0] == tops[1] == tops[2]


def test_prompt_logprobs_in_vllm_shape(live: LiveServer) -> None:
    reply = live.ask(COMPLETIONS, completion("The fox", prompt_logprobs=2, max_tokens=1))
    first, second = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    own = str(TOKENIZER.encode("The fox")[1])
    assert second[own]["decoded_token"] == " fox" and second[own]["rank"] > 0 and len(second) in (2, 3)
    assert live.ask(CHAT, chat(prompt_logprobs=0, max_tokens=1))["prompt_logprobs"][0] is None
    assert live.post(CHAT, chat(prompt_logprobs=1, stream=True)).error["param"] == "prompt_logprobs"
