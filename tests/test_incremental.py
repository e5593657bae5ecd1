"""Incremental decoding: deltas joined are the whole text, and never take anything back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import (
    groups,
    spm_as_json,
    trained_spm,
    write_bpe_folder,
    write_spm_folder,
    write_spm_gguf,
)

from nano_oasis.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer

TEXT = "A 世界 🫠 👩‍👩‍👧 naïve é"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("incremental")
    llama, gemma = trained_spm(), trained_spm(add_dummy_prefix=False)
    return {
        "bpe": load_tokenizer(write_bpe_folder(root / "bpe")),
        "llama": load_tokenizer(write_spm_folder(root / "llama", llama)),
        "llama-json": load_tokenizer(
            write_bpe_folder(root / "json", spm_as_json(llama, add_dummy_prefix=True))
        ),
        "gemma": load_tokenizer(
            write_spm_gguf(root / "gemma.gguf", gemma, bos_token_id=1, add_space_prefix=False)
        ),
    }


def streamed(tokenizer: Tokenizer, prompt: list[int], parts: list[list[int]], skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip)
    return [*(decoder.push(part) for part in parts), decoder.flush()]


KINDS = pytest.mark.parametrize("kind", ["bpe", "llama", "llama-json", "gemma"])


@KINDS
def test_groups_of_any_size_join_to_one_decode(kinds, kind):
    tokenizer = kinds[kind]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    rng = random.Random(0)
    for _ in range(1000):
        deltas = streamed(tokenizer, [], groups(ids, [rng.randint(1, 4) for _ in ids]))
        assert "".join(deltas) == TEXT
        assert not any("\ufffd" in delta for delta in deltas)


@KINDS
def test_a_delta_is_settled_text(kinds, kind):
    """After every push, what is out is a beginning of the whole text, and holds all complete characters."""
    tokenizer = kinds[kind]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    decoder, out = IncrementalDecoder(tokenizer), ""
    for n, id in enumerate(ids, 1):
        out += decoder.push([id])
        assert TEXT.startswith(out)
        assert out == tokenizer.decode(ids[:n]).rstrip("\ufffd")
    assert decoder.flush() == "" and out == TEXT


@KINDS
def test_random_ids(kinds, kind):
    """10,000 random sequences: control tokens, halves of characters, ids past the vocabulary."""
    tokenizer, rng = kinds[kind], random.Random(1)
    bytes_first = 200 if kind == "bpe" else 270  # where byte tokens lie: malformed UTF-8 in plenty
    for i in range(10_000):
        high = bytes_first if i % 2 else tokenizer.vocab_size + 5
        ids = [rng.randrange(high) for _ in range(rng.randrange(12))]
        cut, skip = rng.randint(0, len(ids)), i % 3 != 0
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(streamed(tokenizer, [], groups(ids, [1, 3, 2]), skip)) == whole
        settled = "".join(streamed(tokenizer, [], [ids[:cut]], skip)[:-1])
        rest = "".join(streamed(tokenizer, ids[:cut], groups(ids[cut:], [2, 1]), skip))
        assert settled + rest == whole, (ids, cut, skip)


@KINDS
@settings(max_examples=200, deadline=None)
@given(
    prompt=st.text(max_size=20), output=st.text(max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1)
)
def test_output_is_the_whole_minus_the_prompt(kinds, kind, prompt, output, sizes):
    tokenizer = kinds[kind]
    start = tokenizer.encode(prompt)
    ids = tokenizer.encode(output, add_special_tokens=False)
    deltas = streamed(tokenizer, start, groups(ids, sizes))
    assert tokenizer.decode(start) + "".join(deltas) == tokenizer.decode(start + ids)


@pytest.mark.parametrize("kind", ["llama", "llama-json"])
def test_leading_spaces_of_sentencepiece(kinds, kind):
    """A first piece keeps its space whenever any text, the prompt's too, comes before it."""
    tokenizer = kinds[kind]
    pieces = {tokenizer.token_text(i): i for i in range(6, tokenizer.vocab_size)}
    output = [pieces[" world"], pieces["!"], pieces[" "], pieces[" "], pieces["x"]]
    parts = [[id] for id in output]
    hello = tokenizer.encode("Hello")
    assert "".join(streamed(tokenizer, hello, parts)) == " world!  x"
    assert "".join(streamed(tokenizer, [*hello, 4], parts)) == " world!  x"  # right after a special token
    assert (
        "".join(streamed(tokenizer, [1], parts)) == "world!  x"
    )  # BOS is no text: the space is the encoder's
    assert "".join(streamed(tokenizer, [1], parts, skip=False)) == " world!  x"  # shown as text, it is
    assert "".join(streamed(tokenizer, [], [[1], *parts])) == "world!  x"


def test_a_character_begun_by_the_prompt(kinds):
    tokenizer = kinds["bpe"]
    ids = tokenizer.encode("a🫠b")
    half = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith("\ufffd"))
    assert "".join(streamed(tokenizer, ids[:half], [ids[half:]])) == "🫠b"
    x = tokenizer.encode("x")
    assert "".join(streamed(tokenizer, ids[:half], [x])) == tokenizer.decode(ids[:half] + x)[1:]


def test_unfinished_characters_show_only_at_the_end(kinds):
    for tokenizer in kinds.values():
        ids = tokenizer.encode("ok🫠", add_special_tokens=False)[:-1]
        *deltas, last = streamed(tokenizer, [], [[id] for id in ids])
        assert "".join(deltas) == "ok" and last == "\ufffd"


def test_the_cost_of_a_push_does_not_grow(kinds, monkeypatch):
    """Tokens are looked up once each; a prompt only at its ends."""
    tokenizer = kinds["llama"]
    looked_up = []
    original = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda id: looked_up.append(id) or original(id))
    decoder = IncrementalDecoder(tokenizer, tokenizer.encode("hello world " * 1000))
    assert len(looked_up) < 20
    looked_up.clear()
    for _ in range(500):
        decoder.push([300])
    assert len(looked_up) == 500
