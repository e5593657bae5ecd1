"""How much KV fits where, and the store that keeps it: dense, or oasis over two tiers.

Owns: the arithmetic of KV memory. Must not know: weights, tokenizers, the step loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nano_oasis.config import ConfigError, EngineConfig, ModelConfig, format_bytes, parse_bytes
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.dense_kv import DenseKV, KVStore
from nano_oasis.memory.host_tier import HostTier, HostTierError, num_blocks_for
from nano_oasis.memory.huge_pages import empty_on_huge_pages
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.memory.link import BlockMover, MemcpyLink
from nano_oasis.memory.oasis_kv import OasisKV
from nano_oasis.memory.sketch import make_selector
from nano_oasis.memory.sketch_slabs import SketchSlabs
from nano_oasis.memory.stream import Stage
from nano_oasis.scheduler.scheduler import Gate

log = logging.getLogger(__name__)

_CPU_KV_DEFAULT = 4 * 2**30
_STAGE_TOKENS = 1024  # of one layer: what a prefill chunk reads from the host tier at once


@dataclass(frozen=True)
class Memory:
    """KV as built. num_blocks: logical blocks, on the device (dense) or in the host tier (oasis)."""

    store: KVStore
    gate: Gate | None
    num_blocks: int
    max_len: int
    device_bytes: int
    host_bytes: int = 0
    close: Callable[[], None] = lambda: None


def make_memory(
    config: EngineConfig, model: ModelConfig, max_len: int, dtype: torch.dtype, device: str
) -> Memory:
    """Raises ConfigError where the sizes do not fit together."""
    if config.kv_mode != "dense":
        return _make_oasis(config, model, max_len, dtype, device)
    blocks, max_len = size_pool(config, model, max_len, dtype, device)
    cache = KVCache.allocate(model, blocks, config.block_size, dtype, device)
    return Memory(DenseKV(cache, select_kernels(device, dtype), device), None, blocks, max_len, cache.nbytes)


def _make_oasis(
    config: EngineConfig, model: ModelConfig, max_len: int, dtype: torch.dtype, device: str
) -> Memory:
    if device != "cpu":
        raise ConfigError(
            f"kv_mode: {config.kv_mode} runs on device=cpu only for now; see docs/known-gaps.md"
        )
    groups = config.groups_of(model.num_kv_heads)
    block_bytes = model.kv_bytes_per_token(dtype.itemsize) * config.block_size
    device_blocks = config.num_device_blocks or _device_bytes(config, device) // block_bytes
    host_blocks = _host_blocks(config, model, dtype)
    if host_blocks * config.block_size < max_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len: {max_len} tokens do not fit the host tier's"
                f" {host_blocks * config.block_size} tokens; raise host_kv_memory"
            )
        max_len = host_blocks * config.block_size
        log.warning("max_model_len reduced to %d tokens: that is all the host tier holds", max_len)
    heads = model.num_kv_heads // groups
    shape = (device_blocks * model.num_layers * groups, config.block_size, heads, model.head_dim)
    keys, values = (empty_on_huge_pages(shape, dtype, device) for _ in range(2))
    slots_per_step = model.num_layers * groups * (-(-config.max_num_batched_tokens // config.block_size) + 2)
    if slots_per_step > len(keys):
        given = format_bytes(device_blocks * block_bytes)
        raise ConfigError(
            f"device_kv_memory: {device_blocks} blocks ({given}) do not hold one step's"
            f" {config.max_num_batched_tokens} new tokens; raise it or lower max_num_batched_tokens"
        )
    try:
        host = HostTier.create(
            model, host_blocks, config.block_size, dtype, config.host_kv_format, config.host_kv_path
        )
    except HostTierError as error:
        raise ConfigError(f"host tier: {error}") from error
    coordinator = PrefetchCoordinator(MemcpyLink(BlockMover(host, keys, values)))
    stage = Stage(
        max(_STAGE_TOKENS // config.block_size, 1), config.block_size, model.num_kv_heads, model.head_dim,
        dtype, device,
    )  # fmt: skip
    sketches = SketchSlabs(make_selector(config.selector), host_blocks, model.num_layers)
    kernels = select_kernels(device, dtype)
    kv = OasisKV(model, config, kernels, host, keys, values, sketches, coordinator, stage, max_len)
    coordinator.start()

    def close() -> None:
        coordinator.stop()
        host.close()

    size = keys.nbytes + values.nbytes + stage.nbytes
    return Memory(kv, kv, host_blocks, max_len, size, host.nbytes, close)


def _host_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    default = _total_memory() // 3
    given = config.host_kv_memory
    memory = default if given is None else parse_bytes(given, "host_kv_memory")
    try:
        return num_blocks_for(memory, model, config.block_size, dtype, config.host_kv_format)
    except HostTierError as error:
        raise ConfigError(f"host_kv_memory: {error}") from error


def _device_bytes(config: EngineConfig, device: str) -> int:
    if config.device_kv_memory is None:
        return _default_memory(device)
    return parse_bytes(config.device_kv_memory, "device_kv_memory")


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size_pool(
    config: EngineConfig, model: ModelConfig, max_len: int, dtype: torch.dtype, device: str
) -> tuple[int, int]:
    """(number of KV blocks, max_model_len). One request of max_model_len tokens always fits.

    Raises ConfigError when an explicit max_model_len does not fit the memory.
    """
    block_bytes = model.kv_bytes_per_token(dtype.itemsize) * config.block_size
    if config.num_device_blocks is not None:
        blocks = config.num_device_blocks
    elif config.device_kv_memory is not None:
        blocks = _device_bytes(config, device) // block_bytes
    else:
        useful = config.max_num_seqs * -(-max_len // config.block_size)
        blocks = min(_default_memory(device) // block_bytes, useful)
    tokens = blocks * config.block_size
    if tokens < 2:
        raise ConfigError(
            f"device_kv_memory: {config.device_kv_memory} holds no KV block of {format_bytes(block_bytes)}"
        )
    if tokens >= max_len:
        return blocks, max_len
    if config.max_model_len is not None:
        need = -(-max_len // config.block_size)
        raise ConfigError(
            f"max_model_len: {max_len} tokens need {need} KV blocks ({format_bytes(need * block_bytes)}), "
            f"but only {blocks} ({format_bytes(blocks * block_bytes)}) fit; raise device_kv_memory"
        )
    log.warning("max_model_len reduced from %d to %d tokens: that is all the KV pool holds", max_len, tokens)
    return blocks, tokens


def _default_memory(device: str) -> int:
    """Bytes of device KV: 90 % of what a GPU has left; on CPU a quarter of the memory, at most 4 GiB."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info()
        return int(free * 0.9)
    return min(_CPU_KV_DEFAULT, _total_memory() // 4)
