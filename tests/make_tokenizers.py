"""Small tokenizers for the tests: trained on the spot, and the same vocabulary written in every format."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    """
The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs, said the fox's friend.
A naïve café owner in Zürich paid 1,234.50 francs for 56 old books; they'll arrive in 2024 or 2025, I'd think.
def fibonacci(n):
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


Привет, мир! 世界のみなさん、こんにちは。 你好，世界。 안녕하세요 세계. hello world, hello again, world!
\tTabs\tand  double  spaces,   triple   spaces, and "quotes" with (parentheses) and [brackets]...
"""
    * 4
)

NASTY = [
    "", " ", "  ", "   ", " a", "  a", "a ", "a  ", "a  b", "\t", "\t\tx", "\n", "\n\n", "\n\n\n", "\r\n",
    "a\r\n\r\nb", " \n ", "\n \n", "0", "1234567890", "3.14", "x1y22z333", "1,234.50", "٣٤٥", "½²",
    "世界", "你好，世界。", "こんにちは", "안녕하세요", "Привет, мир!", "שלום", "مرحبا", "क्षेत्र", "ไทย",
    "é", "e\u0301", "naïve café", "ﬁ", "İ", "ß",
    "🫠", "👩‍👩‍👧", "🇨🇭", "👍🏽", "A 世界 🫠 👩‍👩‍👧 naïve é", "a\nb\t🫠龜", "\u200b", "\ufeff",
    "\ufffd", "\ue000", "▁", "a▁b", "Ġ", "<0x0A>", "literal <0x0A> stays",
    "don't, they'll, I'D", "'s", "''", '"""', "\x00", "\x07\x1b[0m", "a" * 1000, " " * 1000, "ab " * 300,
    "<s>", "</s>", "x<s>y", "<s> x </s>", "<unk>", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end", "<<|im_end|>>", "<tool>", "a<tool>b", " <tool> ",
]  # fmt: skip

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]  # ids 0..4 of every fixture
USER_DEFINED = "<tool>"  # id 5

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# --- byte-level BPE ---------------------------------------------------------------------------------------


@functools.cache
def random_texts(count: int, seed: int = 0) -> list[str]:
    """Slices of the corpus, and strings of awkward letters."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count // 2):
        start = rng.randrange(len(CORPUS))
        texts.append(CORPUS[start : start + rng.randrange(1, 80)])
        texts.append(
            "".join(rng.choices("ab cX\n\t\r龜世é🫠👩‍👧<>/|0123.,!'\"ñक्ष한\u200b", k=rng.randrange(1, 30)))
        )
    return texts


def trained_bpe(split: str | None = None, *, digits: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE of about 600 tokens. split: a regular expression for words instead of GPT-2's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*CONTROL, USER_DEFINED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] != USER_DEFINED
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def write_bpe_folder(folder: Path, tokenizer: tokenizers.Tokenizer | None = None, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or trained_bpe()).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"} | config)
    return folder


def write_bpe_gguf(
    path: Path, tokenizer: tokenizers.Tokenizer | None = None, *, pre: str | None = "smollm", **keys: Any
) -> Path:
    data = json.loads((tokenizer or trained_bpe()).to_str())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    merges = [" ".join(pair) for pair in data["model"]["merges"]]
    types = [4 if t == USER_DEFINED else 3 if t in CONTROL else 1 for t in tokens]
    return write_gguf(path, "gpt2", tokens, types, merges=merges, pre=pre, **keys)


# --- sentencepiece ----------------------------------------------------------------------------------------


@functools.cache
def trained_spm(*, add_dummy_prefix: bool = True) -> bytes:
    """A sentencepiece BPE model of 700 pieces with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, model_type="bpe", vocab_size=700,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix, character_coverage=0.98, split_digits=True,
        allow_whitespace_only_pieces=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
        control_symbols=CONTROL[3:], user_defined_symbols=[USER_DEFINED], minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def write_spm_folder(folder: Path, proto: bytes, **config: Any) -> Path:
    """tokenizer.model and, if `config` is given, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(proto)
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


def pieces_of(proto: bytes) -> tuple[list[str], list[float], list[int]]:
    """-> texts, scores, types (GGUF's numbers)."""
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ids = range(model.get_piece_size())
    texts = [model.id_to_piece(i) for i in ids]
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i)
        else 4 if texts[i] == USER_DEFINED else 1
        for i in ids
    ]  # fmt: skip
    return texts, [model.get_score(i) for i in ids], types


def write_spm_gguf(path: Path, proto: bytes, **keys: Any) -> Path:
    texts, scores, types = pieces_of(proto)
    return write_gguf(path, "llama", texts, types, scores=scores, **keys)


def spm_as_json(proto: bytes, *, add_dummy_prefix: bool) -> tokenizers.Tokenizer:
    """The same vocabulary as a `tokenizers` BPE, the way Llama's and Gemma's tokenizer.json are made."""
    texts, scores, types = pieces_of(proto)
    vocab = {text: i for i, text in enumerate(texts)}
    ranked = sorted((-scores[i], i) for i, type in enumerate(types) if type == 1)
    merges = [
        (texts[i][:cut], texts[i][cut:])
        for _, i in ranked
        for cut in range(1, len(texts[i]))
        if texts[i][:cut] in vocab and texts[i][cut:] in vocab
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    last: list[Any] = [decoders.Strip(" ", 1, 0)] if add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([tokenizers.AddedToken(USER_DEFINED, normalized=False)])
    return tokenizer


# --- files ------------------------------------------------------------------------------------------------


def write_gguf(
    path: Path, model: str, tokens: list[str], types: list[int], *, scores: list[float] | None = None,
    merges: list[str] | None = None, pre: str | None = None, chat_template: Any = None, **keys: Any,
) -> Path:  # fmt: skip
    """A GGUF file with a vocabulary and no tensors. keys: more of tokenizer.ggml.*, e.g. bos_token_id=1."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    if pre:
        writer.add_tokenizer_pre(pre)
    if chat_template:
        writer.add_chat_template(chat_template)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def groups(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` cut into groups of the given sizes, used again and again."""
    found, rest, take = [], iter(ids), itertools.cycle(sizes)
    while group := list(itertools.islice(rest, next(take))):
        found.append(group)
    return found


def template_bos(bos: str, id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, id)])
