"""Picks the kernels of a device once: compiled or torch on CPU, Triton on a GPU.

Owns: that choice, and how one mixed batch is divided between decode and prefill. Must not know: the
model, or how either backend works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nano_oasis.kernels import reference, reference_blocks, reference_sketch, select
from nano_oasis.kernels.batch import AttentionBatch

log = logging.getLogger(__name__)


@cache
def numba_works() -> bool:
    """numba is an option: some platforms lack it, and it refuses a numpy newer than itself."""
    try:
        import numba  # noqa: F401
    except (ImportError, OSError) as error:
        log.warning("the slower torch kernels are used: numba cannot be imported (%s)", error)
        return False
    return True


@dataclass(frozen=True)
class Kernels:
    """One backend. The functions' contracts are those of their twins in reference.py and select.py."""

    name: str
    write_kv: Callable[..., None]
    paged_decode: Callable[..., Tensor]
    paged_prefill: Callable[..., Tensor]
    choose_now: Callable[..., None] = select.choose_now
    choose_read: Callable[..., None] = select.choose_read

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """q [T, H, D], one layer's caches [N, B, Hkv, D] -> [T, H, D]. This step's KV is already written."""
        d, lens, starts = batch.num_decodes, batch.context_list, batch.query_list
        table, context_lens = batch.block_table, batch.context_lens
        parts = []
        if d:
            host = {"context_list": lens[:d], "plans": batch.plans}
            parts.append(
                self.paged_decode(q[:d], k_cache, v_cache, table[:d], context_lens[:d], scale, window, **host)
            )
        if d < len(lens):
            host = {"context_list": lens[d:], "query_list": [s - d for s in starts[d:]]}
            begin = batch.query_starts[d:] - d  # [R - d + 1], counted from the first prefill token
            parts.append(
                self.paged_prefill(
                    q[d:], k_cache, v_cache, table[d:], begin, context_lens[d:], scale, window, **host
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def select_kernels(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Kernels:
    """`cuda` (NVIDIA or AMD) -> Triton; `cpu` -> compiled by numba for fp32, else the torch twins.

    Raises ValueError for other devices.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        if dtype == torch.float32 and numba_works():
            from nano_oasis.kernels import cpu_decode, cpu_pointwise, cpu_prefill, cpu_select

            attention = cpu_decode.paged_decode, cpu_prefill.paged_prefill
            choice = cpu_select.choose_now, cpu_select.choose_read
            return Kernels("numba", cpu_pointwise.write_kv, *attention, *choice)
        return Kernels("torch", reference.write_kv, reference.paged_decode, reference.paged_prefill)
    if kind != "cuda":
        raise ValueError(f"no attention kernels for device {str(device)!r}; use 'cpu' or 'cuda'")
    try:
        from nano_oasis.kernels.triton_decode import paged_decode
        from nano_oasis.kernels.triton_kv_write import write_kv
        from nano_oasis.kernels.triton_prefill import paged_prefill
    except ImportError as error:
        raise ValueError(f"device {str(device)!r} needs Triton (pip install triton): {error}") from error
    return Kernels("triton", write_kv, paged_decode, paged_prefill)


@dataclass(frozen=True)
class OasisKernels:
    """What the oasis mode needs beside attention, of one backend.

    The functions' contracts are those of their torch twins in reference_sketch.py and reference_blocks.py.
    """

    name: str
    fourbit_build: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    fourbit_logits: Callable[..., Tensor]
    fourbit_mass: Callable[..., Tensor]
    top_blocks: Callable[..., Tensor]
    gather_blocks: Callable[..., None]
    gather_groups: Callable[..., None]
    quantise: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    dequantise: Callable[[Tensor, Tensor, Tensor], None]


@cache
def select_oasis_kernels(kind: str) -> OasisKernels:
    """By the type of the device that the tensors are on: `cuda` -> Triton, `cpu` -> torch, scoring by numba.

    Raises ValueError for others. Which of them a step uses on a GPU is in docs/06-kernels.md.
    """
    if kind == "cpu":
        return OasisKernels(
            "torch", reference_sketch.fourbit_build, _cpu_logits, _cpu_mass, reference_sketch.top_blocks,
            reference_blocks.gather_blocks, _cpu_gather_groups, reference_blocks.quantise,
            reference_blocks.dequantise,
        )  # fmt: skip
    if kind != "cuda":
        raise ValueError(f"no oasis kernels for device {kind!r}; use 'cpu' or 'cuda'")
    try:
        from nano_oasis.kernels.triton_gather import gather_blocks
        from nano_oasis.kernels.triton_quant import dequantise, quantise
        from nano_oasis.kernels.triton_sketch import fourbit_build, fourbit_logits, fourbit_mass
        from nano_oasis.kernels.triton_topk import top_blocks
    except ImportError as error:
        raise ValueError(f"device {kind!r} needs Triton (pip install triton): {error}") from error
    return OasisKernels(
        "triton", fourbit_build, fourbit_logits, fourbit_mass, top_blocks, gather_blocks,
        reference_blocks.gather_groups, quantise, dequantise,
    )  # fmt: skip


def _cpu_sketch(q: Tensor, codes: Tensor) -> Any:
    """The module that scores these tensors best: compiled, for the shapes that was written for."""
    if numba_works():
        from nano_oasis.kernels import cpu_sketch

        if cpu_sketch.supports(q, codes):
            return cpu_sketch
    return reference_sketch


def _cpu_logits(q: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    out: Tensor = _cpu_sketch(q, codes).fourbit_logits(q, codes, *rest)
    return out


def _cpu_gather_groups(host_keys: Tensor, host_values: Tensor, slot_keys: Tensor, *rest: Tensor) -> None:
    gather = reference_blocks.gather_groups
    if numba_works():
        from nano_oasis.kernels import cpu_gather

        if cpu_gather.supports(host_keys, slot_keys):
            gather = cpu_gather.gather_groups
    gather(host_keys, host_values, slot_keys, *rest)


def _cpu_mass(q: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    out: Tensor = _cpu_sketch(q, codes).fourbit_mass(q, codes, *rest)
    return out
