"""From a GGUF file or a model folder to a Tokenizer.

Owns: which source says what, and which wins. Must not know: tokenization algorithms, file layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from nano_oasis.tokenizer import folder as files
from nano_oasis.tokenizer.base import Backend, Tokenizer, TokenizerError
from nano_oasis.tokenizer.chat_template import ChatTemplate
from nano_oasis.tokenizer.gguf_vocab import build_backend, read_vocabulary
from nano_oasis.tokenizer.hf_json import load_hf_json
from nano_oasis.tokenizer.spm import SentencePieceBackend
from nano_oasis.weights import CheckpointError, read_gguf_metadata

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
    template = _template(override, _gguf_templates(metadata), variables, path)
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
    config = files.read_json(folder / "tokenizer_config.json", files.TokenizerConfig)
    older = files.read_json(folder / "special_tokens_map.json", files.SpecialTokens)
    variables = older.spellings() | config.spellings()
    backend, prefix, suffix = _folder_backend(folder, config, variables)
    by_text = {token.text: token.id for token in backend.added}
    bos_id, eos_id = (by_text.get(variables.get(name, "")) for name in ("bos_token", "eos_token"))
    if config.add_bos_token is not None or config.add_eos_token is not None:
        prefix, suffix = _if(config.add_bos_token, bos_id), _if(config.add_eos_token, eos_id)
    end_ids = set(_if(True, eos_id))
    for name in ("config.json", "generation_config.json"):
        end_ids |= files.read_json(folder / name, files.ModelEnds).ids()
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=frozenset(end_ids),
        prefix_ids=prefix,
        suffix_ids=suffix,
        template=_template(override, files.templates(folder, config), variables, folder),
        allow_special_in_content=allow_special,
    )


def _folder_backend(
    folder: Path, config: files.TokenizerConfig, variables: dict[str, str]
) -> tuple[Backend, list[int], list[int]]:
    """-> (backend, ids before a text, ids after it); tokenizer.json wins over tokenizer.model.

    Adds to `variables` the special tokens that only the vocabulary names.
    """
    if (folder / "tokenizer.json").is_file():
        return load_hf_json(folder / "tokenizer.json", variables.values())
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json and no tokenizer.model; one of them is needed")
    extra = files.extra_tokens(folder, config)
    try:
        # transformers, too, takes a missing "legacy" for true.
        backend = SentencePieceBackend(
            path.read_bytes(), extra=extra, prefix_after_special=config.legacy is not False
        )
    except (OSError, RuntimeError) as error:
        raise TokenizerError(f"{path}: not a usable sentencepiece model: {error}") from error
    for name, text in backend.named_tokens().items():
        variables.setdefault(name, text)
    bos = [token.id for token in backend.added if token.text == variables.get("bos_token")]
    return backend, bos, []  # sentencepiece models of these families start with BOS unless told otherwise


def _template(
    override: str | None, own: Mapping[str, str], variables: Mapping[str, str], path: Path
) -> ChatTemplate | None:
    if not override and not own:
        return None
    try:
        return ChatTemplate(override or own, variables)
    except jinja2.TemplateSyntaxError as error:
        source = "the chat template given" if override else f"{path}: chat template"
        raise TokenizerError(f"{source}, line {error.lineno}: {error.message}") from error


def _if(wanted: bool | None, id: int | None) -> list[int]:
    return [id] if wanted and id is not None else []
