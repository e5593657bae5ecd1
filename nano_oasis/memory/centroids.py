"""Stand-ins for blocks that are not here: the mean key and the mean value of each sealed block.

Owns: the means, and attention over them. Must not know: why a block is missing, requests, slots.

A block of B tokens counts as B tokens that all have its mean key and value: its share of the softmax is
exp(log B + scale * q . mean key). It is merged with the attention over real tokens by log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Centroids:
    """means[layer]: [num_blocks, 2, H, D] fp16, keys then values; a block's are valid once it is sealed."""

    def __init__(self, num_blocks: int, layers: int, heads: int, head_dim: int) -> None:
        shape = (num_blocks, 2, heads, head_dim)
        self.means = [torch.empty(shape, dtype=torch.float16) for _ in range(layers)]
        self.bytes_per_block = 2 * heads * head_dim * 2  # of one layer

    def put(self, layer: int, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Sealed blocks [n] of a layer: keys, values [n, B, H, D]."""
        self.means[layer][blocks] = torch.stack((keys.mean(1), values.mean(1)), 1).half()

    def attend(
        self, layer: int, q: Tensor, blocks: Tensor, valid: Tensor, block_size: int, scale: float,
        heads: slice,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attention over means: out fp32 [n, Hq, D] and lse [n, Hq]; zeros and -inf for a row without any.

        q [n, Hq, D], the query heads of the KV heads `heads`; blocks int64 [n, m], of which those count that
        are valid [n, m].
        """
        means = self.means[layer][blocks][:, :, :, heads].float()  # [n, m, 2, H, D]
        means = means.masked_fill(~valid[:, :, None, None, None], 0.0)  # others may never have been written
        query = q.float().view(len(q), means.shape[3], -1, q.shape[-1])  # [n, H, G, D]
        logits = torch.einsum("nhgd,nmhd->nhgm", query, means[:, :, 0]) * scale + math.log(block_size)
        logits = logits.masked_fill(~valid[:, None, None], -torch.inf)
        weights = logits.softmax(-1).nan_to_num(0.0)
        out = torch.einsum("nhgm,nmhd->nhgd", weights, means[:, :, 1])
        return out.reshape(q.shape), logits.logsumexp(-1).reshape(q.shape[:2])
