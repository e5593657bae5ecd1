"""Text to token ids and back, and chats to prompts."""

from nano_oasis.tokenizer.base import Tokenizer, TokenizerError
from nano_oasis.tokenizer.chat_template import TemplateError
from nano_oasis.tokenizer.incremental import IncrementalDecoder
from nano_oasis.tokenizer.load import load_tokenizer

__all__ = ["IncrementalDecoder", "TemplateError", "Tokenizer", "TokenizerError", "load_tokenizer"]
