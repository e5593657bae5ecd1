"""Sparse decode on top of the dense model, for measuring selectors; no engine, no tiers, no copies.

Owns: the texts, dense prefill, and a view of KV that reads only chosen blocks. Must not know:
which selectors are compared or what is printed. Used by sketches.py.

Many steps cost one forward pass: row t of a pass of teacher-forced tokens attends to the blocks chosen
for row t and to the rows before it, whose keys come from the same sparse pass. That is exactly what
sequential sparse decode would compute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import math
import pydoc_data.topics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nano_oasis.kernels.batch import AttentionBatch, make_batch
from nano_oasis.kernels.dispatch import Kernels, select_kernels
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.memory.sketch import Selector, Sketch, make_selector, top_blocks
from nano_oasis.model import Model
from nano_oasis.tokenizer import Tokenizer, load_tokenizer
from nano_oasis.weights import load_checkpoint, resolve_model

CHUNK = 500  # prefill tokens per forward pass
# Each unchosen block as one token: weight from its mean key (centroid) or its sketch (mass), its mean value;
# or all of them as one token: weight from their sketches, value the mean of all (mean) or nothing (zero).
ESTIMATES = ("", "centroid", "mass", "mean", "zero")
RULES = ("mean", "max", "kvmax", "mean+max", "sqrt", "square", "top1", "top2", "kvtop1", "rank")


def real_texts() -> dict[str, str]:
    """Three kinds of real text that come with Python and numpy."""
    licence = next(
        f for f in importlib.metadata.files("numpy") or [] if str(f).endswith("licenses/LICENSE.txt")
    )
    topics = pydoc_data.topics.topics
    return {
        "code": inspect.getsource(argparse),
        "legal": licence.read_text(),
        "prose": "\n\n".join(topics[key] for key in sorted(topics)),
    }


@dataclass(frozen=True)
class Sparse:
    """One way of decoding. `early` is the budget's multiple in layers 0 and 1; 0 = those layers dense."""

    selector: str = "exact"
    budget: int = 512  # tokens: sink block, recent blocks and chosen blocks; the unsealed tail is extra
    block: int = 16
    per_head: bool = False
    pool: bool = False  # with per_head: the heads of a layer share its budget, each takes as many as it needs
    predictor: str = "current"  # or "previous": choose by the query of the step before
    estimate: str = ""  # what stands in for the unchosen blocks; see ESTIMATES
    early: int = 4
    rule: str = "mean"  # how the query heads' masses become one; see reduce_heads
    free: bool = False  # softmax over the blocks that can be chosen, without the forced ones
    recent: int = 64  # newest sealed tokens that are always attended to

    def __str__(self) -> str:
        tags = [self.selector, ("head pool" if self.pool else "head") if self.per_head else "layer"]
        tags += ["previous"] if self.predictor == "previous" else []
        tags += [f"estimate {self.estimate}"] if self.estimate else []
        tags += [f"block {self.block}"] if self.block != 16 else []
        tags += [f"early x{self.early}" if self.early else "early dense"] if self.early != 4 else []
        tags += [self.rule] if self.rule != "mean" else []
        tags += ["free"] if self.free else []
        tags += [f"recent {self.recent}"] if self.recent != 64 else []
        return ", ".join(tags)


def reduce_heads(logits: Tensor, kv_heads: int, s: Sparse, forced: Tensor) -> Tensor:
    """logits [R, Hq, n], forced [R, n] bool -> what blocks are ranked by, [R, kv_heads or 1, n], 0..1.

    First softmax over blocks for each query head. Then, over the query heads that share a choice:
    mean; max; kvmax: the mean of each KV head's query heads, then max; mean+max: half of each; sqrt, square:
    power means; top1, top2, kvtop1: mean, but every query (KV) head's best blocks come before all others;
    rank: a block's best place in any head's order, so that the heads take turns.
    """
    if s.free:
        logits = logits.masked_fill(forced[:, None], -torch.inf)
    mass = torch.softmax(logits, -1).nan_to_num(0.0)
    x = mass.unflatten(1, (kv_heads if s.per_head else 1, -1))  # [R, choices, heads, n]
    if s.rule.startswith("kv"):
        x = mass.unflatten(1, (kv_heads, -1)).mean(2).unflatten(1, (x.shape[1], -1))
    mean = x.mean(2)
    if s.rule == "mean":
        return mean
    if s.rule in ("max", "kvmax"):
        return x.amax(2)
    if s.rule == "mean+max":
        return (mean + x.amax(2)) / 2
    if s.rule in ("sqrt", "square"):
        power = 0.5 if s.rule == "sqrt" else 2.0
        return x.pow(power).mean(2).pow(1 / power)
    open_mass = x.masked_fill(forced[:, None, None], -1.0)
    if s.rule == "rank":
        place = open_mass.argsort(-1, descending=True).argsort(-1).amin(2)
        return (mean - place) / x.shape[-1] + 1  # by place, then by mean mass; at most 1 + 1 / n
    best = open_mass.topk(int(s.rule[-1]), -1).indices.flatten(2)  # [R, choices, heads * k]
    return (mean + torch.zeros_like(mean).scatter_(2, best, 1.0)) / 2


def _each(mass: Tensor, counts: Tensor, forced: Tensor) -> Tensor:
    """mass [R, H or 1, n], counts [R] blocks for each choice -> ids [R, H or 1, most], -1 beyond."""
    ids = top_blocks(mass, int(counts.max()), forced)
    return ids.masked_fill(torch.arange(ids.shape[-1]) >= counts[:, None, None], -1)


def _pooled(mass: Tensor, counts: Tensor, forced: Tensor) -> Tensor:
    """As _each, but the best H * counts[r] blocks of all heads together; no head has over 3 shares."""
    heads, n = mass.shape[1:]
    most = min(3 * int(counts.max()), n)
    ids = top_blocks(mass, most, forced)  # [R, H, most]
    value = mass.masked_fill(forced[:, None], 2.0).gather(-1, ids).flatten(1)  # [R, H * most]
    place = value.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return ids.masked_fill((place >= heads * counts[:, None]).view(ids.shape), -1)


@dataclass
class SparseView:
    """The model's view of KV. Dense until `sparse` is set; then the first `prefix` tokens are sparse."""

    cache: KVCache
    kernels: Kernels
    batch: AttentionBatch | None = None  # of the current pass
    sparse: Sparse | None = None
    prefix: int = 0
    last_query: dict[int, Tensor] = field(default_factory=dict)  # layer -> [1, Hq, D], the newest token's
    sketches: dict[Any, tuple[Selector, Sketch]] = field(default_factory=dict)

    def forget(self) -> None:
        """Before another text."""
        self.sketches.clear()
        self.last_query.clear()

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert self.batch is not None
        self.kernels.write_kv(k, v, *self.cache.layer(layer), self.batch.slots)

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        assert self.batch is not None
        before, self.last_query[layer] = self.last_query.get(layer), q[-1:].clone()
        keys, values = self.cache.layer(layer)
        if self.sparse is None or (layer < 2 and not self.sparse.early):
            return self.kernels.attention(q, keys, values, self.batch, scale, window)
        start = self.batch.context_list[0] - len(q)  # position of row 0
        chooser = q
        if self.sparse.predictor == "previous":
            assert before is not None
            chooser = torch.cat((before, q[:-1]))
        return self._attend(layer, q, chooser, start, keys.flatten(0, 1), values.flatten(0, 1), scale)

    def _attend(
        self, layer: int, q: Tensor, chooser: Tensor, start: int, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """q, chooser [R, Hq, D] at positions start..; keys, values [tokens, H, D] -> [R, Hq, D]."""
        s, (rows, _, dim), heads = self.sparse, q.shape, keys.shape[1]
        assert s is not None
        size, n = s.block, self.prefix // s.block  # n sealed blocks of the prefix can be chosen
        old_k, old_v = (x[: n * size].view(n, size, heads, dim) for x in (keys, values))
        position = torch.arange(start, start + rows)
        tail = position // size  # the block each row writes to
        block, recent = torch.arange(n), s.recent // size
        forced = (block == 0) | (block >= (tail - recent)[:, None])  # [R, n]
        # Recent blocks past the prefix are attended to below, so they count but cannot be chosen.
        gone = (tail - n).clamp(0, recent)
        count = s.budget * (s.early if layer < 2 else 1) // size
        logits = self._logits(layer, chooser, old_k, scale)  # [R, Hq, n]
        mass = reduce_heads(logits, heads, s, forced)  # [R, H or 1, n]
        ids = (_pooled if s.pool else _each)(mass, count - gone, forced).expand(-1, heads, -1)
        head = torch.arange(heads)[None, :, None]
        picked = ids.clamp(min=0)
        k, v = (x.transpose(1, 2)[picked, head].flatten(2, 3) for x in (old_k, old_v))  # [R, H, tokens, D]
        query = q.view(rows, heads, -1, dim)
        old = (query @ k.transpose(2, 3) * scale).masked_fill(
            (ids < 0).repeat_interleave(size, -1)[:, :, None], -torch.inf
        )
        new_k, new_v = keys[n * size : start + rows], values[n * size : start + rows]
        new = torch.einsum("rhgd,thd->rhgt", query, new_k) * scale
        new = new.masked_fill(
            (torch.arange(n * size, start + rows) > position[:, None])[:, None, None], -torch.inf
        )
        scores, rest = [old, new], old_v.mean(1)  # rest [n, H, D]: mean values
        if s.estimate:
            if s.estimate == "centroid":
                weight = torch.einsum("rhgd,nhd->rhgn", query, old_k.mean(1)) * scale + math.log(size)
            else:
                weight = logits.unflatten(1, (heads, -1))
            chosen = torch.zeros(rows, heads, n + 1, dtype=torch.bool)  # the last column is for -1
            chosen.scatter_(-1, ids.where(ids >= 0, n), True)
            weight = weight.masked_fill(chosen[:, :, None, :n], -torch.inf)
            if s.estimate in ("mean", "zero"):
                weight = weight.logsumexp(-1, keepdim=True)
                rest = rest.mean(0, keepdim=True) * (s.estimate == "mean")
            scores.append(weight)
        parts = torch.softmax(torch.cat(scores, -1), -1).split([x.shape[-1] for x in scores], -1)
        out = parts[0] @ v + torch.einsum("rhgt,thd->rhgd", parts[1], new_v)
        if s.estimate:
            out = out + torch.einsum("rhgn,nhd->rhgd", parts[2], rest)
        return out.reshape(q.shape)

    def _logits(self, layer: int, q: Tensor, blocks: Tensor, scale: float) -> Tensor:
        """blocks [n, B, H, D] -> [R, Hq, n]. Sketches are kept, and extended as the prefix grows."""
        s = self.sparse
        assert s is not None
        key, n = (s.selector, s.block, layer), len(blocks)
        if key not in self.sketches:
            selector = make_selector(s.selector)
            self.sketches[key] = selector, selector.build(blocks)
        selector, sketch = self.sketches[key]
        have = len(next(iter(sketch.values())))
        if have < n:
            more = selector.build(blocks[have:])
            sketch = {name: torch.cat((x, more[name])) for name, x in sketch.items()}
            self.sketches[key] = selector, sketch
        return selector.logits(q * scale, {name: x[None, :n] for name, x in sketch.items()})


class Decoder:
    """The model, one sequence's cache, and a view that can be switched between dense and sparse."""

    def __init__(self, model: str, max_len: int) -> None:
        path = resolve_model(model)
        checkpoint = load_checkpoint(path, torch.float32)
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self.config = checkpoint.config
        self.model = Model(checkpoint.config, checkpoint.tensors, max_len)
        self.table = list(range(-(-max_len // 16)))
        self.cache = KVCache.allocate(self.config, len(self.table), 16, torch.float32, "cpu")
        self.view = SparseView(self.cache, select_kernels("cpu"))

    def forward(self, ids: Tensor, start: int) -> Tensor:
        """Tokens at positions start.. -> log-probabilities [tokens, V] of the next ones."""
        return torch.log_softmax(self.model.logits(self._hidden(ids, start)), -1)

    def prefill(self, ids: Tensor, start: int, stop: int) -> None:
        """Dense, positions [start, stop)."""
        self.view.sparse = None
        for a in range(start, stop, CHUNK):
            self._hidden(ids[a : min(a + CHUNK, stop)], a)

    def _hidden(self, ids: Tensor, start: int) -> Tensor:
        self.view.batch = make_batch([(self.table, start, len(ids))], 16)
        return self.model.forward(ids, torch.arange(start, start + len(ids)), self.view)

    def snapshot(self, start: int, stop: int) -> tuple[slice, Tensor, Tensor, dict[int, Tensor]]:
        """KV of positions [start, stop) and the newest queries, for `restore`."""
        slots = slice(start // 16, -(-stop // 16))
        queries = dict(self.view.last_query)
        return slots, self.cache.keys[:, slots].clone(), self.cache.values[:, slots].clone(), queries

    def restore(self, saved: tuple[slice, Tensor, Tensor, dict[int, Tensor]]) -> None:
        slots, keys, values, queries = saved
        self.cache.keys[:, slots], self.cache.values[:, slots] = keys, values
        self.view.last_query = dict(queries)
