"""Rotary position embedding: frequencies per scaling type, the cos/sin table.

Owns: the formulas (RoFormer arXiv 2104.09864; YaRN arXiv 2309.00071; Llama 3.1's smooth scaling).
Must not know: layers, weights, caches.
"""

from __future__ import annotations

import math

import torch

from nano_oasis.config import ConfigError, RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angular frequency of each rotated pair, fp32 [head_dim / 2], and the factor on cos and sin.

    Raises ConfigError for a rope type that is not known.
    """
    half = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs = 1.0 / rope.theta**half
    scale = 1.0
    if rope.type == "linear":
        freqs = freqs / rope.factor
    elif rope.type == "llama3":
        freqs = _llama3(freqs, rope)
    elif rope.type == "yarn":
        freqs, scale = _yarn(freqs, rope, head_dim)
    elif rope.type != "default":
        raise ConfigError(f"rope type {rope.type!r} is not supported")
    if rope.freq_factors is not None:  # a GGUF stores llama3 scaling as ready-made divisors
        freqs = freqs / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return freqs, scale


def _llama3(freqs: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    wavelength = 2 * math.pi / freqs
    turns = rope.original_max_position / wavelength  # rotations within the pre-training context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return freqs * blend + freqs / rope.factor * (1 - blend)


def _yarn(freqs: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Interpolate dimensions that turn less than beta_slow times, keep those over beta_fast."""

    def dim_of(rotations: float) -> float:
        position = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(position) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return freqs * keep + freqs / rope.factor * (1 - keep), _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(m: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * m * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> torch.Tensor:
    """[length, 2, head_dim] fp32: cos and sin of every position, the half repeated to full width."""
    freqs, scale = rope_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), freqs)  # [length, head_dim / 2]
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale
