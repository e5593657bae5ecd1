"""The vocabulary inside a GGUF file, turned back into the tokenizer it was made from.

Owns: the meaning of the tokenizer.ggml.* keys, and the pre-tokenizers that files name.
Must not know: how GGUF is read, chats.

Two kinds: "gpt2" is byte-level BPE with merges and a named pre-tokenizer; "llama" is a sentencepiece
model (Llama 2, Mistral, Gemma) with scores and byte fallback.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as LibraryToken
from tokenizers import Regex, Tokenizer, models, normalizers
from tokenizers import pre_tokenizers as pre

from nano_oasis.tokenizer.added_tokens import AddedToken
from nano_oasis.tokenizer.base import Backend, TokenizerError
from nano_oasis.tokenizer.bpe import TokenizersBackend, is_byte_name, spell_byte_level
from nano_oasis.tokenizer.spm import PieceType, SentencePieceBackend, build_model


@dataclass(frozen=True)
class PreTokenizer:
    """How a BPE vocabulary cuts text into words before merging, and what goes with it."""

    split: str | None = None  # a regular expression for words; None = GPT-2's
    isolated: tuple[str, ...] = ()  # cut out first, in this order
    digits: bool = False  # every digit is a word, before anything else
    nfc: bool = False  # Unicode normal form C first
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")

GPT2 = PreTokenizer()
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "refact": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer("", isolated=_DEEPSEEK_CODER),
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokenizer.ggml.* keys, checked."""

    kind: str
    tokens: list[str]
    types: list[int]
    path: Path
    metadata: Mapping[str, Any]

    def get(self, key: str, type: type, default: Any = None) -> Any:
        """The value of tokenizer.ggml.<key>."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not isinstance(value, type):
            raise self.error(f"{key} must be {type.__name__}, got {value!r}")
        return value

    def token_id(self, key: str) -> int | None:
        """A special token's id, e.g. of "bos_token_id"; None where it is absent or outside the vocabulary."""
        id = self.get(key, int)
        return id if id is not None and 0 <= id < len(self.tokens) else None

    def error(self, message: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: tokenizer.ggml.{message}")


def read_vocabulary(metadata: Mapping[str, Any], path: Path) -> GGUFVocabulary:
    """Check the vocabulary's keys. Raises TokenizerError naming the key."""
    kind, tokens = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens"))
    types: list[int] = []
    vocabulary = GGUFVocabulary(str(kind), tokens or [], types, path, metadata)
    if kind not in ("gpt2", "llama"):
        raise vocabulary.error(f"model is {kind!r}; supported are 'gpt2' (BPE) and 'llama' (sentencepiece)")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise vocabulary.error("tokens must be a list of strings")
    if len(set(tokens)) < len(tokens):
        twice, _ = collections.Counter(tokens).most_common(1)[0]
        raise vocabulary.error(f"tokens holds {twice!r} twice")
    declared = vocabulary.get("token_type", list)
    if declared is None:  # very old files
        byte, normal = (PieceType.BYTE if kind == "llama" else PieceType.NORMAL), PieceType.NORMAL
        declared = [byte if is_byte_name(t) else normal for t in tokens]
    if len(declared) != len(tokens):
        raise vocabulary.error(f"token_type has {len(declared)} entries for {len(tokens)} tokens")
    known = frozenset(map(int, PieceType))
    types += [t if t in known else PieceType.NORMAL for t in declared]
    for key in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"):
        id = vocabulary.token_id(key)
        if id is not None and types[id] != PieceType.UNKNOWN:
            types[id] = PieceType.CONTROL  # whatever the file says: it is not text
    return vocabulary


def build_backend(vocabulary: GGUFVocabulary) -> tuple[Backend, bool]:
    """-> (backend, whether BOS is added where the file does not say)."""
    if vocabulary.kind == "llama":
        return _sentencepiece(vocabulary), True
    recipe = _pre_tokenizer(vocabulary)
    return _bpe(vocabulary, recipe), recipe.add_bos


def _pre_tokenizer(vocabulary: GGUFVocabulary) -> PreTokenizer:
    name = vocabulary.get("pre", str)
    if name in (None, "default"):
        warnings.warn(
            f"{vocabulary.path} does not name its pre-tokenizer (tokenizer.ggml.pre); GPT-2's is assumed, "
            "and text may be cut differently than in training",
            stacklevel=2,
        )
        return GPT2
    if name not in PRE_TOKENIZERS:
        raise vocabulary.error(f"pre is {name!r}, which is not supported; known: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _bpe(vocabulary: GGUFVocabulary, recipe: PreTokenizer) -> TokenizersBackend:
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    try:
        merges = [tuple(merge.split(" ")) for merge in vocabulary.get("merges", list, [])]
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=recipe.ignore_merges)
    except Exception as error:  # the library raises bare Exceptions
        raise vocabulary.error(f"merges does not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if recipe.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre.Digits(individual_digits=True)] if recipe.digits else []
    steps += [
        pre.Split(Regex(pattern), "isolated") for pattern in (*recipe.isolated, recipe.split) if pattern
    ]
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=recipe.split is None))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    control = [t for t, type in typed if type in (PieceType.CONTROL, PieceType.UNKNOWN)]
    whole = [t for t, type in typed if type == PieceType.USER_DEFINED]
    tokenizer.add_special_tokens([LibraryToken(t, normalized=False) for t in control if t])
    tokenizer.add_tokens([LibraryToken(t, normalized=False) for t in whole if t])
    return TokenizersBackend(tokenizer, spell_byte_level, strips_first_space=False)


def _sentencepiece(vocabulary: GGUFVocabulary) -> SentencePieceBackend:
    # The library wants exactly one unknown piece; converters often file it under "control".
    unknown = vocabulary.token_id("unknown_token_id")
    for type in (PieceType.UNKNOWN, PieceType.CONTROL):
        if unknown is None and type in vocabulary.types:
            unknown = vocabulary.types.index(type)
    if unknown is None:
        raise vocabulary.error("unknown_token_id is missing, and no token is marked as unknown or control")
    types = [PieceType.CONTROL if t == PieceType.UNKNOWN else t for t in vocabulary.types]
    types[unknown] = PieceType.CONTROL
    control = [AddedToken(i, vocabulary.tokens[i]) for i, t in enumerate(types) if t == PieceType.CONTROL]
    types[unknown] = PieceType.UNKNOWN
    scores = vocabulary.get("scores", list)
    if scores is None or len(scores) != len(types):
        raise vocabulary.error(f"scores must have {len(types)} entries, as tokens has")
    num_bytes = types.count(PieceType.BYTE)
    if num_bytes not in (0, 256):
        raise vocabulary.error(f"token_type marks {num_bytes} byte tokens; 256 or none are possible")
    pieces = _respelled(vocabulary.tokens)
    prefix = vocabulary.get("add_space_prefix", bool, True)
    try:
        return SentencePieceBackend(
            build_model(pieces, scores, types, add_space_prefix=prefix), control=control
        )
    except Exception as error:  # the library raises RuntimeError, and others
        raise vocabulary.error(f"tokens do not make a sentencepiece model: {error}") from error


def _respelled(tokens: Sequence[str]) -> list[str]:
    """The pieces as sentencepiece spells them: converters write runs of spaces (Gemma) as real spaces."""
    known = set(tokens)
    pieces = []
    for i, token in enumerate(tokens):
        piece = token.replace(" ", "▁")
        pieces.append((token if piece != token and piece in known else piece) or f"[EMPTY_{i}]")
    return pieces
