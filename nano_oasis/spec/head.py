"""The trained draft head: a target's final state and a token in, the next state and a guess of its token out.

Owns: the head's arithmetic, its file, and the check that it belongs to a model.
Must not know: how it is trained, requests, when drafting pays.

As EAGLE (arXiv 2401.15077) the head predicts the target's next final state, and reads tokens off it with the
target's own output matrix. As Hydra and the MLP speculator (arXiv 2402.05109, 2404.19124) it has no
attention: all it knows of the text is the state, so it keeps no KV and a rejected draft leaves nothing to
undo. Tokens are chosen among those the target writes most, as in FR-Spec (arXiv 2502.14856): most of a small
draft's time would go into the rest of the vocabulary.

    h = state + fc [RMSNorm(state), RMSNorm(embedding of the token)]
    h = h + down (silu(gate x) * up x),  x = RMSNorm(h)          once per block
    state' = RMSNorm(h);   token' = the best of lm_head[draft_ids] @ state'
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nano_oasis.config import ConfigError
from nano_oasis.kernels.linear import linear
from nano_oasis.kernels.matrix import rows_of, take
from nano_oasis.model import Model

FORMAT = "nano_oasis draft head 1"
SHIPPED = Path(__file__).parent / "heads"
EPS = 1e-5  # of the head's own norms
_SAMPLES = 256  # weights of each of three matrices that a file remembers of its model
_ALIKE = 0.98  # cosine of each matrix's: four bits of the same model pass, other models do not


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head. `vocab`: how many tokens it can draft."""

    hidden: int
    inner: int
    blocks: int
    vocab: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the trained tensors, by name; linear weights are [out, in]."""
        h, found = self.hidden, dict[str, tuple[int, ...]]()
        found |= {"norm_state": (h,), "norm_token": (h,), "fc": (h, 2 * h), "norm_out": (h,)}
        for i in range(self.blocks):
            found[f"blocks.{i}.norm"] = (h,)
            found[f"blocks.{i}.gate_up"] = (2 * self.inner, h)
            found[f"blocks.{i}.down"] = (h, self.inner)
        return found


def advance(
    weights: dict[str, Tensor],
    state: Tensor,
    embedded: Tensor,
    blocks: int,
    product: Callable[[Tensor, Tensor], Tensor] = linear,
) -> Tensor:
    """state, embedded [n, H] -> the next state [n, H]. product: what multiplies; linear has no gradients."""
    size = (state.shape[1],)
    both = torch.cat(
        [
            F.rms_norm(state, size, weights["norm_state"], EPS),
            F.rms_norm(embedded, size, weights["norm_token"], EPS),
        ],
        dim=1,
    )  # [n, 2H]
    h = state + product(both, weights["fc"])
    for i in range(blocks):
        x = F.rms_norm(h, size, weights[f"blocks.{i}.norm"], EPS)
        gate, up = product(x, weights[f"blocks.{i}.gate_up"]).chunk(2, dim=1)
        h = h + product(F.silu(gate) * up, weights[f"blocks.{i}.down"])
    return F.rms_norm(h, size, weights["norm_out"], EPS)


class DraftHead:
    """A head beside its target, ready to draft. Immutable; weights are in the target's dtype and place."""

    def __init__(
        self, config: HeadConfig, weights: dict[str, Tensor], draft_ids: Tensor, model: Model
    ) -> None:
        self.config = config
        self.weights = {n: w.to(model.device, model.dtype).contiguous() for n, w in weights.items()}
        self.draft_ids = draft_ids.to(model.device, torch.int64)  # [D] ascending
        self.rows = take(model.lm_head, self.draft_ids)  # [D, H]
        self.embed, self.dtype, self.device = model.embed, model.dtype, model.device
        self.metadata: dict[str, Any] = {}

    @classmethod
    def load(cls, path: str | Path, model: Model) -> DraftHead:
        """A file made by `python -m nano_oasis.spec.train`.

        Raises ConfigError when it is no such file, damaged, or made for another model.
        """
        path = Path(path)
        config, metadata = read_config(path)
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        if (config.hidden, metadata["vocab_size"]) != (hidden, vocab):
            raise ConfigError(
                f"draft head {path}: made for a model of hidden size {config.hidden} and "
                f"{metadata['vocab_size']} tokens; this one has {hidden} and {vocab}"
            )
        tensors = _read_tensors(path, config)
        if not same_model(tensors.pop("fingerprint"), model):
            raise ConfigError(
                f"draft head {path}: made for another model of the same size; train one with "
                "python -m nano_oasis.spec.train"
            )
        draft_ids = tensors.pop("draft_ids")
        if not bool(((draft_ids >= 0) & (draft_ids < vocab)).all()):
            raise ConfigError(f"draft head {path}: draft_ids are not tokens of the model (damaged?)")
        head = cls(config, tensors, draft_ids, model)
        head.metadata = metadata
        return head

    @property
    def nbytes(self) -> int:
        """Bytes read by a step; the embedding's few rows are not counted."""
        return self.rows.nbytes + sum(w.nbytes for w in self.weights.values())

    @torch.inference_mode()
    def step(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token further, for n texts at once.

        state [n, H] float: the target's final state that `tokens` [n] int64 were drawn from, or what the last
        call returned. Returns (state [n, H] fp32, tokens [n] int64, confidence [n] fp32): the likeliest next
        tokens and their probability among the tokens that can be drafted.
        """
        # [n, H]; RMSNorm makes the target's embed_scale irrelevant.
        embedded = rows_of(self.embed, tokens.to(self.device), self.dtype)
        state = advance(self.weights, state.to(self.dtype), embedded, self.config.blocks)
        logits = linear(state, self.rows).float()  # [n, D]
        best, at = logits.max(dim=1)
        return state.float(), self.draft_ids[at], (best - logits.logsumexp(dim=1)).exp()


def fingerprint(model: Model) -> Tensor:
    """[3, 256] fp32: weights at fixed places of the embedding and of the last layer's MLP."""
    layer = model.layers[-1]
    parts = []
    for matrix in (model.embed, layer.gate_up, layer.down):
        width, step = matrix.shape[1], matrix.shape.numel() // _SAMPLES
        at = torch.arange(_SAMPLES, device=model.device) * step + step // 2
        parts.append(matrix[at // width].gather(1, (at % width)[:, None])[:, 0].float().cpu())
    return torch.stack(parts)


def same_model(remembered: Tensor, model: Model) -> bool:
    """Whether `remembered` is this model's fingerprint, up to the rounding of number formats."""
    own = fingerprint(model)
    return remembered.shape == own.shape and bool((F.cosine_similarity(remembered, own) >= _ALIKE).all())


def head_path(model: Model) -> Path | None:
    """The head in this package that was trained for `model`; None if there is none."""
    for path in sorted(SHIPPED.glob("*.safetensors")):
        config, metadata = read_config(path)
        sizes = (config.hidden, metadata["vocab_size"])
        if sizes == (model.config.hidden_size, model.config.vocab_size):
            with safe_open(path, framework="pt") as file:
                if same_model(file.get_tensor("fingerprint"), model):
                    return path
    return None


def read_config(path: Path) -> tuple[HeadConfig, dict[str, Any]]:
    """Sizes, and all that the file says of itself (vocab_size, acceptance, recipe). Raises ConfigError."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ConfigError(f"draft head {path}: not a file of python -m nano_oasis.spec.train")
        about = json.loads(metadata["head"])
        config = HeadConfig(*(int(about[name]) for name in ("hidden", "inner", "blocks", "vocab")))
        about["vocab_size"] = int(about["vocab_size"])
    except OSError as error:
        raise ConfigError(f"draft head {path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"draft head {path}: damaged: {error}") from error
    return config, about


def save_head(
    path: Path, config: HeadConfig, weights: dict[str, Tensor], draft_ids: Tensor, model: Model,
    about: dict[str, Any],
) -> None:  # fmt: skip
    """Write a head's file for `model`; `about` is what else it says of itself (acceptance, recipe)."""
    tensors = weights | {"draft_ids": draft_ids.to(torch.int32), "fingerprint": fingerprint(model)}
    about = vars(config) | {"vocab_size": model.config.vocab_size} | about
    write_atomically(path, tensors, {"format": FORMAT, "head": json.dumps(about)})


def write_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file. Under another name first: who finds the file finds all of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata)
        partial.chmod(0o644)  # safetensors writes files that only their owner can read
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_tensors(path: Path, config: HeadConfig) -> dict[str, Tensor]:
    wanted = config.shapes() | {"draft_ids": (config.vocab,), "fingerprint": (3, _SAMPLES)}
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"draft head {path}: damaged: {error}") from error
    shapes = {name: tuple(t.shape) for name, t in found.items()}
    if shapes != wanted:
        wrong = sorted(n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n))
        raise ConfigError(
            f"draft head {path}: damaged: {wrong[0]} is {shapes.get(wrong[0])}, not {wanted.get(wrong[0])}"
        )
    bad = next((n for n, t in found.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)
    if bad is not None:
        raise ConfigError(f"draft head {path}: damaged: {bad} holds a value that is not a number")
    return found
