"""Tokenization by the `tokenizers` library: what a tokenizer.json and a GGUF's BPE vocabulary share.

Owns: the use of that library, and what bytes its tokens stand for.
Must not know: files, chats, which token is BOS.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Iterable, Sequence

import tokenizers

from nano_oasis.tokenizer.added_tokens import AddedToken


class TokenizersBackend:
    """Backend (see base.py) over a `tokenizers.Tokenizer`.

    `spell` gives the bytes of an ordinary token from its name in the vocabulary.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, spell: Callable[[str], bytes], strips_first_space: bool
    ) -> None:
        tokenizer.no_truncation()  # a tokenizer.json may carry its author's batch settings
        tokenizer.no_padding()
        self.strips_first_space = strips_first_space
        self.added = [
            AddedToken(id, t.content, t.special, t.lstrip, t.rstrip, t.single_word)
            for id, t in tokenizer.get_added_tokens_decoder().items()
        ]
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self._tokenizer = tokenizer
        self._spell = spell
        self._bytes = {t.id: t.text.encode() for t in self.added}  # a cache; filled as tokens are met
        # A random spelling, so that no text can hold it. See encode_pieces.
        self._gap = f"\ue000{secrets.token_hex(8)}\ue001"

    def encode(self, text: str) -> list[int]:
        return _ids(self._tokenizer, text)

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """As one text, in which each special id is marked by a token that no text can spell.

        Encoding the stretches one by one would be wrong: a prefix space, say, belongs to the first only.
        """
        plain = self._plain
        gap = plain.token_to_id(self._gap)
        special_ids = iter([p for p in pieces if isinstance(p, int)])
        text = "".join(self._gap if isinstance(p, int) else p for p in pieces)
        ids: list[int] = []
        for id in _ids(plain, text):
            if id == gap:
                ids.append(next(special_ids))
            elif id in self._special:
                ids += self._letters(id)
            else:
                ids.append(id)
        return ids

    def token_bytes(self, id: int) -> bytes:
        data = self._bytes.get(id)
        if data is None:
            name = self._tokenizer.id_to_token(id)
            data = self._bytes[id] = b"" if name is None else self._spell(name)
        return data

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second tokenizer, blind to special tokens (the library has no such setting per call)."""
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        plain.add_tokens([tokenizers.AddedToken(self._gap, normalized=False)])
        return plain

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        """Special ids that plain text must not yield; it may yield the unknown token."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        return frozenset(t.id for t in self.added if t.special and t.text != unknown)

    def _letters(self, id: int) -> list[int]:
        """The token's name letter by letter: merges of a converted vocabulary can happen to spell `</s>`."""
        name = self._tokenizer.id_to_token(id) or ""
        return [t.id for letter in name for t in self._tokenizer.model.tokenize(letter)]


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call of one releases the interpreter lock and computes no offsets; `encode` holds the lock
    # for seconds on a text of megabytes, and every other thread with it.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte of byte-level BPE: printable Latin-1 is itself, other bytes are U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def spell_byte_level(name: str) -> bytes:
    """`Ġhi` -> b" hi". A name outside the alphabet is taken as it is."""
    try:
        return bytes([_ALPHABET[letter] for letter in name])
    except KeyError:
        return name.encode()


def spell_metaspace(name: str) -> bytes:
    """`▁hi` -> b" hi"."""
    return name.replace("▁", " ").encode()


def spell_byte_fallback(name: str) -> bytes:
    """`▁hi` -> b" hi"; `<0x0A>` -> the byte 10."""
    return bytes([int(name[3:5], 16)]) if is_byte_name(name) else spell_metaspace(name)


def is_byte_name(name: str) -> bool:
    return re.fullmatch(r"<0x[0-9A-F]{2}>", name) is not None


def mark_special(tokenizer: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Declare tokens of the vocabulary special, e.g. an EOS that only the configuration names."""
    known = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    missing = [t for t in texts if t not in known and tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in missing])
