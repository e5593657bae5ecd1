"""Picks the attention kernels once, at start: compiled or torch on CPU, Triton on a GPU.

Owns: that choice, and how one mixed batch is divided between decode and prefill. Must not know: the
model, or how either backend works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nano_oasis.kernels import reference, select
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
            from nano_oasis.kernels import cpu_decode, cpu_select

            attention = cpu_decode.paged_decode, reference.paged_prefill
            choice = cpu_select.choose_now, cpu_select.choose_read
            return Kernels("numba", reference.write_kv, *attention, *choice)
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
