"""From options to a draft.

Owns: which draft is made of what, and what cannot be. Must not know: steps, requests, how a draft works
inside.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from nano_oasis.config import ConfigError, EngineConfig
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.model import Model
from nano_oasis.spec.auto import AutoDraft
from nano_oasis.spec.calibrate import calibrate, read_layers, save_layers
from nano_oasis.spec.draft import Draft
from nano_oasis.spec.head import DraftHead, head_path
from nano_oasis.spec.head_draft import HeadDraft
from nano_oasis.spec.model_draft import ModelDraft
from nano_oasis.spec.ngram import NGramDraft
from nano_oasis.spec.self_draft import SelfDraft, format_layers, parse_layers
from nano_oasis.tokenizer import Tokenizer, load_tokenizer
from nano_oasis.weights import CheckpointError, load_checkpoint, load_config, resolve_model

log = logging.getLogger(__name__)

_MODEL_KV = 2**28  # bytes of the draft model's own KV, at most


def make_draft(
    config: EngineConfig, model: Model, num_tokens: int, max_len: int, tokenizer: Tokenizer | None = None,
    matrices: str = "full",
) -> Draft | None:  # fmt: skip
    """The draft that config.draft names; None for none. num_tokens: ids the tokenizer knows.

    tokenizer: the model's, with which a draft model's is compared if given. matrices: how a draft model's are
    kept, see load_checkpoint.

    Raises ConfigError where it cannot be made for this model, weights.CheckpointError for a draft model's
    files.
    """
    kind = config.draft
    if kind == "ngram":
        return NGramDraft()
    if kind == "self":
        return SelfDraft(model, _layers(config, model, num_tokens), num_tokens)
    if kind == "model":
        return _model_draft(config, model, num_tokens, max_len, tokenizer, matrices)
    if kind == "head":
        path = config.draft_head or head_path(model)
        if path is None:
            raise ConfigError(
                "draft: this model has no built-in head; train one with python -m nano_oasis.spec.train and "
                "give it as draft_head, or use draft=auto"
            )
        return HeadDraft(DraftHead.load(path, model))
    if kind == "auto":
        path = config.draft_head or head_path(model)
        if path is None:
            log.warning("draft=auto: this model has no built-in head and no draft_head: n-grams only")
            return NGramDraft()
        return AutoDraft(HeadDraft(DraftHead.load(path, model)))
    return None


def _layers(config: EngineConfig, model: Model, num_tokens: int) -> Sequence[int]:
    """As given, as a file says, or as calibration finds; the lossless mode drafts with all of them."""
    given, count = config.draft_layers, model.config.num_layers
    if given is None and config.kv_mode == "lossless":
        return range(count)
    if given is not None and not _is_path(given):
        try:
            return parse_layers(given, count)
        except ValueError as error:
            raise ConfigError(f"draft_layers: {error}") from error
    if given is not None and Path(given).exists():
        return read_layers(Path(given), model)
    if given is not None and not Path(given).parent.is_dir():
        raise ConfigError(f"draft_layers: {given}: there is no folder {Path(given).parent} to write it in")
    log.warning("draft=self: calibrating, which takes some seconds; draft_layers=FILE keeps the result")
    found = calibrate(model, num_tokens)
    log.warning(
        "draft=self: layers %s draft, right in %.0f%% of cases",
        format_layers(found.layers),
        100 * found.right,
    )
    if given is not None:
        save_layers(Path(given), found, model)
    return found.layers


def _is_path(text: str) -> bool:
    return not set(text) <= set("0123456789-, ")


def _model_draft(
    config: EngineConfig, model: Model, num_tokens: int, max_len: int, tokenizer: Tokenizer | None,
    matrices: str,
) -> ModelDraft:  # fmt: skip
    assert config.draft_model is not None, "refused by EngineConfig"
    try:
        path = resolve_model(config.draft_model)
    except CheckpointError as error:
        raise ConfigError(f"draft_model: {error}") from error
    small, big = load_config(path), model.config
    if small.vocab_size != big.vocab_size:
        raise ConfigError(
            f"draft_model: its vocabulary has {small.vocab_size} tokens, the model's has {big.vocab_size}; "
            "a draft model must have the same"
        )
    if tokenizer is not None:
        other = load_tokenizer(path)
        wrong = next((i for i in range(num_tokens) if other.token_bytes(i) != tokenizer.token_bytes(i)), None)
        if wrong is not None:
            raise ConfigError(
                f"draft_model: token {wrong} is {other.token_text(wrong)!r} in its vocabulary and "
                f"{tokenizer.token_text(wrong)!r} in the model's; a draft model must have the same"
            )
    device, dtype = model.device, model.dtype
    checkpoint = load_checkpoint(path, dtype, str(device), matrices=matrices)
    length = min(max_len, small.max_position)
    block_bytes = small.kv_bytes_per_token(dtype.itemsize) * config.block_size
    enough = -(-length // config.block_size)
    blocks = max(min(_MODEL_KV // block_bytes, enough * config.max_num_seqs), enough)
    cache = KVCache.allocate(small, blocks, config.block_size, dtype, str(device))
    draft = Model(small, checkpoint.tensors, length, dtype)
    return ModelDraft(draft, DenseKV(cache, select_kernels(device, dtype), str(device)), length, num_tokens)
