"""The OpenAI API without sockets: types.py names fields, parse.py reads, render.py writes."""

from nano_oasis.openai_api.errors import ApiError
from nano_oasis.openai_api.parse import (
    Call,
    check_model,
    decode,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from nano_oasis.openai_api.render import ChatReply, CompletionReply, Reply, join_events
from nano_oasis.openai_api.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

__all__ = [
    "ApiError",
    "Call",
    "ChatReply",
    "ChatRequest",
    "CompletionReply",
    "CompletionRequest",
    "DetokenizeRequest",
    "Reply",
    "TokenizeRequest",
    "check_model",
    "decode",
    "join_events",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_tokenize",
]
