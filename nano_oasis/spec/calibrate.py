"""Which of the target's layers draft best: a short search, whose result can be kept.

Owns: the search and its file. Must not know: requests, verification, how a draft is run.

A draft that runs c of L layers costs about (c + head) / (L + head) of a step, and its tokens are right with
some chance a. With k drafts a step gives 1 + a + .. + a^k tokens. The search leaves out one run of layers
(the middle of a deep model changes least), tries every place and a few lengths, measures on a text that the
model writes by itself how often the shortened model's first choice is the whole model's, and keeps what
promises the most tokens for the time. It judges each position on exact KV, as drafting does, which begins on
the target's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nano_oasis.config import ConfigError
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.spec.self_draft import format_layers, parse_layers

TOKENS = 96  # of the text, at most
KEPT = (0.3, 0.5, 0.7)  # shares of the layers that are tried
DRAFTS = 3  # that a step is assumed to have


@dataclass(frozen=True)
class Calibrated:
    layers: list[int]
    right: float  # share of positions at which their first choice is the model's
    speed_up: float  # tokens for the time of decoding without drafts, as estimated


@torch.inference_mode()
def calibrate(model: Model, num_tokens: int) -> Calibrated:
    """num_tokens: ids the tokenizer knows. Takes some tens of passes over a hundred tokens."""
    count = model.config.num_layers
    everything = list(range(count))
    text, kv, request = _write(model, num_tokens)
    truth = _first_choices(model, text, kv, request, everything, num_tokens)
    best: Calibrated | None = None
    for keep in sorted({max(round(share * count), 1) for share in KEPT} - {count}) or [count]:
        gap = count - keep
        for start in range(0, keep + 1, max(keep // 6, 1)):
            layers = everything[:start] + everything[start + gap :]
            same = _first_choices(model, text, kv, request, layers, num_tokens) == truth
            right = float(same.float().mean())
            found = Calibrated(layers, right, _speed_up(model, len(layers), right))
            if best is None or found.speed_up > best.speed_up:
                best = found
    assert best is not None
    return best


def _write(model: Model, num_tokens: int) -> tuple[Tensor, DenseKV, Request]:
    """A text by the model itself, sampled from its first token on, so that it is what drafting will meet."""
    size = 16
    length = min(TOKENS, len(model.rope))
    blocks = -(-length // size)
    device, dtype = model.device, model.dtype
    cache = KVCache.allocate(model.config, blocks, size, dtype, str(device))
    kv = DenseKV(cache, select_kernels(device, dtype), str(device))
    first = model.config.bos_token_id or 0
    request = Request([first], SamplingParams(), length + 1, seed=0, block_table=list(range(blocks)))
    draw = torch.Generator().manual_seed(0)
    tokens = [first]
    for at in range(length - 1):
        view = kv.begin([ScheduledRow(request, at, 1, samples=True)])
        hidden = model.forward(torch.tensor(tokens[-1:]).to(device), torch.tensor([at]).to(device), view)
        logits = model.logits(hidden)[0, :num_tokens].cpu()
        tokens.append(int((logits / 0.7).softmax(-1).multinomial(1, generator=draw)))
    return torch.tensor(tokens).to(device), kv, request


def _first_choices(
    model: Model, text: Tensor, kv: DenseKV, request: Request, layers: list[int], num_tokens: int
) -> Tensor:
    """The likeliest next token after each token of the text [T], with these layers only."""
    view = kv.begin([ScheduledRow(request, 0, len(text), samples=True)])
    positions = torch.arange(len(text)).to(text.device)
    hidden = model.forward(text, positions, view, layers)
    return model.logits(hidden)[:, :num_tokens].argmax(-1)


def _speed_up(model: Model, layers: int, right: float) -> float:
    """Tokens of a step over its cost, in steps without drafts. A pass costs the bytes of weights it reads."""
    head = model.lm_head.nbytes
    layer = (model.weight_bytes - head) / model.config.num_layers
    cost = (layers * layer + head) / model.weight_bytes
    return sum(right**j for j in range(DRAFTS + 1)) / (1 + DRAFTS * cost)


def save_layers(path: Path, found: Calibrated, model: Model) -> None:
    """Raises ConfigError where the file cannot be written."""
    about = {"layers": format_layers(found.layers), "of": model.config.num_layers, "right": found.right}
    try:
        path.write_text(json.dumps(about | {"weight_bytes": model.weight_bytes}) + "\n")
    except OSError as error:
        raise ConfigError(f"draft_layers: {path}: {error.strerror}") from error


def read_layers(path: Path, model: Model) -> list[int]:
    """Raises ConfigError for a file that save_layers did not write, or wrote for another model."""
    try:
        about = json.loads(path.read_text())
        if (about["of"], about["weight_bytes"]) != (model.config.num_layers, model.weight_bytes):
            raise ValueError("it was made for another model, or for other weights or another dtype of it")
        return parse_layers(about["layers"], model.config.num_layers)
    except OSError as error:
        raise ConfigError(f"draft_layers: {path}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"draft_layers: {path} is not a file of calibration: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"draft_layers: {path} is not a file of calibration: {error}") from error
