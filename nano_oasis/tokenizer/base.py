"""The tokenizer as the rest of the engine sees it: text to ids and back, and chats to ids.

Owns: Tokenizer, the rules of special tokens, and the one rule of decoding.
Must not know: file formats, tokenization algorithms, models.

Decoding is defined on bytes: the tokens' bytes are joined and read as UTF-8, malformed parts becoming
U+FFFD. The same rule serves whole and incremental decoding (incremental.py), so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nano_oasis.request import RequestError
from nano_oasis.tokenizer.added_tokens import AddedToken, AddedTokens
from nano_oasis.tokenizer.chat_template import ChatTemplate, TemplateError
from nano_oasis.tokenizer.messages import ContentGuard, normalise_messages

NO_TEMPLATE = "this model has no chat template: give one with --chat-template, or use text completion"


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded. The message names the file and what is wrong with it."""


class Backend(Protocol):
    """What a tokenizer library must provide. Ids are non-negative ints; texts are valid Unicode."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""

    @property
    def added(self) -> Sequence[AddedToken]:
        """Tokens matched by their spelling."""

    @property
    def strips_first_space(self) -> bool:
        """Whether the first space of a decoded text was put there by the encoder."""

    def encode(self, text: str) -> list[int]:
        """All of `text`, the spellings of added tokens becoming those tokens."""

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """A text given as stretches and special ids: no stretch yields a special id."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token; 0 <= id < vocab_size."""


class Tokenizer:
    """Text to token ids and back.

    Encoding raises RequestError for text that is not a string or holds lone surrogates (not Unicode text).
    Made by load_tokenizer; immutable, and safe to use from several threads.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        template: ChatTemplate | None = None,
        allow_special_in_content: bool = False,
    ) -> None:
        self._backend = backend
        self.vocab_size = backend.vocab_size
        self.bos_id = bos_id
        self.eos_ids = eos_ids  # tokens that end a text or a turn
        self.special_ids = frozenset(token.id for token in backend.added if token.special)
        self.strips_first_space = backend.strips_first_space
        self._special = AddedTokens(token for token in backend.added if token.special)
        self._prefix, self._suffix = list(prefix_ids), list(suffix_ids)
        self._template = template
        self._allow_special_in_content = allow_special_in_content

    @property
    def chat_template(self) -> str | None:
        """Source of the (default) chat template."""
        return self._template.source if self._template else None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: put BOS and EOS where the tokenizer's configuration says, and only there. Text
        that already starts with the BOS spelling then gets two, as in the reference implementations.
        parse_special: the spelling of a control token is that token; otherwise it stays plain text.
        """
        _check_text(text, "prompt")
        ids = self._backend.encode(text) if parse_special else self._backend.encode_pieces([text])
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary are nothing, malformed UTF-8 is U+FFFD."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(id) for id in ids if id not in hidden])
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token adds to a text. A control token: its spelling; outside the vocabulary: none."""
        return self._backend.token_bytes(id) if 0 <= id < self.vocab_size else b""

    def token_text(self, id: int) -> str:
        """The token for display; a token that is part of a character shows as U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text the chat template makes of a conversation. `kwargs` are variables for the template.

        Raises RequestError for messages that are not well formed, TemplateError with the template's message.
        """
        conversation = normalise_messages(messages)
        return self._render(conversation, tools, add_generation_prompt, kwargs)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of the rendered conversation; the template writes its own BOS, so none is added.

        Control tokens come from the template alone: text of messages, tools and kwargs that spells one
        stays text (`allow_special_in_content` at loading time turns this off). Otherwise the ids are
        those of the rendered text. Errors as render_chat.
        """
        conversation = normalise_messages(messages)
        guard = ContentGuard(None if self._allow_special_in_content else self._special.pattern)
        text = self._render(
            guard.hide(conversation), guard.hide(tools), add_generation_prompt, guard.hide(kwargs)
        )
        _check_text(text, "messages")
        if not guard.hidden:
            return self._backend.encode(text)
        pieces = self._special.split(text)
        return self._backend.encode_pieces([guard.reveal(p) if isinstance(p, str) else p for p in pieces])

    def _render(self, conversation: Any, tools: Any, add_generation_prompt: bool, kwargs: Any) -> str:
        if self._template is None:
            raise TemplateError(NO_TEMPLATE)
        return self._template.render(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, variables=kwargs
        )


def _check_text(text: str, param: str) -> None:
    """Refuse what no tokenizer can encode."""
    if not isinstance(text, str):
        raise RequestError(f"{param} must be text, got {type(text).__name__}", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "text must be valid Unicode",
            param,
        ) from None
