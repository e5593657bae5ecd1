"""tokenizer.json of the `tokenizers` library.

Owns: reading it, and recognising decoders whose tokens have bytes of their own.
Must not know: the other files of a model folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from nano_oasis.tokenizer.base import TokenizerError
from nano_oasis.tokenizer.bpe import (
    TokenizersBackend,
    mark_special,
    spell_byte_fallback,
    spell_byte_level,
    spell_metaspace,
)


class _Head(msgspec.Struct):
    """The part of the file that is read here; the library reads the rest."""

    decoder: dict[str, Any] | None = None


def load_hf_json(path: Path, special: Iterable[str]) -> tuple[TokenizersBackend, list[int], list[int]]:
    """-> (backend, ids the file's post-processor puts before a text, and after it).

    `special`: spellings that other files call special. Raises TokenizerError.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        head = msgspec.json.decode(path.read_bytes(), type=_Head)
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{path}: not a usable tokenizer.json: {error}") from error
    spell, strips = _decoder(head.decoder, path)
    mark_special(tokenizer, special)
    prefix, suffix = _around(tokenizer, path)
    return TokenizersBackend(tokenizer, spell, strips), prefix, suffix


def _decoder(decoder: dict[str, Any] | None, path: Path) -> tuple[Callable[[str], bytes], bool]:
    """What bytes tokens stand for, and whether decoding drops a space at the start.

    Only decoders that work token by token are accepted: others (WordPiece, CTC ...) look at neighbours,
    and their text cannot be handed out while it grows.
    """
    steps = decoder.get("decoders", []) if decoder and decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] if step else "none" for step in steps]
    if names == ["ByteLevel"]:
        return spell_byte_level, False
    spaces, strips, bytes_too = False, False, False
    for step, name in zip(steps, names, strict=True):
        if name == "Replace" and step["pattern"] == {"String": "▁"} and step["content"] == " ":
            spaces = True
        elif name == "Metaspace" and step.get("replacement") == "▁":
            spaces = True
            strips |= step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
        elif name == "Strip" and step["content"] == " " and (step["start"], step["stop"]) == (1, 0):
            strips = True
        elif name == "ByteFallback":
            bytes_too = True
        elif name != "Fuse":
            spaces = False
            break
    if not spaces:
        raise TokenizerError(
            f"{path}: decoder {' + '.join(names)} is not supported; supported are ByteLevel, Metaspace, and "
            "Replace('▁' by ' ') with ByteFallback, Fuse and Strip(' ', 1, 0)"
        )
    return spell_byte_fallback if bytes_too else spell_metaspace, strips


def _around(tokenizer: tokenizers.Tokenizer, path: Path) -> tuple[list[int], list[int]]:
    """What the post-processor adds to a text: BOS, EOS or nothing, as a rule."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare and (bare or not full):
            return full[:start], full[start + len(bare) :]
    raise TokenizerError(f"{path}: cannot tell what the post-processor adds: 'a' is {bare}, with it {full}")
