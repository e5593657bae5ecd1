"""Key sketches: the small summary of a sealed block that stays on the device, and how it is scored.

Owns: the kinds of sketch: building one from a block's keys, estimating attention mass per block from a
query. Must not know: requests, where blocks and sketches live, or how attention is computed. The default's
arithmetic is a kernel (kernels/reference_sketch.py), and so is the choice of blocks.

Letters in shapes: R rows (one query token each), Hq query heads, H KV heads, G = Hq / H, D head size,
n blocks, B tokens per block. A new selector is one class:
build, logits, bytes_per_block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from nano_oasis.kernels.dispatch import select_oasis_kernels
from nano_oasis.kernels.reference_sketch import (
    by_head,
    columns,
    fourbit_gathered_logits,
    group_means,
    nearest,
    pack,
    product,
    sum_tokens,
    unpack,
)
from nano_oasis.kernels.reference_sketch import top_blocks as top_blocks  # the step after scoring

Sketch = dict[str, Tensor]


class Selector(ABC):
    """One kind of sketch. A block's sketch depends on that block's keys alone, so it can follow the block.

    `build` makes the tensors of n sealed blocks, first dimension n, which the caller keeps in one slab
    per layer, indexed by block; `score` reads them gathered as [R, n, ...], or as [1, n, ...] when all
    rows look at the same blocks.
    """

    name: ClassVar[str]

    @abstractmethod
    def build(self, keys: Tensor) -> Sketch:
        """keys [n, B, H, D] of sealed blocks (after rope) -> tensors [n, H, ...]."""

    @abstractmethod
    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        """q fp32 [R, Hq, D], already scaled -> fp32 [R, Hq, n]: log of each block's sum of exp(q.k)."""

    @abstractmethod
    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        """Device bytes of one block's sketch in one layer, metadata included."""

    def score(self, q: Tensor, sketch: Sketch, scale: float, valid: Tensor | None = None) -> Tensor:
        """q [R, Hq, D] -> estimated attention mass, fp32 [R, H, n], summing to 1 over the valid blocks.

        Softmax over blocks for each query head, then the mean over the G heads that share a KV head.
        valid [R, n] bool marks real blocks; the others are padding and get 0. A row without a valid
        block gets zeros.
        """
        logits = self.logits(q.float() * scale, sketch)
        if valid is not None:
            logits = logits.masked_fill(~valid[:, None], -torch.inf)
        return _mass(logits, next(iter(sketch.values())).shape[2])

    def logits_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, heads: slice = slice(None)
    ) -> Tensor:
        """As logits, from slabs [N, H, ...] through a table: -> [R, Hq, M], -inf from counts[r] on.

        table [R, M] int64, of which row r has counts[r] blocks (int64; the other entries are any blocks
        that exist); q [R, Hq, D] has the query heads of the KV heads `heads`.
        """
        logits = self.logits(q, {name: slab[table][:, :, heads] for name, slab in slabs.items()})
        valid = torch.arange(table.shape[1], device=table.device) < counts[:, None]
        return logits.masked_fill(~valid[:, None], -torch.inf)

    def score_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, scale: float,
        heads: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """As score, from slabs through a table (see logits_at) -> fp32 [R, H of `heads`, M]."""
        count = len(range(*heads.indices(next(iter(slabs.values())).shape[1])))
        return _mass(self.logits_at(q.float() * scale, slabs, table, counts, heads), count)

    def mass_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, scale: float, groups: int = 1
    ) -> Tensor:
        """score_at for choices that the KV heads make in `groups` groups -> fp32 [groups, R, M]."""
        return group_means(self.score_at(q, slabs, table, counts, scale), groups)


def _mass(logits: Tensor, heads: int) -> Tensor:
    """[R, Hq, n] -> [R, heads, n]; zeros for a row of -inf, where softmax is over nothing."""
    mass = torch.softmax(logits, -1).nan_to_num(0.0)
    return mass.view(len(mass), heads, -1, mass.shape[-1]).mean(2)


def per_layer(mass: Tensor) -> Tensor:
    """[R, H, n] -> [R, 1, n]: one choice that all KV heads of the layer share."""
    return mass.mean(1, keepdim=True)


# --- selectors --------------------------------------------------------------------------------------
class ExactMass(Selector):
    """The oracle: the keys themselves. For evaluation; it saves nothing."""

    name = "exact"

    def build(self, keys: Tensor) -> Sketch:
        return {"keys": by_head(keys)}

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        keys = sketch["keys"]
        return sum_tokens(product(q, columns(keys)), keys.shape[-1])

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return 4 * block_size * heads * head_dim


class BlockMean(Selector):
    """The mean key. Cheapest; blind to one loud key among fifteen quiet ones."""

    name = "mean"

    def build(self, keys: Tensor) -> Sketch:
        return {"mean": by_head(keys).mean(3).half()}  # [n, H, D]

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        return product(q, sketch["mean"].float().permute(0, 2, 3, 1))

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return 2 * heads * head_dim


class MinMax(Selector):
    """Smallest and largest value per channel: an upper bound on q.k of any key in the block (Quest)."""

    name = "minmax"

    def build(self, keys: Tensor) -> Sketch:
        k = by_head(keys)
        return {"low": k.amin(3).half(), "high": k.amax(3).half()}  # [n, H, D] each

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        low, high = (sketch[x].float().permute(0, 2, 3, 1) for x in ("low", "high"))
        return product(q.clamp(min=0), high) + product(q.clamp(max=0), low)

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return 4 * heads * head_dim


class _PerChannel(Selector):
    """Codes of a few bits and, for each channel of the block, a base and a step: key ~ base + step * code."""

    bits: ClassVar[int]

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        codes = sketch["codes"]
        base, step = (
            columns(sketch[x].float()[..., None].expand(*sketch[x].shape, codes.shape[-1]))
            for x in ("base", "step")
        )
        keys = base + step * unpack(columns(codes), self.bits)
        return sum_tokens(product(q, keys), codes.shape[-1])

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return heads * (block_size * head_dim * self.bits // 8 + 4 * head_dim)


class Sign1(_PerChannel):
    """One bit per key channel: above or below the block's mean, by the mean distance from it."""

    name = "sign1"
    bits = 1

    def build(self, keys: Tensor) -> Sketch:
        k = by_head(keys)  # [n, H, D, B]
        mean = k.mean(3, keepdim=True)
        distance = (k - mean).abs().mean(3)
        base = (mean.squeeze(3) - distance).half()  # code 0; code 1 is two distances higher
        return {"codes": pack(k > mean, 1), "base": base, "step": (2 * distance).half()}


class TwoBit(_PerChannel):
    """Two bits per key channel, evenly between the channel's smallest and largest value in the block."""

    name = "twobit"
    bits = 2

    def build(self, keys: Tensor) -> Sketch:
        k = by_head(keys)
        base = k.amin(3).half()
        step = ((k.amax(3) - base.float()) / 3).half()
        codes = nearest(k, base[..., None], step[..., None], 3)
        return {"codes": pack(codes, 2), "base": base, "step": step}


class FourBit(Selector):
    """Four bits per key channel, evenly between the token's smallest and largest channel."""

    name = "fourbit"

    def build(self, keys: Tensor) -> Sketch:
        codes, base, step = select_oasis_kernels(keys.device.type).fourbit_build(keys)
        return {"codes": codes, "base": base, "step": step}

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        return fourbit_gathered_logits(q, sketch["codes"], sketch["base"], sketch["step"])

    def logits_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, heads: slice = slice(None)
    ) -> Tensor:
        score = select_oasis_kernels(q.device.type).fourbit_logits
        return score(q, slabs["codes"], slabs["base"], slabs["step"], table, counts, heads)

    def mass_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, scale: float, groups: int = 1
    ) -> Tensor:
        mass, parts = select_oasis_kernels(q.device.type).fourbit_mass, ("codes", "base", "step")
        return mass(q, *(slabs[x] for x in parts), table, counts, scale, groups)

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return heads * block_size * (head_dim // 2 + 4)


SELECTORS: dict[str, type[Selector]] = {
    s.name: s for s in (ExactMass, BlockMean, MinMax, Sign1, TwoBit, FourBit)
}


def make_selector(name: str) -> Selector:
    """Raises ValueError for a name that is not in SELECTORS."""
    if name not in SELECTORS:
        raise ValueError(f"no selector {name!r}; choose one of {', '.join(SELECTORS)}")
    return SELECTORS[name]()
