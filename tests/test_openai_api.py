"""Bodies to calls, and token events to replies: no sockets, no engine."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import EOS, ByteTokenizer

from nano_oasis import openai_api as api
from nano_oasis.openai_api.parse import NOT_SUPPORTED
from nano_oasis.openai_api.render import finite
from nano_oasis.request import RequestError, SamplingParams, TokenEvent, TokenLogprob

TOKENIZER: Any = ByteTokenizer()


def completion(**fields: Any) -> api.Call:
    return api.parse_completion(
        api.decode(msgspec.json.encode({"prompt": "a"} | fields), api.CompletionRequest)
    )


def chat(**fields: Any) -> api.Call:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    return api.parse_chat(api.decode(msgspec.json.encode(body), api.ChatRequest))


PARSERS: dict[str, Any] = {"completion": completion, "chat": chat}


# --- bodies ---------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_api() -> None:
    assert completion().params == SamplingParams(max_tokens=16)
    assert chat().params == SamplingParams(max_tokens=None)
    call = completion()
    assert (call.stream, call.include_usage, call.echo, call.logprobs) == (False, False, False, None)
    assert call.add_special_tokens


def test_every_field_reaches_the_sampling_parameters() -> None:
    fields: dict[str, Any] = dict(
        n=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=5, max_tokens=9, min_tokens=2,
        stop=["x"], stop_token_ids=[4], ignore_eos=True, skip_special_tokens=False,
        kv_mode="oasis", kv_budget=512, miss_policy="skip",
    )  # fmt: skip
    assert chat(**fields).params == completion(**fields).params == SamplingParams(**fields)


def test_logprobs_of_both_endpoints() -> None:
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=3, echo=True).params.prompt_logprobs == 3
    assert completion(logprobs=3).params.prompt_logprobs is None
    assert completion(logprobs=3, echo=True, prompt_logprobs=5).params.prompt_logprobs == 5
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_unsupported_fields_are_refused_by_name_unless_they_are_off(name: str) -> None:
    request = {"completion": api.CompletionRequest, "chat": api.ChatRequest}
    known = [k for k, type in request.items() if name in type.__struct_fields__]
    assert known, "a refused field must exist in some request"
    hints: dict[str, Any] = {"suffix": "x", "truncate_prompt_tokens": 5, "priority": 1}
    for kind in known:
        field_type = {f.name: f.type for f in msgspec.structs.fields(request[kind])}[name]
        value = hints.get(name)
        if value is None:
            value = next(
                v
                for v in (0.5, True, False, {"a": 1})
                if _fits(v, field_type) and v not in NOT_SUPPORTED[name]
            )
        with pytest.raises(api.ApiError) as refused:
            PARSERS[kind](**{name: value})
        assert refused.value.param == name and name in refused.value.message
        assert refused.value.status == 400
        for off in (None, *NOT_SUPPORTED[name]):
            assert PARSERS[kind](**{name: off}).params == PARSERS[kind]().params


def _fits(value: Any, type: Any) -> bool:
    try:
        msgspec.convert(value, type)
    except msgspec.ValidationError:
        return False
    return True


def test_fields_ignored_by_rule_are_not_even_typed() -> None:
    for name in ("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"):
        assert chat(**{name: [1, {"any": "thing"}]}) == chat()


def test_prompt_shapes() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]


def test_stream_options() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={"include_usage": None}).include_usage
    for body in ({"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": 3}):
        with pytest.raises(api.ApiError) as refused:
            completion(**body)
        assert refused.value.param == "stream_options"
    with pytest.raises(api.ApiError, match="continuous_usage_stats"):
        completion(stream=True, stream_options={"continuous_usage_stats": True})


def test_the_name_in_an_error_is_the_one_that_was_sent() -> None:
    with pytest.raises(RequestError, match="max_completion_tokens must be") as error:
        chat(max_completion_tokens=-1)
    assert error.value.param == "max_completion_tokens"
    with pytest.raises(RequestError, match="top_logprobs must be") as error:
        chat(logprobs=True, top_logprobs=21)
    assert error.value.param == "top_logprobs"


def tokenize(**fields: Any) -> Any:
    return api.parse_tokenize(api.decode(msgspec.json.encode(fields), api.TokenizeRequest))


def detokenize(**fields: Any) -> Any:
    return api.parse_detokenize(api.decode(msgspec.json.encode(fields), api.DetokenizeRequest), 10)


@pytest.mark.parametrize(
    ("parser", "fields", "param"),
    [
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": []}, "prompt"),
        (completion, {"prompt": [[]]}, "prompt"),
        (completion, {"prompt": ["a", 1]}, "prompt"),
        (completion, {"prompt": ["a"] * 17, "n": 128}, "prompt"),
        (completion, {"stream_options": {}}, "stream_options"),
        (completion, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": None}, "messages"),
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (tokenize, {}, "prompt"),
        (tokenize, {"prompt": "a", "messages": [{}]}, "prompt"),
        (tokenize, {"messages": []}, "messages"),
        (detokenize, {}, "tokens"),
        (detokenize, {"tokens": [10]}, "tokens"),
        (detokenize, {"tokens": [-1]}, "tokens"),
    ],
)
def test_values_no_type_can_refuse_have_a_code_too(parser: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(api.ApiError) as refused:
        parser(**fields)
    error = refused.value
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")


def test_decoding_leaves_the_garbage_collector_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(api.ApiError):
        api.decode(b"[", api.ChatRequest)
    assert gc.isenabled()
    gc.disable()
    try:
        api.decode(b"{}", api.ChatRequest)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_model_names() -> None:
    api.check_model(None, "m")
    api.check_model("m", "m")
    for name in ("", "M", "m "):
        with pytest.raises(api.ApiError) as error:
            api.check_model(name, "m")
        assert (error.value.status, error.value.code) == (404, "model_not_found")


# --- replies --------------------------------------------------------------------------------------


def events(text: str, k: int = 1, end: int | None = None) -> list[TokenEvent]:
    """One event per token of `text`, and one for the end token."""
    result = []
    for i in TOKENIZER.encode(text):
        logprob = TokenLogprob(i, -1.0, 2, tuple((100 + j, -0.5 - j) for j in range(k)))
        result.append(TokenEvent(0, TOKENIZER.token_text(i), (i,), (logprob,)))
    if end is None:
        last = result.pop()
        result.append(TokenEvent(0, last.text, last.token_ids, last.logprobs, "length"))
    else:
        result.append(TokenEvent(0, "", (end,), (TokenLogprob(end, -0.1, 1),), "stop"))
    return result


def test_joining_events_is_joining_their_parts() -> None:
    parts = events("hello world!", end=EOS)
    parts[0] = TokenEvent(0, "hello", parts[0].token_ids, parts[0].logprobs, prompt_logprobs=(None,))
    whole = api.join_events(parts)
    assert (whole.text, whole.finish_reason) == ("hello world!", "stop")
    assert len(whole.token_ids) == len(whole.logprobs or ()) == len(parts)
    assert whole.prompt_logprobs == (None,)
    halves = api.join_events([api.join_events(parts[:2]), api.join_events(parts[2:])])
    assert halves == whole
    assert api.join_events([TokenEvent(0, "a"), TokenEvent(0, "b")]).logprobs is None


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_stream_adds_up_to_the_whole_reply(cut: int) -> None:
    parts = events("The quick brown fox", end=EOS)
    call = completion(logprobs=1, echo=True)

    def reply() -> api.CompletionReply:
        return api.CompletionReply(call, "m", TOKENIZER, [[104, 105]], ["hi"])

    whole = reply().whole({0: api.join_events(parts)})
    streamed = reply()
    groups = [parts[i : i + cut] for i in range(0, len(parts), cut)]
    chunks = [c for g in groups for c in streamed.chunks({0: api.join_events(g)})]
    choices = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"] == "hiThe quick brown fox"
    for key, values in whole["choices"][0]["logprobs"].items():
        assert [x for c in choices for x in c["logprobs"][key]] == values
    assert streamed.usage() == whole["usage"]


def test_chosen_token_is_always_among_the_alternatives_of_completions() -> None:
    reply = api.CompletionReply(completion(logprobs=2), "m", TOKENIZER, [[1]], [""])
    (first,) = reply.whole({0: api.join_events(events("z", k=5))})["choices"][0]["logprobs"]["top_logprobs"]
    assert first == {"d": -0.5, "e": -1.5, "z": -1.0}


def test_offsets_pass_over_special_tokens_that_the_text_hides() -> None:
    ids = [302, *TOKENIZER.encode("hello"), 300, *TOKENIZER.encode("é!")]
    for text, wanted in (
        ("helloé!", [0, 0, 5, 5, 5, 6]),
        (TOKENIZER.decode(ids, skip_special_tokens=False), None),
    ):
        reply = api.CompletionReply(completion(logprobs=0, echo=True), "m", TOKENIZER, [ids], [text])
        got = reply.whole({0: TokenEvent(0, finish_reason="length")})["choices"][0]["logprobs"]["text_offset"]
        assert got == (wanted or [0, 13, 18, 25, 25, 26])


def test_a_stop_string_keeps_its_tokens_and_an_end_token_does_not() -> None:
    logprob = TokenLogprob(65, -1.0, 1)
    for reason, stop, shown in (("stop", "A", 2), ("stop", None, 1), ("stop", 65, 1), ("length", None, 2)):
        event = TokenEvent(0, "x", (65, 65), (logprob, logprob), reason, stop)
        reply = api.ChatReply(chat(logprobs=True), "m", TOKENIZER, [[1]])
        assert len(reply.whole({0: event})["choices"][0]["logprobs"]["content"]) == shown
        assert reply.usage()["completion_tokens"] == 2


def test_silent_events_make_no_chunk() -> None:
    reply = api.ChatReply(chat(), "m", TOKENIZER, [[1]])
    assert reply.chunks({0: TokenEvent(0, "", (65,))}) == []
    assert reply.usage()["completion_tokens"] == 1
    assert len(reply.chunks({0: TokenEvent(0, "", (65,), finish_reason="length")})) == 1


def test_usage_adds_up_the_kv_bytes_of_all_choices_where_there_are_two_tiers() -> None:
    reply = api.ChatReply(chat(n=2), "m", TOKENIZER, [[1]])
    reply.chunks(
        {0: TokenEvent(0, "x", (65,)), 1: TokenEvent(1, "y", (66,), finish_reason="stop", kv_bytes=(10, 300))}
    )
    assert reply.usage()["kv_bytes"] == {"device": 10, "host": 300}
    reply.chunks({0: TokenEvent(0, "x", (65,), finish_reason="stop", kv_bytes=(1, 20))})
    assert reply.usage()["kv_bytes"] == {"device": 11, "host": 320}
    assert "kv_bytes" not in api.ChatReply(chat(n=2), "m", TOKENIZER, [[1]]).usage()


def test_cached_tokens_are_those_of_each_prompts_first_choice() -> None:
    reply = api.CompletionReply(
        completion(n=2, prompt=["a", "b"]), "m", TOKENIZER, [[1] * 9, [2] * 5], ["", ""]
    )
    for index, cached in enumerate((4, 8, 0, 4)):
        reply.chunks({index: TokenEvent(index % 2, "x", (65,), num_cached_tokens=cached)})
    assert reply.usage() == {
        "prompt_tokens": 14,
        "completion_tokens": 4,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_b060_only_finite_logprobs_leave() -> None:
    assert [finite(x) for x in (-1.5, 0.0, -math.inf, math.nan, -1e9)] == [
        -1.5,
        0.0,
        -9999.0,
        -9999.0,
        -9999.0,
    ]


def test_error_shape() -> None:
    error = msgspec.json.decode(api.ApiError(503, "m", code="c").body())
    assert error == {"error": {"message": "m", "type": "server_error", "param": None, "code": "c"}}
    assert api.ApiError(404, "m").type == "invalid_request_error"


def test_the_rule_book_names_every_field() -> None:
    text = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    for type in (api.CompletionRequest, api.ChatRequest, api.TokenizeRequest, api.DetokenizeRequest):
        for name in type.__struct_fields__:
            assert f"`{name}`" in text or f'{{"{name}"}}' in text, name
