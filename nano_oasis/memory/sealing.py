"""Full blocks go to the host tier, with a sketch, layer by layer.

Owns: that copy, and whose failure it is. Must not know: why a block is full, selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nano_oasis.memory.host_tier import HostTierError
from nano_oasis.memory.seat import Seat

if TYPE_CHECKING:
    from nano_oasis.memory.oasis_kv import OasisKV

Part = tuple[Seat, int]  # a request's block, by its position


def seal_or_fail(kv: OasisKV, parts: Sequence[Part]) -> dict[int, str]:
    """A block the host tier refuses (int8 takes no NaN, a file can vanish) fails its own request only.

    Returns what went wrong, by request id.
    """
    try:
        _seal(kv, parts)
    except HostTierError as error:
        seats = {seat.request.id: seat for seat, _ in parts}
        if len(seats) == 1:
            return {parts[0][0].request.id: f"KV could not be stored: {error}"}
        failures: dict[int, str] = {}
        for seat in seats.values():
            failures |= seal_or_fail(kv, [p for p in parts if p[0] is seat])
        return failures
    return {}


def _seal(kv: OasisKV, parts: Sequence[Part]) -> None:
    """All rows' blocks together."""
    blocks = torch.tensor([s.request.block_table[p] for s, p in parts])  # [n] host blocks
    seats, positions = torch.tensor([s.index for s, _ in parts]), torch.tensor([p for _, p in parts])
    for layer in range(kv.config.num_layers):
        planes = [layer * kv.groups + g for g in range(kv.groups)]
        slots = [kv.residency.slot_of[p, seats, positions].long() for p in planes]
        keys = torch.cat([kv.slot_keys[s] for s in slots], dim=2)  # [n, B, H, D]
        values = torch.cat([kv.slot_values[s] for s in slots], dim=2)
        kv.host.store_layer(layer, blocks, keys, values)
        if kv.config.window(layer) is None:
            kv.sketches.put(layer, blocks, keys)
            if kv.centroids is not None:
                kv.centroids.put(layer, blocks, keys, values)
