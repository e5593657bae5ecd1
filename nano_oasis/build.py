"""From settings to a ready engine: load, and put the parts together.

Owns: the order of loading. Must not know: sockets, asyncio, the step loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from nano_oasis.config import ConfigError, EngineConfig, EngineInfo, ModelConfig, default_threads
from nano_oasis.engine import Deliver, Engine, call_sinks
from nano_oasis.kernels.dispatch import numba_works
from nano_oasis.kv_build import make_memory
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.metrics import Metrics
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.draft_policy import FixedDrafts, PricedDrafts
from nano_oasis.scheduler.scheduler import DraftPolicy, Gate, Scheduler
from nano_oasis.spec.make import make_draft
from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.weights import load_checkpoint, load_config, resolve_model

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total)


def build_engine(
    config: EngineConfig, progress: Progress | None = None, deliver: Deliver = call_sinks
) -> Engine:
    """Load everything and return an Engine that is not started yet.

    Raises ConfigError (a setting does not fit), weights.CheckpointError or tokenizer.TokenizerError.
    """
    report = progress or (lambda what, done, total: None)
    device = _device(config)
    torch.set_num_threads(config.threads or default_threads())
    path = resolve_model(config.model)
    model_config = load_config(path)
    wanted_len = _model_len(config, model_config)  # refuse before the slow part
    report("tokenizer", 0, 1)
    template = Path(config.chat_template).read_text() if config.chat_template else None
    tokenizer = load_tokenizer(path, template)
    report("tokenizer", 1, 1)
    dtype = _dtype(config, device)
    matrices = _matrices(config, device, dtype)
    # On CPU the KV pool comes first: sizes that do not fit are refused before the slow part.
    memory = (
        make_memory(config, model_config, wanted_len, dtype, device) if dtype and device == "cpu" else None
    )
    try:
        checkpoint = load_checkpoint(
            path, dtype, device, lambda done, total: report("weights", done, total), matrices
        )
        memory = memory or make_memory(config, model_config, wanted_len, checkpoint.dtype, device)
        rounded = config.weights == "int8"
        model = Model(model_config, checkpoint.tensors, memory.max_len, checkpoint.dtype, rounded)
        known_ids = min(tokenizer.vocab_size, model_config.vocab_size)
        draft = make_draft(config, model, known_ids, memory.max_len, tokenizer, matrices)
        name = config.served_model_name or default_name(config.model, path)
        info = EngineInfo(
            model_name=name,
            dtype=str(checkpoint.dtype).removeprefix("torch."),
            device=device,
            block_size=config.block_size,
            num_blocks=memory.num_blocks,
            kv_tokens=memory.num_blocks * config.block_size,
            kv_bytes=memory.device_bytes,
            max_model_len=memory.max_len,
            kv_mode=config.kv_mode,
            host_kv_bytes=memory.host_bytes,
        )
        blocks = BlockManager(memory.num_blocks, config.block_size, config.enable_prefix_caching)
        policy: DraftPolicy | None = None
        if config.draft != "none":
            policy = FixedDrafts(config.num_draft_tokens) if config.num_draft_tokens else PricedDrafts()
        scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, memory.gate, policy)
        runner = Runner(model, memory.store, Sampler(known_ids), device, draft)
        warm_up(runner, memory.gate, memory.max_len)
        return Engine(
            runner, scheduler, tokenizer, model_config, info, Metrics(name),
            seed=config.seed, stall_timeout=config.stall_timeout, deliver=deliver, on_stop=memory.close,
        )  # fmt: skip
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def warm_up(runner: Runner, gate: Gate | None, max_len: int) -> None:
    """One prefill and one decode of a request nobody sent: compiles kernels, touches every weight."""
    prompt = [0] * min(2, max_len - 1)
    drafts = int(len(prompt) + 2 <= max_len)
    request = Request(prompt, SamplingParams(), max_len=len(prompt) + 1 + drafts, seed=0, block_table=[0] * 4)
    if gate is not None:
        gate.admit(request)
    runner.execute([ScheduledRow(request, 0, len(prompt), samples=True)])
    request.output_ids.append(0)
    runner.execute([ScheduledRow(request, len(prompt), 1, samples=True, max_drafts=drafts)])
    if gate is not None:
        gate.leave(request)
    runner.forget(request)


def default_name(model: str, path: Path) -> str:
    """The name in the API: the alias or hub id as given, else the file's or folder's name."""
    return model if not Path(model).exists() else path.name.removesuffix(".gguf")


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


def _matrices(config: EngineConfig, device: str, dtype: torch.dtype | None) -> str:
    """load_checkpoint's `matrices`."""
    fp32 = (device, dtype) == ("cpu", torch.float32)
    if config.weights == "auto":
        return "stored" if fp32 and numba_works() else "full"
    if not fp32:
        raise ConfigError(
            f"weights: {config.weights} needs device=cpu and dtype=float32; got {device} and {config.dtype}"
        )
    return "full" if config.weights == "float32" else config.weights


def _dtype(config: EngineConfig, device: str) -> torch.dtype | None:
    """fp32 on CPU unless asked otherwise: most CPUs multiply halves slowly. None = as in the file."""
    if config.dtype == "auto":
        return torch.float32 if device == "cpu" else None
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
