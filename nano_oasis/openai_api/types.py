"""The bodies of API requests, as typed structs.

Owns: which fields exist and their JSON types. None stands for absent and for an explicit null.
Must not know: limits, what fields mean, sockets. Fields not named here are skipped unread.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Names and meaning of vLLM.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    # Ours: how this request's KV is kept and read.
    kv_mode: str | None = None
    kv_budget: int | None = None
    miss_policy: str | None = None
    # Known, but so far accepted only with a value that changes nothing: see parse.NOT_SUPPORTED.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: Any = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    early_stopping: Any = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logits_processors: Any = None
    cache_salt: Any = None
    cache_prompt: bool | None = None
    priority: int | None = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    # One list type for strings, ids and lists of ids: parse._prompts tells them apart.
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    messages: list[Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    include_reasoning: bool | None = None
    verbosity: Any = None
    web_search_options: Any = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """/tokenize: a prompt, or messages to be rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    mm_processor_kwargs: Any = None
    tools: Any = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None
