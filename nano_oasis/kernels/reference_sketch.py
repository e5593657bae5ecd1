"""Four-bit key sketches and the choice of blocks in plain torch: the oracle for every other version of them.

Owns: the meaning of fourbit_build, fourbit_logits, fourbit_mass and top_blocks, and the arithmetic they share
with the other selectors. Must not know: requests, where sketches live, which selector is used, Triton.

Letters in shapes: R rows (one query token each), Hq query heads, H KV heads, G = Hq / H, D head size,
N blocks in the slabs, n of them, M table width, B tokens per block, C = D or the part of it in a byte row.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_QUERY = 1e-30  # a query of zeros is divided by this


def fourbit_build(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four bits per key channel, evenly between the token's smallest and largest channel.

    keys [n, B, H, D], float -> codes uint8 [n, H, D / 2, B] (channel c in the low bits of byte c, c + D / 2
    in the high bits), base and step fp16 [n, H, B]; key ~ base + step * code. Raises ValueError for an odd D.
    """
    k = by_head(keys)
    base = k.amin(2).half()
    step = ((k.amax(2) - base.float()) / 15).half()
    return pack(nearest(k, base[:, :, None], step[:, :, None], 15), 4), base, step


def fourbit_logits(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor,
    heads: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Log of each block's sum of exp(q.k), fp32 [R, Hq, M]; -inf from counts[r] on.

    q fp32 [R, Hq, D], already scaled, the query heads of the KV heads `heads`, of which each is rounded to 8
    bits; codes [N, H, D / 2, B], base and step [N, H, B] as fourbit_build makes them; table [R, M] int64, of
    which row r has counts[r] blocks (int64; the other entries are any blocks that exist).
    """
    logits = fourbit_gathered_logits(q, *(x[table][:, :, heads] for x in (codes, base, step)))
    valid = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return logits.masked_fill(~valid[:, None], -torch.inf)


def fourbit_mass(
    q: Tensor, codes: Tensor, base: Tensor, step: Tensor, table: Tensor, counts: Tensor, scale: float,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Softmax of fourbit_logits over a row's blocks, then the mean over the query heads of each of `groups`
    groups of KV heads: fp32 [groups, R, M].

    q of any float dtype is scaled by `scale` here. A row without blocks gets zeros.
    """
    logits = fourbit_logits(q.float() * scale, codes, base, step, table, counts)
    return group_means(torch.softmax(logits, -1).nan_to_num(0.0), groups)


def group_means(mass: Tensor, groups: int) -> Tensor:
    """[R, heads, M] -> [groups, R, M]: the mean over each group's heads."""
    return mass.unflatten(1, (groups, mass.shape[1] // groups)).mean(2).transpose(0, 1).contiguous()


def fourbit_gathered_logits(q: Tensor, codes: Tensor, base: Tensor, step: Tensor) -> Tensor:
    """As fourbit_logits, of sketches gathered as [R, n, H, ...], or [1, n, H, ...] when all rows share them.

    q.(base + step * code) = base * sum(q) + step * q.code, and the keys are never written out. The query in
    q.code is rounded to 8 bits per head, which lets the products be made in integers; its error is a tenth
    of the codes'.
    """
    q_sum, q = q.sum(-1, keepdim=True), round_to_bytes(q)
    flat = columns(codes)  # [R, H, D / 2, n * B] uint8: low + 16 * high
    q_low, q_high = q.chunk(2, -1)
    # q_low.low + q_high.high with high = (byte - low) / 16: one mask instead of two shifts
    dots = product(q_low - q_high / 16, (flat & 15).float()) + product(q_high / 16, flat.float())
    bases, steps = (_per_query_head(x, q.shape[1]) for x in (base, step))
    return sum_tokens(bases * q_sum + steps * dots, codes.shape[-1])


def top_blocks(mass: Tensor, count: int, forced: Tensor, valid: Tensor | None = None) -> Tensor:
    """The blocks to read: int64 [R, H or 1, min(count, n)], most wanted first, -1 where there is none.

    mass fp32 [R, H or 1, n], each from 0 to 1; forced [R, n] bool: blocks taken whatever their mass (sink,
    recent), which count towards `count`; valid [R, n] bool: real blocks. The order among equals, and so
    among forced blocks, is the backend's own. Fixed shapes and no look at the values, so it can be captured
    in a graph.
    """
    ranked = mass.masked_fill(forced[:, None], 2.0)  # above every mass, which is at most 1
    if valid is not None:
        ranked = ranked.masked_fill(~valid[:, None], -1.0)
    best, ids = ranked.topk(min(count, mass.shape[-1]), -1)
    return ids.masked_fill(best < 0, -1)


# --- arithmetic that the selectors share ----------------------------------------------------------
def by_head(keys: Tensor) -> Tensor:
    """[n, B, H, D] -> fp32 [n, H, D, B]. Tokens are the last dimension: a channel's values lie together."""
    return keys.permute(0, 2, 3, 1).float().contiguous()


def columns(x: Tensor) -> Tensor:
    """Gathered [R, n, H, C, B] -> [R, H, C, n * B], one column per token."""
    return x.permute(0, 2, 3, 1, 4).flatten(3)


def product(q: Tensor, columns: Tensor) -> Tensor:
    """q [R, Hq, C], columns fp32 [R or 1, H, C, N] -> q.k, [R, Hq, N]."""
    groups, heads, channels, _ = columns.shape
    # Rows that share their columns join the group of heads, so each KV head is one product for all rows.
    shape = (groups, len(q) // max(groups, 1), heads, q.shape[1] // heads, channels)
    query = q.view(shape).transpose(1, 2)  # [groups, H, r, G, C]
    out = query.flatten(2, 3) @ columns  # [groups, H, r * G, N]
    return out.unflatten(2, query.shape[2:4]).transpose(1, 2).reshape(*q.shape[:2], columns.shape[3])


def sum_tokens(logits: Tensor, block_size: int) -> Tensor:
    """[R, Hq, n * B] -> [R, Hq, n]."""
    return torch.logsumexp(logits.unflatten(-1, (logits.shape[-1] // block_size, block_size)), -1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2**bits, [n, H, C, B] -> uint8 [n, H, C * bits / 8, B].

    Channel c is in byte c modulo C * bits / 8; the first channels have the low bits. Raises ValueError
    when the channels do not fill whole bytes.
    """
    check_channels(codes.shape[2], bits)
    parts = codes.to(torch.uint8).chunk(8 // bits, 2)
    packed = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        packed |= part << (i * bits)
    return packed


def check_channels(channels: int, bits: int) -> None:
    """Raises ValueError when the channels do not fill whole bytes."""
    if channels % (8 // bits):
        raise ValueError(
            f"{channels} channels do not fill whole bytes at {bits} bits each; "
            f"the head size must be a multiple of {8 // bits}, or choose another selector"
        )


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack on columns: [R, H, C * bits / 8, N] -> fp32 [R, H, C, N]."""
    mask = 2**bits - 1
    return torch.cat([((packed >> shift) & mask).float() for shift in range(0, 8, bits)], 2)


def round_to_bytes(q: Tensor) -> Tensor:
    """q [..., D] rounded to 255 even steps between minus and plus its largest magnitude."""
    step = q.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_QUERY) / 127
    return (q / step).round() * step


def nearest(x: Tensor, base: Tensor, step: Tensor, most: int) -> Tensor:
    """The code in 0..most whose base + step * code is nearest. A step of 0 (all values equal) gives 0."""
    codes = (x - base.float()) / step.float()
    return codes.nan_to_num(0.0, 0.0, 0.0).round().clamp(0, most)


def _per_query_head(x: Tensor, query_heads: int) -> Tensor:
    """Gathered [R, n, H, B] -> fp32 [R, Hq, n * B]."""
    flat = x.transpose(1, 2).flatten(2).float()
    return flat.repeat_interleave(query_heads // flat.shape[1], 1)
