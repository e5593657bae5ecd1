"""Where sketches live: one slab per layer and part, indexed by host block, on the device.

Owns: building at sealing time, scoring through a block table. Must not know: what a sketch means
(sketch.py), requests, slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_oasis.memory.sketch import Selector, Sketch


class SketchSlabs:
    """slabs[layer][name]: [num_blocks, H, ...], never zeroed; a block's row is valid once it is sealed."""

    def __init__(self, selector: Selector, num_blocks: int, layers: int) -> None:
        self.selector = selector
        self.num_blocks = num_blocks
        self.slabs: list[Sketch] = [{} for _ in range(layers)]

    def put(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """Sketch sealed blocks [n] of a layer from their keys [n, B, H, D]."""
        slabs = self.slabs[layer]
        for name, part in self.selector.build(keys).items():
            if name not in slabs:
                shape = (self.num_blocks, *part.shape[1:])
                slabs[name] = torch.empty(shape, dtype=part.dtype, device=part.device)
            slabs[name][blocks] = part

    def mass(self, layer: int, q: Tensor, table: Tensor, sealed: Tensor, groups: int, scale: float) -> Tensor:
        """Estimated attention mass of every block of each row, [groups, n, M] fp32; each group of KV heads
        chooses.

        q [n, Hq, D]; table [n, M] int64 host blocks; sealed [n]: leading blocks that count, others get 0.
        """
        return self.selector.mass_at(q, self.slabs[layer], table, sealed, scale, groups)
