"""The device tier's bytes: one slab of keys and one of values for all layers.

Owns: the slabs and their shape.
Must not know: how many blocks there should be, which request holds which, or what is attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nano_oasis.config import ModelConfig
from nano_oasis.memory.huge_pages import empty_on_huge_pages


@dataclass
class KVCache:
    """keys, values: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], dtype of the model."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> KVCache:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return cls(*(empty_on_huge_pages(shape, dtype, device) for _ in range(2)))

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of layer i, each [num_blocks, block_size, num_kv_heads, head_dim]; views."""
        return self.keys[i], self.values[i]
