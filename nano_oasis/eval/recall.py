"""What sparse attention would have read: recall of the true attention mass, and of the blocks that matter.

Owns: a view of KV that attends densely and records queries, keys and mass; drafts by n-gram; the recall
figures. Must not know: the oasis store, settings other than what shapes a choice, tasks.

One forward pass over a prompt's continuation, with dense attention. Beside each true row stands a row for a
drafted next token, as speculative decoding would run it: its query is what the lookahead predictor chooses
with.

    row t            token t,               sees the prefix and rows 0..t
    draft row t      a guess at token t+1,  sees the prefix, rows 0..t and itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nano_oasis.config import EngineConfig
from nano_oasis.eval.decoder import draft_next
from nano_oasis.eval.session import Session
from nano_oasis.memory.sketch import Selector, Sketch, make_selector, top_blocks

PREDICTORS = ("oracle", "current", "lookahead", "previous")


@dataclass(frozen=True)
class Choice:
    """What shapes a choice of blocks. budget in tokens; asked: the same as it was asked for, which is its
    name."""

    selector: str
    budget: int
    block: int
    head_groups: int | None  # None: one for each KV head
    asked: str = ""

    def groups(self, kv_heads: int) -> int:
        return self.head_groups or kv_heads


@dataclass
class Recall:
    """Means over steps and head groups, per full-attention layer.

    mass: share of the true attention mass on the blocks chosen by the step's own query. By predictor, over
    steps 1 and later: `found`, the share of the blocks that the oracle would read at a step, beyond those
    that are always read, which the predictor's choice contains (None where there are no such blocks); `read`,
    the share of the step's true mass on the predictor's choice.
    """

    layers: list[int] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    found: dict[str, list[float | None]] = field(default_factory=lambda: {p: [] for p in PREDICTORS})
    read: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PREDICTORS})
    drafts_right: float = 0.0


class RecordingView:
    """See KVView. T true rows at positions prefix.., then T - 1 draft rows at prefix + 1.."""

    def __init__(self, session: Session, row: int, steps: int, choices: Sequence[Choice]) -> None:
        self.session, self.row, self.steps = session, row, steps
        self.prefix = len(session.samples[row].ids) - 1
        self.results = {choice: Recall() for choice in choices}
        at = torch.cat((torch.arange(steps), torch.arange(1, steps)))
        self.positions = self.prefix + at  # [R]
        true = torch.arange(2 * steps - 1) < steps
        # [R, R]: a row sees the true rows before its position, and itself.
        self.sees = ((at < at[:, None]) & true) | torch.eye(2 * steps - 1, dtype=torch.bool)
        self._new: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._new = k, v

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = (
            torch.cat(x) for x in zip(self.session.kv(self.row, layer), self._new, strict=True)
        )  # [prefix + R, H, D]
        rows, heads = len(q), keys.shape[1]
        sees = torch.cat((torch.ones(rows, self.prefix, dtype=torch.bool), self.sees), 1)
        if window is not None:
            where = torch.cat((torch.arange(self.prefix), self.positions))
            sees &= where > self.positions[:, None] - window
        query = q.float().view(rows, heads, -1, q.shape[-1])
        logits = torch.einsum("rhgd,nhd->rhgn", query, keys.float()) * scale
        probs = logits.masked_fill(~sees[:, None, None], -torch.inf).softmax(-1)  # [R, H, G, prefix + R]
        out = torch.einsum("rhgn,nhd->rhgd", probs, values.float())
        if window is None:
            end = self.prefix + self.steps
            mass = probs[: self.steps, :, :, :end].mean(2)  # [T, H, n] of the true rows
            scorer = _Scorer(q, keys[:end], self.positions[: self.steps], scale)
            for choice, recall in self.results.items():
                self._record(layer, choice, recall, scorer, mass)
        return out.reshape(q.shape).to(q.dtype)

    def _record(self, layer: int, choice: Choice, recall: Recall, scorer: _Scorer, mass: Tensor) -> None:
        """mass [T, H, prefix + T]: what the true rows gave each token, the mean over a KV head's query
        heads."""
        pick = _Picker(choice, self.positions[: self.steps])
        chosen = {p: pick(scorer.mass(p, choice)) for p in PREDICTORS}  # [T, groups, M] bool
        padded = torch.nn.functional.pad(mass, (0, -mass.shape[-1] % choice.block))
        true = padded.unflatten(-1, (-1, choice.block)).sum(-1)  # [T, H, M]
        true = true.unflatten(1, (choice.groups(true.shape[1]), -1)).mean(2)  # [T, groups, M]
        wanted = chosen["oracle"] & ~pick.forced[:, None]
        recall.layers.append(layer)
        recall.mass.append(float((true * chosen["current"]).sum(-1).mean()))
        later = slice(min(1, self.steps - 1), None)
        count = int(wanted[later].sum())
        for name, read in chosen.items():
            both = int((read & wanted)[later].sum())
            recall.found[name].append(both / count if count else None)
            recall.read[name].append(float((true * read).sum(-1)[later].mean()))


class _Scorer:
    """Estimated mass of the sealed blocks of one layer, by predictor; each sketch is built and scored
    once."""

    def __init__(self, q: Tensor, keys: Tensor, positions: Tensor, scale: float) -> None:
        """q [T + T - 1, Hq, D], true rows first; keys [n, H, D] up to the last true row; positions [T]."""
        steps = len(positions)
        own, drafted = q[:steps], q[steps:]
        # What row t's blocks are chosen with: its own query, or, one step early, that of the row before or of
        # the draft that stood beside it.
        self.queries = {
            "own": own,
            "previous": torch.cat((own[:1], own[:-1])),
            "lookahead": torch.cat((own[:1], drafted)),
        }
        self.keys, self.positions, self.scale = keys, positions, scale
        self._sketches: dict[tuple[str, int], tuple[Selector, Sketch]] = {}
        self._mass: dict[tuple[str, str, int], Tensor] = {}

    def mass(self, predictor: str, choice: Choice) -> Tensor:
        """[T, groups, blocks that are full at the last row] fp32."""
        name = "exact" if predictor == "oracle" else choice.selector
        by = predictor if predictor in self.queries else "own"
        key = (name, by, choice.block)
        if key not in self._mass:
            selector, sketch = self._sketch(name, choice.block)
            full = len(self.keys) // choice.block
            sealed = torch.arange(full) < (self.positions // choice.block)[:, None]
            self._mass[key] = selector.score(self.queries[by], sketch, self.scale, sealed)  # [T, H, full]
        mass = self._mass[key]
        return mass.unflatten(1, (choice.groups(mass.shape[1]), -1)).mean(2)

    def _sketch(self, name: str, block: int) -> tuple[Selector, Sketch]:
        if (name, block) not in self._sketches:
            selector, full = make_selector(name), len(self.keys) // block
            built = selector.build(self.keys[: full * block].unflatten(0, (full, block)))
            self._sketches[name, block] = selector, {part: x[None] for part, x in built.items()}
        return self._sketches[name, block]


class _Picker:
    """The engine's rule for which blocks are read, for rows at consecutive positions. M: blocks at the last
    row."""

    def __init__(self, choice: Choice, positions: Tensor) -> None:
        options = EngineConfig(kv_mode="oasis")
        count = positions // choice.block + 1  # [T] blocks of the context, the unsealed one included
        at = torch.arange(int(count.max()))
        self.valid = at < count[:, None]  # [T, M]
        sink, recent = options.sink_blocks, options.recent_blocks
        self.forced = self.valid & ((at < sink) | (at >= count[:, None] - recent))
        self.budget = max(-(-choice.budget // choice.block), sink + recent + 1)

    def __call__(self, mass: Tensor) -> Tensor:
        """mass [T, groups, full] -> the blocks read, [T, groups, M] bool."""
        groups, width = mass.shape[1], self.valid.shape[1]
        mass = torch.nn.functional.pad(mass, (0, width - mass.shape[2])).flatten(1)  # [T, groups * M]
        forced, valid = (x.repeat(1, groups) for x in (self.forced, self.valid))
        ids = top_blocks(mass[:, None], self.budget * groups, forced, valid)[
            :, 0
        ]  # the groups share a budget
        read = torch.zeros((len(mass), groups * width + 1), dtype=torch.bool)
        read.scatter_(-1, ids.where(ids >= 0, groups * width), True)  # the last column is for -1
        return read[:, :-1].unflatten(1, (groups, width))


@torch.inference_mode()
def measure_recall(
    session: Session, row: int, teacher: Sequence[int], choices: Sequence[Choice]
) -> dict[Choice, Recall]:
    """Recall of each choice over the steps that predict `teacher`, after row's prefilled prompt.

    At least two steps, or nothing can be predicted: raises ValueError.
    """
    if len(teacher) < 2:
        raise ValueError(f"recall needs at least 2 steps, got {len(teacher)}")
    prompt = list(session.samples[row].ids)
    known = prompt + list(
        teacher[:-1]
    )  # rows 0..T-1 are the last prompt token and all but the last of teacher
    steps, start = len(teacher), len(prompt)
    drafts = [draft_next(known[: start + t]) for t in range(steps - 1)]
    view = RecordingView(session, row, steps, choices)
    tokens = torch.tensor(known[start - 1 :] + drafts)
    session.decoder.model.forward(tokens, view.positions, view)
    right = sum(a == b for a, b in zip(drafts, teacher, strict=False)) / len(drafts)
    for recall in view.results.values():
        recall.drafts_right = right
    return view.results
