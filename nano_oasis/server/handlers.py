"""The endpoints: each reads a body, asks the engine, and answers.

Owns: the routes and the order check -> encode -> submit -> headers, so that whatever can be refused
is refused with a status. Must not know: JSON details of replies, delivery, loading, signals.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

import nano_oasis
from nano_oasis import openai_api as api
from nano_oasis.metrics import CONTENT_TYPE
from nano_oasis.openai_api import ApiError, Call, Reply
from nano_oasis.request import RequestError
from nano_oasis.server.app import STATE, ServerState, json_response
from nano_oasis.server.body import read_body
from nano_oasis.server.stream import EventMerge, plain_reply, streamed_reply


async def completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[STATE].ready_engine()
    body = api.decode(await read_body(request), api.CompletionRequest)
    api.check_model(body.model, engine.model_name)
    call = api.parse_completion(body)
    prompts = [
        prompt if isinstance(prompt, list) else await _encode(request.app[STATE], prompt, call)
        for prompt in call.prompts
    ]
    texts = await _echo_texts(request.app[STATE], call) if call.echo else [""] * len(prompts)
    reply = api.CompletionReply(call, engine.model_name, engine.tokenizer, prompts, texts)
    return await _answer(request, call, reply)


async def _encode(state: ServerState, text: str, call: Call) -> list[int]:
    """Token ids of a prompt. Megabytes that can never fit are refused without being tokenized."""
    engine = state.ready_engine()
    limit = engine.max_model_len * state.longest_token
    if len(text) > limit:
        message = (
            f"prompt has {len(text)} characters, but the context limit of {engine.max_model_len} tokens "
            f"holds {limit} characters at most"
        )
        raise ApiError(400, message, "prompt", "context_length_exceeded")
    return await engine.encode(text, add_special_tokens=call.add_special_tokens)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[STATE].ready_engine()
    body = api.decode(await read_body(request), api.ChatRequest)
    api.check_model(body.model, engine.model_name)
    call = api.parse_chat(body)
    prompt = await engine.encode_chat(call.messages or [])
    return await _answer(request, call, api.ChatReply(call, engine.model_name, engine.tokenizer, [prompt]))


async def _answer(request: web.Request, call: Call, reply: Reply) -> web.StreamResponse:
    engine = request.app[STATE].ready_engine()  # again: it may have stopped while we encoded
    streams = []
    try:
        for prompt in reply.prompts:
            streams.append(engine.submit(prompt, call.params))
    except Exception as error:
        for stream in streams:
            stream.abort()
        if isinstance(error, RequestError):
            raise _refusal(error, call, len(prompt) >= engine.max_model_len) from None
        raise
    async with EventMerge(streams, call.params.n) as merge:
        if call.stream:
            return await streamed_reply(request, merge, reply)
        return await plain_reply(merge, reply)


def _refusal(error: RequestError, call: Call, too_long: bool) -> ApiError:
    """The engine's refusal in terms of the fields the client sent."""
    param = "messages" if call.is_chat and error.param == "prompt" else error.param
    return ApiError(400, str(error), param, "context_length_exceeded" if too_long else "invalid_value")


async def _echo_texts(state: ServerState, call: Call) -> list[str]:
    """Per prompt: the text as it was sent, or the decoded ids."""
    tokenizer, skip = state.ready_engine().tokenizer, call.params.skip_special_tokens

    def texts() -> list[str]:
        return [
            p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=skip) for p in call.prompts
        ]

    return await asyncio.to_thread(texts)


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    api.check_model(request.match_info["id"], state.ready_engine().model_name)
    return json_response(_model(state))


def _model(state: ServerState) -> dict[str, object]:
    engine = state.ready_engine()
    return {
        "id": engine.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "nano_oasis",
        "max_model_len": engine.max_model_len,
    }


async def tokenize(request: web.Request) -> web.Response:
    engine = request.app[STATE].ready_engine()
    body = api.parse_tokenize(api.decode(await read_body(request), api.TokenizeRequest))
    api.check_model(body.model, engine.model_name)
    if body.prompt is not None:
        ids = await engine.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = await engine.encode_chat(body.messages or [])

    def reply() -> web.Response:
        texts = [engine.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": engine.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    return await asyncio.to_thread(reply)


async def detokenize(request: web.Request) -> web.Response:
    engine = request.app[STATE].ready_engine()
    body = api.decode(await read_body(request), api.DetokenizeRequest)
    api.check_model(body.model, engine.model_name)
    ids = api.parse_detokenize(body, engine.model_config.vocab_size)
    text = await asyncio.to_thread(engine.tokenizer.decode, ids, skip_special_tokens=False)
    return json_response({"prompt": text})


async def health(request: web.Request) -> web.Response:
    state = request.app[STATE].health()
    if state != "ok":
        raise ApiError(503, f"the server is not ready: {state}", code=state)
    return json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if state.engine is None or not state.loaded:
        raise ApiError(503, "there are no metrics before the model is loaded", code="loading")
    return web.Response(body=state.engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def version(request: web.Request) -> web.Response:
    return json_response({"version": nano_oasis.__version__})


ROUTES = [
    web.post("/v1/completions", completions),
    web.post("/v1/chat/completions", chat_completions),
    web.get("/v1/models", models),
    web.get("/v1/models/{id:.+}", model),
    web.post("/tokenize", tokenize),
    web.post("/detokenize", detokenize),
    web.get("/health", health),
    web.get("/metrics", metrics),
    web.get("/version", version),
]
