"""A draft head learns to go on from the target's states.

Owns: which positions a step sees, the loss, the optimiser, checkpoints. Must not know: prompts, the target
beyond its embedding and output matrix, how drafts are verified.

From the target's state after token t the head is unrolled over the next tokens (the true ones, as EAGLE does:
arXiv 2401.15077), feeding on its own states. After each it is compared with what the target made of the text:

    loss = cross entropy to the target's distribution over the draft vocabulary + STATE * smooth L1 of states

States are divided by their mean size first, so that STATE means the same for every model. What a step sees is
a function of (seed, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nano_oasis.config import ConfigError
from nano_oasis.spec.head import HeadConfig, advance, write_atomically
from nano_oasis.spec.recording import Recording

STRETCH = 16  # neighbouring states of a text that are trained together: they share the target's distributions
UNROLL = 4  # draft tokens, in the last part of the training
UNROLL_FROM = 0.6  # of the steps; before, one: the others rest on it, and it costs a quarter
DECAY = 0.8  # weight of a draft token relative to the one before it
STATE = 1.0
PROMPT_SHARE = 0.2  # of a batch: stretches of prompts instead of what the target wrote
WARM_UP = 0.05  # of the steps
DECAY_WEIGHTS, CLIP = 0.01, 1.0
_PROMPT_COUNT = 0.1  # of a token in a prompt when the draft vocabulary is counted


@dataclass
class Texts:
    """Recordings one after the other. tokens [N] int64; hidden [N, H] fp16, a text's last row being empty.

    written, prompts: where stretches begin; last [N]: the last state's place of the text that a token is in.
    """

    tokens: Tensor
    hidden: Tensor
    last: Tensor
    written: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Texts:
        tokens = torch.cat([r.tokens for r in recordings]).long()
        hidden = torch.zeros(len(tokens), recordings[0].hidden.shape[1], dtype=torch.float16)
        lengths = torch.tensor([len(r.tokens) for r in recordings])
        starts = (lengths.cumsum(0) - lengths).tolist()
        last = torch.repeat_interleave(lengths.cumsum(0) - 2, lengths)
        written, prompts = list[int](), list[int]()
        for start, r in zip(starts, recordings, strict=True):
            hidden[start : start + len(r.hidden)] = r.hidden
            # The first state that a draft starts from gave the first written token: place prompt - 1.
            written += range(start + r.prompt - 1, start + len(r.tokens) - 2, STRETCH)
            prompts += range(start, start + r.prompt - 1 - STRETCH, STRETCH)
        if not written:
            raise ConfigError("the model wrote nothing to learn from: every text ended at once")
        return cls(tokens, hidden, last, torch.tensor(written), torch.tensor(prompts or written))

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """Places [size * STRETCH] of the states that drafts start from."""
        few = round(size * PROMPT_SHARE)
        begins = [
            _shuffled(self.written, step, size - few, seed),
            _shuffled(self.prompts, step, few, seed + 1),
        ]
        return (torch.cat(begins)[:, None] + torch.arange(STRETCH)).flatten()


def _shuffled(items: Tensor, step: int, size: int, seed: int) -> Tensor:
    """items[...] [size]: those of step number `step`, every item once before any comes again."""
    at = torch.arange(step * size, (step + 1) * size)
    found = [items[:0]]
    for epoch in (at // len(items)).unique().tolist():
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        found.append(items[order[at[at // len(items) == epoch] % len(items)]])
    return torch.cat(found)


def draft_vocabulary(recordings: Sequence[Recording], num_tokens: int, size: int) -> Tensor:
    """The `size` most frequent ids of what was written, prompts counting a little: [size] int64, rising."""
    counts = torch.zeros(num_tokens, dtype=torch.float64)
    for r in recordings:
        weights = torch.ones(len(r.tokens), dtype=torch.float64)
        weights[: r.prompt] = _PROMPT_COUNT
        counts.index_add_(0, r.tokens.long(), weights)
    # Ids that never occurred come last, the lowest first: tokenizers give common words low ids.
    order = counts.sort(descending=True, stable=True).indices
    return order[:size].sort().values


class Trainer:
    """One training run. embed, lm_head: of the target, [V, H]; half: matrix products in bfloat16."""

    def __init__(
        self, config: HeadConfig, texts: Texts, embed: Tensor, lm_head: Tensor, draft_ids: Tensor,
        *, steps: int, batch: int, lr: float, seed: int, half: bool,
    ) -> None:  # fmt: skip
        self.config, self.texts, self.draft_ids = config, texts, draft_ids
        self.steps, self.batch, self.lr, self.seed, self.half = steps, batch, lr, seed, half
        self.embed = embed
        self.rows = lm_head[draft_ids].to(torch.bfloat16 if half else torch.float32)  # [D, H]
        sample = texts.hidden[texts.written].float()
        self.scale = float(sample.square().mean().sqrt())  # mean size of a state's entries
        self.weights = _fresh(config, self.scale, seed)
        self.step = 0
        matrices = [w for w in self.weights.values() if w.ndim == 2]
        vectors = [w for w in self.weights.values() if w.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": DECAY_WEIGHTS},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))

    def run(self, until: int, progress: Callable[[int, float], None]) -> None:
        """Steps up to number `until`. progress(step, loss) after each."""
        while self.step < until:
            for group in self.optimiser.param_groups:
                group["lr"] = self.lr * _schedule(self.step, self.steps)
            unroll = UNROLL if self.step >= UNROLL_FROM * self.steps else 1
            loss = self.loss(self.texts.batch(self.step, self.batch, self.seed), unroll)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), CLIP)
            self.optimiser.step()
            self.step += 1
            progress(self.step, loss.item())

    def loss(self, starts: Tensor, unroll: int) -> Tensor:
        """starts [n]: places of the states that the head is unrolled from. A scalar."""
        texts, limit = self.texts, len(self.texts.tokens) - 1
        starts = starts.clamp(max=limit)
        ends = texts.last[starts]  # of the texts they are in
        places, inverse = torch.unique(
            (starts[:, None] + torch.arange(1, unroll + 1)).clamp(max=limit), return_inverse=True
        )
        with torch.no_grad(), self._products():
            truth = F.linear(self._hidden(places), self.rows).float().softmax(dim=1)  # [P, D]
        state, total = self._hidden(starts), torch.zeros(())
        weight_sum = 0.0
        for j in range(unroll):
            kept = (starts + j + 1 <= ends).nonzero()[:, 0]  # a stretch may run over its text's end
            if not len(kept):
                break
            starts, ends, state, inverse = starts[kept], ends[kept], state[kept], inverse[kept]
            embedded = self.embed[texts.tokens[starts + j + 1]].float()
            with self._products():
                state = advance(self.weights, state, embedded, self.config.blocks, F.linear)
                logits = F.linear(state, self.rows)
            target = inverse[:, j]
            entropy = _CrossEntropy.apply(logits, truth[target])
            distance = F.smooth_l1_loss(state / self.scale, self._hidden(starts + j + 1) / self.scale)
            total = total + DECAY**j * (entropy + STATE * distance)
            weight_sum += DECAY**j
        return total / weight_sum

    def _hidden(self, places: Tensor) -> Tensor:
        return self.texts.hidden[places].float()

    def _products(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.half)

    def save(self, path: Path, recipe: dict[str, Any]) -> None:
        tensors = {f"weight.{n}": w.detach() for n, w in self.weights.items()}
        for name, w in self.weights.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if w in self.optimiser.state:
                    tensors[f"{key}.{name}"] = self.optimiser.state[w][key]
        write_atomically(path, tensors, {"step": str(self.step), "recipe": json.dumps(recipe)})

    def resume(self, path: Path, recipe: dict[str, Any]) -> None:
        """Continue from what save() wrote. Raises ConfigError if it is damaged or of another recipe."""
        try:
            with safe_open(path, framework="pt") as file:
                self.step = int(file.metadata()["step"])
                before = json.loads(file.metadata()["recipe"])
                if before != recipe:
                    raise ValueError(f"it was made with {before}")
                for name, w in self.weights.items():
                    with torch.no_grad():
                        w.copy_(file.get_tensor(f"weight.{name}"))
                    self.optimiser.state[w] = {
                        "step": torch.tensor(float(self.step)),
                        **{key: file.get_tensor(f"{key}.{name}") for key in ("exp_avg", "exp_avg_sq")},
                    }
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"work: {path}: cannot be resumed from ({error}); delete it to train again"
            ) from error


class _CrossEntropy(torch.autograd.Function):
    """logits [n, D] of any dtype, truth [n, D] fp32 -> the mean cross entropy, a scalar.

    The gradient is made on the way, in place: log_softmax and its backward would take twice as many passes
    over what is by far the largest tensor here.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, truth: Tensor) -> Tensor:
        z = logits.float()
        z = z - z.amax(dim=1, keepdim=True)
        dot = torch.linalg.vecdot(z, truth)  # [n]
        total = z.exp_().sum(dim=1, keepdim=True)
        ctx.save_for_backward(z.div_(total).sub_(truth).div_(len(z)).to(logits.dtype))
        return (total[:, 0].log() - dot).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad, None


def _fresh(config: HeadConfig, scale: float, seed: int) -> dict[str, Tensor]:
    """A head that returns the state it is given: what it adds starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            w = torch.full(shape, scale if name == "norm_out" else 1.0)
        elif name.endswith("gate_up"):
            w = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        else:
            w = torch.zeros(shape)
        weights[name] = w.requires_grad_()
    return weights


def _schedule(step: int, steps: int) -> float:
    """Share of the highest rate: a linear rise, then a cosine down to 2%."""
    warm = max(round(steps * WARM_UP), 1)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))
