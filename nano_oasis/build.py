"""From settings to a ready engine: load, size the KV pool, put the parts together.

Owns: the order of loading and the arithmetic of memory. Must not know: sockets, asyncio, the step loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from nano_oasis.config import ConfigError, EngineConfig, EngineInfo, ModelConfig, format_bytes, parse_bytes
from nano_oasis.engine import Deliver, Engine, call_sinks
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.metrics import Metrics
from nano_oasis.model import Model
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.scheduler import Scheduler
from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.weights import load_checkpoint, load_config, resolve_model

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total)

_CPU_KV_DEFAULT = 4 * 2**30


def build_engine(
    config: EngineConfig, progress: Progress | None = None, deliver: Deliver = call_sinks
) -> Engine:
    """Load everything and return an Engine that is not started yet.

    Raises ConfigError (a setting does not fit), weights.CheckpointError or tokenizer.TokenizerError.
    """
    report = progress or (lambda what, done, total: None)
    device = _device(config)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    path = resolve_model(config.model)
    model_config = load_config(path)
    wanted_len = _model_len(config, model_config)  # refuse before the slow part
    report("tokenizer", 0, 1)
    template = Path(config.chat_template).read_text() if config.chat_template else None
    tokenizer = load_tokenizer(path, template)
    report("tokenizer", 1, 1)
    checkpoint = load_checkpoint(
        path, _dtype(config, device), device, lambda done, total: report("weights", done, total)
    )
    num_blocks, max_len = size_pool(config, model_config, wanted_len, checkpoint.dtype, device)
    model = Model(model_config, checkpoint.tensors, max_len)
    cache = KVCache.allocate(model_config, num_blocks, config.block_size, checkpoint.dtype, device)
    name = config.served_model_name or default_name(config.model, path)
    info = EngineInfo(
        model_name=name,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        device=device,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * config.block_size,
        kv_bytes=cache.nbytes,
        max_model_len=max_len,
    )
    blocks = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens)
    known_ids = min(tokenizer.vocab_size, model_config.vocab_size)
    runner = Runner(model, DenseKV(cache, select_kernels(device), device), Sampler(known_ids), device)
    return Engine(
        runner, scheduler, tokenizer, model_config, info, Metrics(name),
        seed=config.seed, stall_timeout=config.stall_timeout, deliver=deliver,
    )  # fmt: skip


def default_name(model: str, path: Path) -> str:
    """The name in the API: the alias or hub id as given, else the file's or folder's name."""
    return model if not Path(model).exists() else path.name.removesuffix(".gguf")


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
        blocks = parse_bytes(config.device_kv_memory, "device_kv_memory") // block_bytes
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
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info()
        return int(free * 0.9)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_CPU_KV_DEFAULT, total // 4)


def _model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the model's context"
            f" of {model.max_position} tokens"
        )
    return config.max_model_len or model.max_position


def _device(config: EngineConfig) -> str:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA GPU; use 'cpu' or 'auto'")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _dtype(config: EngineConfig, device: str) -> torch.dtype | None:
    """fp32 on CPU unless asked otherwise: most CPUs multiply halves slowly. None = as in the file."""
    if config.dtype == "auto":
        return torch.float32 if device == "cpu" else None
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
