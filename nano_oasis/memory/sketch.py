"""Key sketches: the small summary of a sealed block that stays on the device, and how it is scored.

Owns: building a sketch from a block's keys, estimating attention mass per block from a query, and the
choice of blocks. Must not know: requests, where blocks and sketches live, or how attention is computed.

Letters in shapes: R rows (one query token each), Hq query heads, H KV heads, G = Hq / H, D head size,
n blocks, B tokens per block. A new selector is one class:
build, logits, bytes_per_block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from nano_oasis.kernels.dispatch import numba_works

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
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, scale: float,
        heads: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """score_at with one choice that all of `heads` share -> fp32 [R, M]."""
        return self.score_at(q, slabs, table, counts, scale, heads).mean(1)


def _mass(logits: Tensor, heads: int) -> Tensor:
    """[R, Hq, n] -> [R, heads, n]; zeros for a row of -inf, where softmax is over nothing."""
    mass = torch.softmax(logits, -1).nan_to_num(0.0)
    return mass.view(len(mass), heads, -1, mass.shape[-1]).mean(2)


def per_layer(mass: Tensor) -> Tensor:
    """[R, H, n] -> [R, 1, n]: one choice that all KV heads of the layer share."""
    return mass.mean(1, keepdim=True)


def top_blocks(mass: Tensor, count: int, forced: Tensor, valid: Tensor | None = None) -> Tensor:
    """The blocks to read: int64 [R, H or 1, min(count, n)], most wanted first, -1 where there is none.

    mass [R, H or 1, n]; forced [R, n] bool: blocks taken whatever their mass (sink, recent), which count
    towards `count`; valid [R, n] bool: real blocks. Fixed shapes and no look at the values, so it can be
    captured in a graph.
    """
    ranked = mass.masked_fill(forced[:, None], 2.0)  # above every mass, which is at most 1
    if valid is not None:
        ranked = ranked.masked_fill(~valid[:, None], -1.0)
    best, ids = ranked.topk(min(count, mass.shape[-1]), -1)
    return ids.masked_fill(best < 0, -1)


# --- arithmetic that the selectors share ----------------------------------------------------------
def _by_head(keys: Tensor) -> Tensor:
    """[n, B, H, D] -> fp32 [n, H, D, B]. Tokens are the last dimension: a channel's values lie together."""
    return keys.permute(0, 2, 3, 1).float().contiguous()


def _columns(x: Tensor) -> Tensor:
    """Gathered [R, n, H, C, B] -> [R, H, C, n * B], one column per token."""
    return x.permute(0, 2, 3, 1, 4).flatten(3)


def _product(q: Tensor, columns: Tensor) -> Tensor:
    """q [R, Hq, C], columns fp32 [R or 1, H, C, N] -> q.k, [R, Hq, N]."""
    groups, heads, channels, _ = columns.shape
    # Rows that share their columns join the group of heads, so each KV head is one product for all rows.
    query = q.view(groups, -1, heads, q.shape[1] // heads, channels).transpose(1, 2)  # [groups, H, r, G, C]
    out = query.flatten(2, 3) @ columns  # [groups, H, r * G, N]
    return out.unflatten(2, query.shape[2:4]).transpose(1, 2).reshape(*q.shape[:2], -1)


def _sum_tokens(logits: Tensor, block_size: int) -> Tensor:
    """[R, Hq, n * B] -> [R, Hq, n]."""
    return torch.logsumexp(logits.unflatten(-1, (-1, block_size)), -1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2**bits, [n, H, C, B] -> uint8 [n, H, C * bits / 8, B].

    Channel c is in byte c modulo C * bits / 8; the first channels have the low bits. Raises ValueError
    when the channels do not fill whole bytes.
    """
    if codes.shape[2] % (8 // bits):
        raise ValueError(
            f"{codes.shape[2]} channels do not fill whole bytes at {bits} bits each; "
            f"the head size must be a multiple of {8 // bits}, or choose another selector"
        )
    parts = codes.to(torch.uint8).chunk(8 // bits, 2)
    packed = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        packed |= part << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack on columns: [R, H, C * bits / 8, N] -> fp32 [R, H, C, N]."""
    mask = 2**bits - 1
    return torch.cat([((packed >> shift) & mask).float() for shift in range(0, 8, bits)], 2)


# --- selectors --------------------------------------------------------------------------------------
class ExactMass(Selector):
    """The oracle: the keys themselves. For evaluation; it saves nothing."""

    name = "exact"

    def build(self, keys: Tensor) -> Sketch:
        return {"keys": _by_head(keys)}

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        keys = sketch["keys"]
        return _sum_tokens(_product(q, _columns(keys)), keys.shape[-1])

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return 4 * block_size * heads * head_dim


class BlockMean(Selector):
    """The mean key. Cheapest; blind to one loud key among fifteen quiet ones."""

    name = "mean"

    def build(self, keys: Tensor) -> Sketch:
        return {"mean": _by_head(keys).mean(3).half()}  # [n, H, D]

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        return _product(q, sketch["mean"].float().permute(0, 2, 3, 1))

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return 2 * heads * head_dim


class MinMax(Selector):
    """Smallest and largest value per channel: an upper bound on q.k of any key in the block (Quest)."""

    name = "minmax"

    def build(self, keys: Tensor) -> Sketch:
        k = _by_head(keys)
        return {"low": k.amin(3).half(), "high": k.amax(3).half()}  # [n, H, D] each

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        low, high = (sketch[x].float().permute(0, 2, 3, 1) for x in ("low", "high"))
        return _product(q.clamp(min=0), high) + _product(q.clamp(max=0), low)

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return 4 * heads * head_dim


class _PerChannel(Selector):
    """Codes of a few bits and, for each channel of the block, a base and a step: key ~ base + step * code."""

    bits: ClassVar[int]

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        codes = sketch["codes"]
        base, step = (
            _columns(sketch[x].float()[..., None].expand(*sketch[x].shape, codes.shape[-1]))
            for x in ("base", "step")
        )
        keys = base + step * unpack(_columns(codes), self.bits)
        return _sum_tokens(_product(q, keys), codes.shape[-1])

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return heads * (block_size * head_dim * self.bits // 8 + 4 * head_dim)


class Sign1(_PerChannel):
    """One bit per key channel: above or below the block's mean, by the mean distance from it."""

    name = "sign1"
    bits = 1

    def build(self, keys: Tensor) -> Sketch:
        k = _by_head(keys)  # [n, H, D, B]
        mean = k.mean(3, keepdim=True)
        distance = (k - mean).abs().mean(3)
        base = (mean.squeeze(3) - distance).half()  # code 0; code 1 is two distances higher
        return {"codes": pack(k > mean, 1), "base": base, "step": (2 * distance).half()}


class TwoBit(_PerChannel):
    """Two bits per key channel, evenly between the channel's smallest and largest value in the block."""

    name = "twobit"
    bits = 2

    def build(self, keys: Tensor) -> Sketch:
        k = _by_head(keys)
        base = k.amin(3).half()
        step = ((k.amax(3) - base.float()) / 3).half()
        codes = _nearest(k, base[..., None], step[..., None], 3)
        return {"codes": pack(codes, 2), "base": base, "step": step}


class FourBit(Selector):
    """Four bits per key channel, evenly between the token's smallest and largest channel."""

    name = "fourbit"

    def build(self, keys: Tensor) -> Sketch:
        k = _by_head(keys)
        base = k.amin(2).half()  # [n, H, B]
        step = ((k.amax(2) - base.float()) / 15).half()
        codes = _nearest(k, base[:, :, None], step[:, :, None], 15)
        return {"codes": pack(codes, 4), "base": base, "step": step}

    def logits(self, q: Tensor, sketch: Sketch) -> Tensor:
        """q.(base + step * code) = base * sum(q) + step * q.code, and the keys are never written out.

        The query in q.code is rounded to 8 bits per head, which lets the products be made in integers; its
        error is a tenth of the codes'.
        """
        q_sum, q = q.sum(-1, keepdim=True), round_to_bytes(q)
        codes = _columns(sketch["codes"])  # [R, H, D / 2, N] uint8: low + 16 * high
        q_low, q_high = q.chunk(2, -1)
        # q_low.low + q_high.high with high = (byte - low) / 16: one mask instead of two shifts
        dots = _product(q_low - q_high / 16, (codes & 15).float()) + _product(q_high / 16, codes.float())
        base, step = (_per_query_head(sketch[x], q.shape[1]) for x in ("base", "step"))
        return _sum_tokens(base * q_sum + step * dots, sketch["codes"].shape[-1])

    def logits_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, heads: slice = slice(None)
    ) -> Tensor:
        if (compiled := _compiled(q, slabs)) is None:
            return super().logits_at(q, slabs, table, counts, heads)
        return compiled.fourbit_logits(q, slabs["codes"], slabs["base"], slabs["step"], table, counts, heads)

    def mass_at(
        self, q: Tensor, slabs: Sketch, table: Tensor, counts: Tensor, scale: float,
        heads: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        if (compiled := _compiled(q, slabs)) is None:
            return super().mass_at(q, slabs, table, counts, scale, heads)
        return compiled.fourbit_mass(
            q, slabs["codes"], slabs["base"], slabs["step"], table, counts, scale, heads
        )

    def bytes_per_block(self, block_size: int, heads: int, head_dim: int) -> int:
        return heads * block_size * (head_dim // 2 + 4)


def _compiled(q: Tensor, slabs: Sketch) -> Any:
    """The module with the compiled version, where it can be used."""
    if not numba_works():
        return None
    from nano_oasis.kernels import cpu_sketch

    return cpu_sketch if cpu_sketch.supports(q, slabs["codes"]) else None


def round_to_bytes(q: Tensor) -> Tensor:
    """q [..., D] rounded to 255 even steps between minus and plus its largest magnitude."""
    step = q.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (q / step).round() * step


def _nearest(x: Tensor, base: Tensor, step: Tensor, most: int) -> Tensor:
    """The code in 0..most whose base + step * code is nearest. A step of 0 (all values equal) gives 0."""
    codes = (x - base.float()) / step.float()
    return codes.nan_to_num(0.0, 0.0, 0.0).round().clamp(0, most)


def _per_query_head(x: Tensor, query_heads: int) -> Tensor:
    """Gathered [R, n, H, B] -> fp32 [R, Hq, n * B]."""
    flat = x.transpose(1, 2).flatten(2).float()
    return flat.repeat_interleave(query_heads // flat.shape[1], 1)


SELECTORS: dict[str, type[Selector]] = {
    s.name: s for s in (ExactMass, BlockMean, MinMax, Sign1, TwoBit, FourBit)
}


def make_selector(name: str) -> Selector:
    """Raises ValueError for a name that is not in SELECTORS."""
    if name not in SELECTORS:
        raise ValueError(f"no selector {name!r}; choose one of {', '.join(SELECTORS)}")
    return SELECTORS[name]()
