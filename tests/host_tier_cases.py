"""A small host tier and KV for it, shared by the tests of its memory, its file and its pinning."""

import torch

from nano_oasis.config import ModelConfig, RopeConfig
from nano_oasis.memory.host_tier import HostTier

L, B, H, D = 3, 4, 2, 16
CONFIG = ModelConfig(
    family="llama", vocab_size=32, hidden_size=64, intermediate_size=64, num_layers=L, num_heads=4,
    num_kv_heads=H, head_dim=D, max_position=512, rms_eps=1e-5, rope=RopeConfig(),
)  # fmt: skip


def create(num_blocks: int = 12, dtype: torch.dtype = torch.float32, **options) -> HostTier:
    return HostTier.create(CONFIG, num_blocks, B, dtype, **options)


def kv(n: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(L, n, B, H, D, generator=gen).to(device, dtype) for _ in range(2)]


def ids(*blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64)
