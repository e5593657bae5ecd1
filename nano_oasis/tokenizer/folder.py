"""The small JSON files and templates of a model folder that say how its tokenizer is used.

Owns: their schemas, and what they say. Must not know: vocabularies, algorithms.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from nano_oasis.tokenizer.added_tokens import AddedToken
from nano_oasis.tokenizer.base import TokenizerError


class TokenEntry(msgspec.Struct):
    """A token written as an object, with its flags."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


Token = str | TokenEntry | None


class NamedTemplate(msgspec.Struct):
    name: str
    template: str


class SpecialTokens(msgspec.Struct):
    """special_tokens_map.json, and the same keys of tokenizer_config.json."""

    bos_token: Token = None
    eos_token: Token = None
    unk_token: Token = None
    pad_token: Token = None
    sep_token: Token = None
    cls_token: Token = None
    mask_token: Token = None
    additional_special_tokens: list[str | TokenEntry] | None = None

    def spellings(self) -> dict[str, str]:
        """{"bos_token": "<s>", ...} of those that are set."""
        named = ((name, text_of(getattr(self, name))) for name in SpecialTokens.__struct_fields__[:-1])
        return {name: text for name, text in named if text}


class TokenizerConfig(SpecialTokens):
    """tokenizer_config.json; other keys are for other programs."""

    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    legacy: bool | None = None
    chat_template: str | list[NamedTemplate] | None = None
    added_tokens_decoder: dict[int, TokenEntry] = {}


class ModelEnds(msgspec.Struct):
    """The end tokens of config.json and generation_config.json."""

    eos_token_id: int | list[int] | None = None
    text_config: ModelEnds | None = None

    def ids(self) -> set[int]:
        own = self.eos_token_id
        ids = {own} if isinstance(own, int) else set(own or ())
        return ids | self.text_config.ids() if self.text_config else ids


def text_of(token: Token) -> str | None:
    return token.content if isinstance(token, TokenEntry) else token


T = TypeVar("T")


def read_json(path: Path, type: type[T]) -> T:
    """A JSON file as `type`; a file that is not there is an empty object. Raises TokenizerError."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=type)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: {error}") from error


def extra_tokens(folder: Path, config: TokenizerConfig) -> list[AddedToken]:
    """Tokens that a folder adds to its tokenizer.model, from tokenizer_config.json or added_tokens.json."""
    special = {*config.spellings().values(), *map(text_of, config.additional_special_tokens or ())}
    older = read_json(folder / "added_tokens.json", dict[str, int])
    tokens = [AddedToken(id, text, text in special) for text, id in older.items()]
    for id, t in config.added_tokens_decoder.items():
        tokens.append(AddedToken(id, t.content, t.special, t.lstrip, t.rstrip, t.single_word))
    return tokens


def templates(folder: Path, config: TokenizerConfig) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja, else tokenizer_config.json's one, or several."""
    declared = config.chat_template
    if isinstance(declared, list):
        found = {entry.name: entry.template for entry in declared}
    else:
        found = {"default": declared} if declared else {}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                found[name] = file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{file}: {error}") from error
    return found
