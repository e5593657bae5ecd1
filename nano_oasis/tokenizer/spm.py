"""Tokenization by the `sentencepiece` library: a tokenizer.model, or the same model rebuilt from a GGUF.

Owns: the use of that library, and the few fields of its file format that a GGUF's vocabulary fills.
Must not know: files, chats, which token is BOS.
"""

from __future__ import annotations

import enum
import functools
import itertools
import struct
from collections.abc import Sequence

import sentencepiece

from nano_oasis.tokenizer.added_tokens import AddedToken, AddedTokens
from nano_oasis.tokenizer.bpe import spell_byte_fallback, spell_metaspace


class PieceType(enum.IntEnum):
    """Kind of a piece: numbers of sentencepiece's file format, and of GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePieceBackend:
    """Backend (see base.py) over a sentencepiece model.

    proto: the model as bytes. control: its control tokens, where the caller knows them. extra: further
    tokens that are matched by their spelling; their ids may lie past the model, or rename a piece.
    prefix_after_special: the space that the model puts before a text also goes after every special token,
    as in llama.cpp and in transformers' "legacy" tokenizers; otherwise only at the start.
    Raises RuntimeError for a damaged model.
    """

    def __init__(
        self,
        proto: bytes,
        *,
        control: Sequence[AddedToken] | None = None,
        extra: Sequence[AddedToken] = (),
        prefix_after_special: bool = True,
    ) -> None:
        self._model = _load(proto)
        self._size = self._model.get_piece_size()
        known = _control_tokens(self._model) if control is None else control
        self.added = list({t.id: t for t in (*known, *extra)}.values())
        self.vocab_size = max([self._size - 1, *(t.id for t in self.added)]) + 1
        self.strips_first_space = self._model.normalize("a").startswith("▁")
        self._later = self._model  # encodes what follows a special token
        if self.strips_first_space and not prefix_after_special:
            # In protobuf a later field overrides an earlier one: the same model without prefix space.
            self._later = _load(proto + NO_PREFIX_SPACE)
        self._matched = AddedTokens(self.added)
        self._matched_always = AddedTokens(t for t in self.added if not t.special)
        self._spelled = {t.id: t.text.encode() for t in self.added}

    def encode(self, text: str) -> list[int]:
        return self._encode(self._matched.split(text))

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        split = self._matched_always.split
        cut = [split(piece) if isinstance(piece, str) else [piece] for piece in pieces]
        return self._encode(list(itertools.chain.from_iterable(cut)))

    def named_tokens(self) -> dict[str, str]:
        """The model's own special tokens: {"bos_token": "<s>", ...}."""
        model = self._model
        ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        ids |= {"unk_token": model.unk_id(), "pad_token": model.pad_id()}
        return {name: model.id_to_piece(id) for name, id in ids.items() if id >= 0}

    def _encode(self, pieces: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += (self._later if i else self._model).encode(piece)
        return ids

    def token_bytes(self, id: int) -> bytes:
        if id in self._spelled or id >= self._size:
            return self._spelled.get(id, b"")
        name = self._model.id_to_piece(id)
        return spell_byte_fallback(name) if self._model.is_byte(id) else spell_metaspace(name)


def _load(proto: bytes) -> sentencepiece.SentencePieceProcessor:
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(proto)  # the constructor would take an empty model for none
    return model


def _control_tokens(model: sentencepiece.SentencePieceProcessor) -> list[AddedToken]:
    """The pieces of a model that its own encoder never yields for text."""
    ids = [i for i in range(model.get_piece_size()) if model.is_control(i) or model.is_unknown(i)]
    return [AddedToken(i, model.id_to_piece(i)) for i in ids]


def build_model(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, add_space_prefix: bool
) -> bytes:
    """A sentencepiece BPE model from a vocabulary: merges go by score, unknown characters become bytes.

    Protobuf by hand, for four messages: ModelProto {1: piece*, 2: trainer, 3: normalizer}; piece {1: text,
    2: score (float32), 3: type}; trainer {3: model type (2 = BPE), 35: byte fallback}; normalizer {1: name,
    3: prefix space, 4: drop repeated spaces, 5: spaces as ▁}.
    """
    parts = []
    pack_score = struct.Struct("<f").pack
    for piece, score, type in zip(pieces, scores, types, strict=True):
        text = piece.encode()
        body = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(text)), text, pack_score(score), type)
        parts.append(b"\x0a%b%b" % (_varint(len(body)), body))
    trainer = _number(3, 2) + _number(35, PieceType.BYTE in types)
    normalizer = _message(1, b"identity") + _number(3, add_space_prefix) + _number(4, 0) + _number(5, 1)
    return b"".join(parts) + _message(2, trainer) + _message(3, normalizer)


@functools.cache  # a vocabulary asks for the same few lengths again and again
def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


NO_PREFIX_SPACE = _message(3, _number(3, 0))
