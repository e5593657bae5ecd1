"""From a GGUF file or a model folder to a Tokenizer.

Owns: which files of a folder say what, and which wins. Must not know: tokenization algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from nano_oasis.tokenizer.added_tokens import AddedToken
from nano_oasis.tokenizer.base import Backend, Tokenizer, TokenizerError
from nano_oasis.tokenizer.chat_template import ChatTemplate
from nano_oasis.tokenizer.gguf_vocab import build_backend, read_vocabulary
from nano_oasis.tokenizer.hf_json import load_hf_json
from nano_oasis.tokenizer.spm import SentencePieceBackend
from nano_oasis.weights import CheckpointError, read_gguf_metadata

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# A GGUF has one key for the end of a turn, and older files leave it out: these are taken as ends
# where the file's chat template writes them and the vocabulary marks them as control tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


def load_tokenizer(
    path: Path | str, chat_template: str | None = None, *, allow_special_in_content: bool = False
) -> Tokenizer:
    """The tokenizer of a model: `path` is a GGUF file, or a folder with tokenizer.json or tokenizer.model.

    chat_template: source of a template that replaces the model's own. allow_special_in_content: let text of
    chat messages that spells a control token become that token (see Tokenizer.encode_chat).
    Raises TokenizerError.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path, chat_template, allow_special_in_content)
    return _from_gguf(path, chat_template, allow_special_in_content)


def _from_gguf(path: Path, override: str | None, allow_special: bool) -> Tokenizer:
    try:
        metadata = read_gguf_metadata(path)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    vocabulary = read_vocabulary(metadata, path)
    backend, add_bos = build_backend(vocabulary)
    ids = {name: vocabulary.token_id(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    ids["unk_token"] = vocabulary.token_id("unknown_token_id")
    variables = {name: vocabulary.tokens[id] for name, id in ids.items() if id is not None}
    sources = _gguf_templates(metadata)
    template = _template(override or sources, variables, path)
    end_ids = {ids["eos_token"], vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")}
    written = template.source if template else ""
    end_ids |= {t.id for t in backend.added if t.special and t.text in END_OF_TURN and t.text in written}
    return Tokenizer(
        backend,
        bos_id=ids["bos_token"],
        eos_ids=frozenset(id for id in end_ids if id is not None),
        prefix_ids=_if(vocabulary.get("add_bos_token", bool, add_bos), ids["bos_token"]),
        suffix_ids=_if(vocabulary.get("add_eos_token", bool, False), ids["eos_token"]),
        template=template,
        allow_special_in_content=allow_special,
    )


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.chat_template, and named ones as tokenizer.chat_template.<name>."""
    key = "tokenizer.chat_template"
    found = {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.")}
    return ({"default": metadata[key]} if key in metadata else {}) | found


def _from_folder(folder: Path, override: str | None, allow_special: bool) -> Tokenizer:
    settings = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    variables: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        text = _text_of(settings.get(name)) or _text_of(special_map.get(name))
        if text:
            variables[name] = text
    backend, prefix, suffix = _folder_backend(folder, settings, variables)
    by_text = {token.text: token.id for token in backend.added}
    bos_id, eos_id = (by_text.get(variables.get(name, "")) for name in ("bos_token", "eos_token"))
    if settings.get("add_bos_token") is not None or settings.get("add_eos_token") is not None:
        prefix, suffix = (
            _if(settings.get("add_bos_token"), bos_id),
            _if(settings.get("add_eos_token"), eos_id),
        )
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config") or {}
    generation = _read_json(folder / "generation_config.json")
    end_ids = {eos_id}
    for source in (config, text_config, generation):
        end_ids |= set(_as_ids(source.get("eos_token_id")))
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=frozenset(id for id in end_ids if id is not None),
        prefix_ids=prefix,
        suffix_ids=suffix,
        template=_template(override or _folder_templates(folder, settings), variables, folder),
        allow_special_in_content=allow_special,
    )


def _folder_backend(
    folder: Path, settings: Mapping[str, Any], variables: dict[str, str]
) -> tuple[Backend, list[int], list[int]]:
    """-> (backend, ids before a text, ids after it); tokenizer.json wins over tokenizer.model.

    Adds to `variables` the special tokens that only the vocabulary names.
    """
    if (folder / "tokenizer.json").is_file():
        return load_hf_json(folder / "tokenizer.json", variables.values())
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json and no tokenizer.model; one of them is needed")
    try:
        backend = SentencePieceBackend(
            path.read_bytes(),
            extra=_extra_tokens(folder, settings, variables.values()),
            prefix_after_special=settings.get("legacy") is not False,  # as transformers reads its absence
        )
    except (OSError, RuntimeError) as error:
        raise TokenizerError(f"{path}: not a usable sentencepiece model: {error}") from error
    for name, text in backend.named_tokens().items():
        variables.setdefault(name, text)
    bos = [token.id for token in backend.added if token.text == variables.get("bos_token")]
    return backend, bos, []  # sentencepiece models of these families start with BOS unless told otherwise


def _extra_tokens(folder: Path, settings: Mapping[str, Any], named: Iterable[str]) -> list[AddedToken]:
    """Tokens that a folder adds to its tokenizer.model, from tokenizer_config.json or added_tokens.json."""
    special = {*named, *(_text_of(t) for t in settings.get("additional_special_tokens") or ())}
    tokens = [
        AddedToken(id, text, text in special) for text, id in _read_json(folder / "added_tokens.json").items()
    ]
    for id, entry in (settings.get("added_tokens_decoder") or {}).items():
        flags = {flag: bool(entry.get(flag)) for flag in ("special", "lstrip", "rstrip", "single_word")}
        tokens.append(AddedToken(int(id), entry["content"], **flags))
    return tokens


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja, else tokenizer_config.json's (one, or a list of named ones)."""
    declared = settings.get("chat_template") or {}
    if isinstance(declared, list):
        declared = {entry["name"]: entry["template"] for entry in declared}
    templates = {"default": declared} if isinstance(declared, str) else dict(declared)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    return templates


def _template(
    source: str | Mapping[str, str], variables: Mapping[str, str], path: Path
) -> ChatTemplate | None:
    if not source:
        return None
    try:
        return ChatTemplate(source, variables)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"{path}: chat template, line {error.lineno}: {error.message}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a file that is not there is an empty one."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise TokenizerError(f"{path}: not a JSON object: {error}") from error


def _text_of(token: Any) -> str | None:
    """The spelling of a token that is written as a string or as an object with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _as_ids(value: Any) -> list[int]:
    """eos_token_id: absent, a number, or a list of numbers."""
    return [value] if isinstance(value, int) else list(value or ())


def _if(wanted: bool | None, id: int | None) -> list[int]:
    return [id] if wanted and id is not None else []
