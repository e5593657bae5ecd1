"""Moving blocks of some head groups within memory, compiled for the CPU.

Owns: the compiled version of reference_blocks.gather_groups, which has the contract. Must not know: requests,
tickets, where the host keeps its blocks.

A head group's part of a host block is one piece of a few hundred bytes per token: too small for a call each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_oasis.kernels.simd import jit

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element: moved, not looked at


def supports(host_keys: Tensor, slot_keys: Tensor) -> bool:
    """On the CPU, elements of one to four bytes."""
    return slot_keys.device.type == "cpu" and host_keys.element_size() in _WORDS


def gather_groups(
    host_keys: Tensor, host_values: Tensor, slot_keys: Tensor, slot_values: Tensor, blocks: Tensor,
    groups: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    """See reference_blocks.gather_groups."""
    word = _WORDS[host_keys.element_size()]
    caches = [x.view(word).numpy() for x in (host_keys, host_values, slot_keys, slot_values)]
    _gather(*caches, blocks.numpy(), groups.numpy(), slots.numpy())


@jit
def _gather(host_keys, host_values, slot_keys, slot_values, blocks, groups, slots):  # type: ignore[no-untyped-def]
    for i in range(len(blocks)):
        _move(host_keys, slot_keys, blocks[i], groups[i], slots[i])
        _move(host_values, slot_values, blocks[i], groups[i], slots[i])


@jit
def _move(source, target, block, group, slot):  # type: ignore[no-untyped-def]
    _, size, heads, dim = target.shape
    for t in range(size):
        for h in range(heads):
            for d in range(dim):
                target[slot, t, h, d] = source[block, t, group * heads + h, d]
