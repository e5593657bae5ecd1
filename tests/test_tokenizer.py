"""Text to ids and back: the same ids from every format, specials where the configuration says."""

import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import (
    CONTROL,
    CORPUS,
    NASTY,
    USER_DEFINED,
    random_texts,
    spm_as_json,
    template_bos,
    trained_bpe,
    trained_spm,
    write_bpe_folder,
    write_bpe_gguf,
    write_json,
    write_spm_folder,
    write_spm_gguf,
)

from nano_oasis.request import RequestError
from nano_oasis.tokenizer import Tokenizer, load_tokenizer

IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
TEXTS = st.text(
    st.one_of(st.sampled_from("ab \n\t1é世🫠▁<"), st.characters(exclude_categories=["Cs"])), max_size=60
)
MIXED = st.lists(st.one_of(TEXTS, st.sampled_from([*CONTROL, USER_DEFINED])), max_size=5).map("".join)


@pytest.fixture(scope="module")
def formats(tmp_path_factory) -> dict[str, list[Tokenizer]]:
    """One vocabulary per key, loaded from all formats that can hold it."""
    root = tmp_path_factory.mktemp("formats")
    found = {
        "bpe": [
            load_tokenizer(write_bpe_folder(root / "bpe")),
            load_tokenizer(write_bpe_gguf(root / "bpe.gguf", **IDS)),
        ]
    }
    for name, prefix in (("llama", True), ("gemma", False)):
        proto = trained_spm(add_dummy_prefix=prefix)
        found[name] = [
            load_tokenizer(write_spm_folder(root / name, proto)),
            load_tokenizer(write_spm_gguf(root / f"{name}.gguf", proto, add_space_prefix=prefix, **IDS)),
            load_tokenizer(
                write_bpe_folder(root / f"{name}-json", spm_as_json(proto, add_dummy_prefix=prefix))
            ),
        ]
    return found


@pytest.mark.parametrize("name", ["bpe", "llama", "gemma"])
def test_every_format_gives_the_same_ids(formats, name):
    first, *others = formats[name]
    for other in others:
        assert (other.vocab_size, other.special_ids) == (first.vocab_size, first.special_ids)
        assert [other.token_bytes(i) for i in range(first.vocab_size)] == [
            first.token_bytes(i) for i in range(first.vocab_size)
        ]
    for text in NASTY + random_texts(2000):
        for parse in (True, False):
            ids = first.encode(text, add_special_tokens=False, parse_special=parse)
            for other in others:
                # A tokenizer.json starts a new text, with a new prefix space, after a user-defined token.
                if name == "llama" and other is others[-1] and USER_DEFINED in text:
                    continue
                assert other.encode(text, add_special_tokens=False, parse_special=parse) == ids, repr(text)


@pytest.mark.parametrize("name", ["bpe", "llama", "gemma"])
@settings(max_examples=150, deadline=None)
@given(text=MIXED)
def test_round_trip(formats, name, text):
    if "▁" in text and name != "bpe":
        text = text.replace("▁", "_")  # sentencepiece's own mark for a space
    for tokenizer in formats[name]:
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not tokenizer.special_ids.intersection(plain)
        if USER_DEFINED not in text or not tokenizer.strips_first_space:
            assert tokenizer.decode(plain) == text
        parsed = tokenizer.encode(text, add_special_tokens=False)
        if not tokenizer.strips_first_space:
            assert tokenizer.decode(parsed, skip_special_tokens=False) == text
        if not any(token in text for token in CONTROL):
            assert parsed == plain


def test_control_tokens_stay_whole_or_stay_text(formats):
    for tokenizers_ in formats.values():
        for tokenizer in tokenizers_:
            text = "a<|im_start|>b<tool></s>"
            assert [i for i in tokenizer.encode(text, add_special_tokens=False) if i < 6] == [3, 5, 2]
            plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            assert [i for i in plain if i < 6] == [5]  # user-defined tokens are text, and always whole


def test_bytes_that_have_no_piece_fall_back_and_come_back(formats):
    for tokenizer in formats["llama"] + formats["gemma"]:
        for text in ("a\nb\t🫠龜", "literal <0x0A> stays", "<0xFF>"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert 0 not in ids and tokenizer.decode(ids) == text
        assert tokenizer.token_bytes(tokenizer.encode("\x07", add_special_tokens=False)[-1]) == b"\x07"


def test_token_bytes_are_true_bytes(formats):
    for tokenizers_ in formats.values():
        for tokenizer in tokenizers_:
            ids = tokenizer.encode("x🫠y", add_special_tokens=False)
            assert len(ids) >= 5
            assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == "x🫠y"
            assert any(tokenizer.token_text(i) == "\ufffd" for i in ids)
            assert tokenizer.token_text(4) == "<|im_end|>"


def test_ids_outside_the_vocabulary_are_nothing(formats):
    for tokenizers_ in formats.values():
        for tokenizer in tokenizers_:
            a, b = tokenizer.encode("a", add_special_tokens=False)[-1:], [tokenizer.vocab_size, 10**12, -1]
            assert tokenizer.decode(b + a + b) == tokenizer.decode(a) == "a"
            assert tokenizer.token_text(tokenizer.vocab_size) == ""


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ud83e\udee0"])
def test_lone_surrogates_are_refused(formats, text):
    for tokenizers_ in formats.values():
        with pytest.raises(RequestError, match="lone surrogate") as caught:
            tokenizers_[0].encode(text)
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="must be text"):
        formats["bpe"][0].encode(b"bytes")  # type: ignore[arg-type]


def test_plain_text_never_merges_into_a_control_token(tmp_path):
    """Converted vocabularies hold merges that happen to build `</s>`; a whole word can be one, too."""
    for ignore_merges in (False, True):
        vocab = {t: i for i, t in enumerate(["</s>", "<", "/", "s", ">", "</", "s>"])}
        model = tokenizers.models.BPE(
            vocab, [("<", "/"), ("s", ">"), ("</", "s>")], ignore_merges=ignore_merges
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens(["</s>"])
        ours = load_tokenizer(write_bpe_folder(tmp_path / str(ignore_merges), tokenizer))
        assert ours.encode("</s>") == [0]
        assert ours.encode("</s>", parse_special=False) == [1, 2, 3, 4]


# --- special tokens around a text -------------------------------------------------------------------------


def test_bos_and_eos_follow_the_configuration(tmp_path):
    def ids(folder: Path) -> list[int]:
        return load_tokenizer(folder).encode("<s>x", add_special_tokens=True)

    x = ids(write_bpe_folder(tmp_path / "a"))  # no post-processor, no flag
    assert x[0] == 1 and 1 not in x[1:] and 2 not in x
    with_bos = tokenizers.Tokenizer.from_str(trained_bpe().to_str())
    with_bos.post_processor = template_bos("<s>", 1)
    assert ids(write_bpe_folder(tmp_path / "b", with_bos)) == [
        1,
        *x,
    ]  # the text's own BOS does not replace it
    assert ids(write_bpe_folder(tmp_path / "c", with_bos, add_bos_token=False)) == x
    assert ids(write_bpe_folder(tmp_path / "d", add_bos_token=True, add_eos_token=True)) == [1, *x, 2]
    gguf = {f: write_bpe_gguf(tmp_path / f"{f}.gguf", add_bos_token=f == "y", **IDS) for f in "yn"}
    assert ids(gguf["y"]) == [1, *x] and ids(gguf["n"]) == x
    assert ids(write_bpe_gguf(tmp_path / "l.gguf", pre="llama-bpe", **IDS))[:2] == [1, 1]  # their default
    assert ids(write_bpe_gguf(tmp_path / "e.gguf", add_eos_token=True, **IDS)) == [*x, 2]
    proto = trained_spm()
    s = load_tokenizer(write_spm_folder(tmp_path / "s", proto))
    assert s.encode("x")[0] == 1 and s.encode("x", add_special_tokens=False)[0] != 1
    assert ids(write_spm_folder(tmp_path / "t", proto, add_bos_token=False))[:2] != [1, 1]
    assert ids(write_spm_gguf(tmp_path / "s.gguf", proto, **IDS))[:2] == [1, 1]
    assert ids(write_spm_gguf(tmp_path / "n.gguf", proto, add_bos_token=False, **IDS))[:2] != [1, 1]


def test_prefix_space_after_special_tokens_follows_legacy(tmp_path):
    proto = trained_spm()
    texts = {}
    for name, config in (("old", {}), ("new", {"legacy": False})):
        tokenizer = load_tokenizer(write_spm_folder(tmp_path / name, proto, **config))
        texts[name] = tokenizer.decode(tokenizer.encode("a<s>b"), skip_special_tokens=False)
    assert texts == {"old": "<s> a<s> b", "new": "<s> a<s>b"}


def test_tokens_added_to_a_sentencepiece_model(tmp_path):
    size = 700
    proto = trained_spm()
    added = {
        str(size): {"content": "<|end|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<think>", "special": False},
    }
    folder = write_spm_folder(tmp_path / "a", proto, added_tokens_decoder=added, eos_token="<|end|>")
    write_json(folder / "added_tokens.json", {"<more>": size + 2})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == size + 3 and tokenizer.eos_ids == {size}
    ids = tokenizer.encode("a<|end|> \n<think>b<more>", add_special_tokens=False)
    assert [i for i in ids if i >= size] == [size, size + 1, size + 2]
    assert ids[ids.index(size) + 1] == size + 1  # the token takes the white space after it
    assert tokenizer.decode(ids) == "a<think> b<more>"
    plain = tokenizer.encode("<|end|>", add_special_tokens=False, parse_special=False)
    assert size not in plain and tokenizer.decode(plain) == "<|end|>"


# --- size and speed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bpe", "llama", "gemma"])
def test_time_grows_with_the_text_not_with_its_square(formats, name):
    for unit in ("hello world 12\n", "a", " ", "<", "世", "</s>"):
        for tokenizer in formats[name]:
            took = []
            for size in (30_000, 240_000):
                text = unit * (size // len(unit))
                started = time.perf_counter()
                tokenizer.encode(text, parse_special=unit == "</s>")
                took.append(time.perf_counter() - started)
            assert took[1] < 0.3 + 24 * took[0], (
                f"{unit!r}: {took}"
            )  # 8 times the text; the square would be 64


def test_encoding_lets_other_threads_run(formats):
    """A text of megabytes must not hold the interpreter: the event loop answers health checks meanwhile."""
    import threading

    text = CORPUS * (2_000_000 // len(CORPUS))
    for tokenizer in (formats["bpe"][0], formats["llama"][0]):
        worst, last = 0.0, time.perf_counter()
        worker = threading.Thread(target=tokenizer.encode, args=(text,))
        worker.start()
        while worker.is_alive():
            time.sleep(0.002)
            worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
        assert worst < 0.5
