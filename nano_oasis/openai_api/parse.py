"""From a request body to a call the engine can run, or an ApiError that says what is wrong.

Owns: strict JSON, field checks, defaults, what is refused by name, and the mapping to SamplingParams.
Must not know: sockets, the tokenizer, the engine.
"""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from nano_oasis.openai_api.errors import ApiError
from nano_oasis.openai_api.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from nano_oasis.request import RequestError, SamplingParams

MAX_CHOICES = 2048  # prompts x n in one call
DEFAULT_COMPLETION_TOKENS = 16

# Fields of the OpenAI API or of vLLM that would change the reply and that this server cannot honour.
# They are refused by name, except with the listed values, which mean "off" (null always does).
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structured_outputs": (),
    "structural_tag": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "cache_salt": (),
    "cache_prompt": (True,),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    # completions
    "suffix": ("",),
    "prompt_embeds": (),
    # chat
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}


# Fields that go to SamplingParams under their own name.
_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "kv_mode", "kv_budget", "miss_policy",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A checked call. Completions have `prompts` (text or token ids), chats have `messages`."""

    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[Any] | None = None
    echo: bool = False
    logprobs: int | None = None  # how many alternatives to show per token; None = no logprobs
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


S = TypeVar("S", bound=msgspec.Struct)


def decode(body: bytes, type: type[S]) -> S:
    """Strict JSON to a struct. Raises ApiError(400) that names the field and the type it must have."""
    # Megabytes of nested lists would set off the garbage collector thousands of times, all in vain:
    # the decoder makes no cycles. (A thread would not help: the decoder holds the interpreter lock.)
    collecting = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, _malformed(body, str(error)), code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    finally:
        if collecting:
            gc.enable()


def _wrong_type(message: str) -> ApiError:
    """msgspec's "Expected `int | null`, got `str` - at `$.stop[0]`" in the words of the API."""
    what, _, path = message.replace("`", "").partition(" - at $")
    what = what[0].lower() + what[1:].replace(" | null", "").replace(" | ", " or ")
    path = path.lstrip(".")
    if not path:
        return ApiError(400, f"the body must be a JSON object: {what}", code="invalid_type")
    return ApiError(400, f"{path}: {what}", re.split(r"[.\[]", path)[0], "invalid_type")


def _malformed(body: bytes, message: str) -> str:
    """Why this is no JSON; names NaN and Infinity, which some JSON writers produce."""
    where = re.search(r"\(byte (\d+)\)", message)
    if where:
        before, rest = body[: int(where[1])], body[int(where[1]) :]
        word = re.match(rb"NaN|Infinity", rest)
        if word:
            key = re.search(rb'"([^"\\]{1,64})"\s*:\s*\[?\s*(-?)$', before)
            sign = key[2].decode() if key else ""
            name = f"{key[1].decode('utf-8', 'replace')}: " if key else ""
            return f"{name}{sign}{word[0].decode()} is not JSON; numbers must be finite"
    if "truncated" in message and re.search(rb"\\u[dD][89a-fA-F]", body):
        return "the body is not valid JSON: it is cut off, or a string escapes half a surrogate pair"
    return f"the body is not valid JSON: {message}"


def check_model(name: str | None, served: str) -> None:
    """An absent name means the one served model. Raises ApiError(404) for any other name."""
    if name is not None and name != served:
        message = f"the model {name!r} does not exist; this server has {served!r}"
        raise ApiError(404, message, "model", "model_not_found")


def parse_completion(request: CompletionRequest) -> Call:
    """Raises ApiError(400) or RequestError naming the field."""
    refuse_unsupported(request)
    prompts = _prompts(request.prompt)
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        message = f"best_of must equal n ({n}), got {request.best_of}: choosing among more is not supported"
        raise ApiError(400, message, "best_of", "unsupported_value")
    limit = _limit(request, DEFAULT_COMPLETION_TOKENS)
    echo = bool(request.echo)
    asked = [k for k in (request.prompt_logprobs, request.logprobs if echo else None) if k is not None]
    params = _sampling(request, limit, request.logprobs, max(asked, default=None))
    if len(prompts) * n > MAX_CHOICES:
        message = f"one call may ask for {MAX_CHOICES} choices (prompts x n), got {len(prompts)} x {n}"
        raise _invalid(message, "prompt")
    return Call(
        params=params,
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        prompts=prompts,
        echo=echo,
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        add_special_tokens=request.add_special_tokens is not False,
    )


def parse_chat(request: ChatRequest) -> Call:
    """Raises ApiError(400) or RequestError naming the field."""
    refuse_unsupported(request)
    for name in ("echo", "add_special_tokens"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not supported for chat; leave it out", name, "unsupported_value")
    messages = _messages(request.messages)
    top = request.top_logprobs
    if top and not request.logprobs:
        raise _invalid("top_logprobs needs logprobs: true", "top_logprobs")
    shown = (top or 0) if request.logprobs else None
    try:
        params = _sampling(request, _limit(request, None), shown, request.prompt_logprobs)
    except RequestError as error:
        if error.param == "logprobs":
            raise RequestError(str(error).replace("logprobs", "top_logprobs", 1), "top_logprobs") from None
        raise
    return Call(
        params=params,
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        messages=messages,
        logprobs=shown,
        prompt_logprobs=_prompt_logprobs(request),
    )


def parse_tokenize(request: TokenizeRequest) -> TokenizeRequest:
    """Exactly one of prompt and messages. Raises ApiError(400)."""
    refuse_unsupported(request)
    if (request.prompt is None) == (request.messages is None):
        raise _invalid("give either prompt or messages", "prompt")
    if request.prompt is None:
        _messages(request.messages)
    return request


def parse_detokenize(request: DetokenizeRequest, vocab_size: int) -> list[int]:
    """Token ids, each in [0, vocab_size). Raises ApiError(400)."""
    if request.tokens is None:
        raise _invalid("tokens is required: a list of token ids", "tokens")
    for token in request.tokens:
        if not 0 <= token < vocab_size:
            raise _invalid(f"token ids must be between 0 and {vocab_size - 1}, got {token}", "tokens")
    return request.tokens


def refuse_unsupported(request: msgspec.Struct) -> None:
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is None or name not in NOT_SUPPORTED or value in NOT_SUPPORTED[name]:
            continue
        allowed = " or ".join(msgspec.json.encode(v).decode() for v in NOT_SUPPORTED[name])
        advice = f"leave it out or set it to {allowed}" if allowed else "leave it out"
        raise ApiError(400, f"{name} is not supported yet; {advice}", name, "unsupported_parameter")


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, param, "invalid_value")


def _messages(messages: list[Any] | None) -> list[Any]:
    """Present and not empty; what a message must look like is for the tokenizer to say."""
    if not messages:
        raise _invalid("messages is required: a non-empty list of messages", "messages")
    return messages


def _prompts(value: str | list[Any] | None) -> list[str | list[int]]:
    """The four shapes of a prompt as a list of texts and id lists."""
    shapes = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if value is None:
        raise _invalid(f"prompt is required: {shapes}", "prompt")
    if isinstance(value, str):
        return [value]
    kinds = {type(item) for item in value}
    if len(kinds) != 1 or [] in value:
        raise _invalid(f"prompt must be {shapes}; nothing may be empty or mixed", "prompt")
    return [value] if kinds == {int} else value


def _limit(request: GenerateRequest, default: int | None) -> int | None:
    """max_completion_tokens is the newer name and wins where both are given."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return default if request.max_tokens is None else request.max_tokens


def _sampling(
    request: GenerateRequest, limit: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Fields that were given override the defaults of SamplingParams."""
    given = {k: v for k in _SAMPLING_FIELDS if (v := getattr(request, k)) is not None}
    try:
        return SamplingParams(max_tokens=limit, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
    except RequestError as error:
        if error.param == "max_tokens" and request.max_completion_tokens is not None:
            message = str(error).replace("max_tokens", "max_completion_tokens", 1)
            raise RequestError(message, "max_completion_tokens") from None
        raise


def _include_usage(request: GenerateRequest) -> bool:
    options = request.stream_options
    if options is None:
        return False
    if not request.stream:
        raise _invalid("stream_options needs stream: true", "stream_options")
    if options.continuous_usage_stats:
        message = "stream_options.continuous_usage_stats is not supported yet; leave it out"
        raise ApiError(400, message, "stream_options", "unsupported_parameter")
    return bool(options.include_usage)


def _prompt_logprobs(request: GenerateRequest) -> int | None:
    if request.prompt_logprobs is not None and request.stream:
        raise _invalid("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    return request.prompt_logprobs
