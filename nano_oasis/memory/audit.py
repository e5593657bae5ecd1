"""How much of the true attention mass a sparse step read.

Owns: the exact computation, from the host tier's keys. Must not know: why blocks were chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mass_recall(q: Tensor, keys: Tensor, block_size: int, chosen: Tensor, scale: float) -> float:
    """Share of softmax(scale * q.k) that falls on the chosen blocks, averaged over heads; 0 to 1.

    q [Hq, D] of one row; keys [n, H, D], all n tokens it may see, in order; chosen: block positions, int64.
    """
    heads = keys.shape[1]
    query = q.float().view(heads, -1, q.shape[-1])  # [H, G, D]
    logits = query @ keys.float().permute(1, 2, 0) * scale  # [H, G, n]
    mass = logits.softmax(-1).mean((0, 1))  # [n]
    read = torch.zeros(-(-len(keys) // block_size), dtype=torch.bool)
    read[chosen] = True
    return float(mass[read.repeat_interleave(block_size)[: len(keys)]].sum())
