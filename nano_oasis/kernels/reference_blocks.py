"""Moving and encoding whole blocks in plain torch: the oracle of the Triton kernels, and what runs on CPU.

Owns: the meaning of gather_blocks, gather_groups, quantise and dequantise. Must not know: requests, tickets,
where the host keeps its blocks, Triton. Letters in shapes: N blocks in host memory, S slots, n blocks that
move, B tokens per block, H KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-100  # keeps scales and products clear of subnormal numbers
LARGEST_VALUE = 0.99  # of the dtype's range: beyond it x + scale / 2 could overflow


# --- moving -----------------------------------------------------------------------------------------
def gather_blocks(
    host_keys: Tensor, host_values: Tensor, slot_keys: Tensor, slot_values: Tensor, blocks: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    """Block blocks[i] of host memory -> slot slots[i], keys and values.

    host_keys, host_values [N, B, H, D] on the CPU, any dtype; they may be a slice of the heads of a wider
    slab. slot_keys, slot_values [S, B, H, D] of the same dtype, contiguous. blocks, slots [n] int64 on the
    CPU, no slot twice. Blocks that are consecutive on both sides travel as one copy. With slots on another
    device the copies are enqueued on its current stream: neither side may change until they are done.
    """
    ids, to = blocks.tolist(), slots.tolist()
    for source, target in ((host_keys, slot_keys), (host_values, slot_values)):
        if target.device.type == "cpu":
            copy_rows(source, ids, target, to)
            continue
        for start, end in runs(ids, to):
            n = end - start
            piece = source[ids[start] : ids[start] + n]
            target[to[start] : to[start] + n].copy_(piece, non_blocking=True)


def gather_groups(
    host_keys: Tensor, host_values: Tensor, slot_keys: Tensor, slot_values: Tensor, blocks: Tensor,
    groups: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    """Head group groups[i] of block blocks[i] of host memory -> slot slots[i], keys and values.

    As gather_blocks, with host_keys, host_values [N, B, H, D] and slots of Hg heads [S, B, Hg, D]; group g
    has heads [g * Hg, (g + 1) * Hg). groups [n] int64.
    """
    size = slot_keys.shape[2]
    for group in groups.unique().tolist():
        heads, own = slice(group * size, (group + 1) * size), groups == group
        parts = host_keys[:, :, heads], host_values[:, :, heads]
        gather_blocks(*parts, slot_keys, slot_values, blocks[own], slots[own])


def runs(ids: Sequence[int], also: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
    """Pieces of `ids` that are consecutive: [7, 8, 9, 4] -> (0, 3), (3, 4), as start and end index.

    With `also`, of the same length, pieces that are consecutive in both.
    """
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1 or (also and also[i] != also[i - 1] + 1):
            yield start, i
            start = i


def copy_rows(source: Tensor, rows: Sequence[int], target: Tensor, to: Sequence[int]) -> None:
    """target[to[i]] = source[rows[i]], first dimensions of tensors on the CPU.

    As bytes through numpy: one plain copy per run, where torch's index_copy_ walks element by element with
    the index innermost (measured here at half the speed or less), and a torch slice costs more to make.
    """
    a, b = source.view(torch.uint8).numpy(), target.view(torch.uint8).numpy()
    for start, end in runs(rows, to):
        n = end - start
        b[to[start] : to[start] + n] = a[rows[start] : rows[start] + n]


# --- int8 -------------------------------------------------------------------------------------------
def quantise(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """x [..., B, H, D] -> int8 codes of its shape and bf16 scale, which has 1 on `axis`.

    axis -3: one scale per channel, over the block's tokens (keys); -1: one per token, over its channels
    (values). The scale is the group's largest magnitude / 127 rounded up to bfloat16, at least 2**-100, so
    every value has a code in -127..127 and |x - code * scale| <= scale / 2. A group with NaN, inf or a value
    beyond 99% of the dtype's range has the scale NaN and undefined codes: the caller looks.
    """
    largest = x.abs().amax(axis, keepdim=True).float()
    scale = round_up((largest / 127).clamp(min=SMALLEST_SCALE))
    scale = scale.masked_fill(~(largest <= LARGEST_VALUE * torch.finfo(x.dtype).max), torch.nan)
    return (x.float() / scale.float()).round_().to(torch.int8), scale


def dequantise(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """codes [n, B, H, D] times scale [n, 1, H, D] or [n, B, H, 1] -> out, rounded once to its dtype."""
    torch.mul(codes, scale.float(), out=out)


def round_up(x: Tensor) -> Tensor:
    """Positive finite fp32 -> the smallest bfloat16 that is not below it (bf16 = the upper 16 bits)."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
