"""Triton twin of reference.write_kv.

Owns: scattering new keys and values into cache slots. Must not know: who chose the slots.
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.triton_common import Tiles, check_inputs

TILES = Tiles(m=1, n=1, warps=4, stages=2)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def kv_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):  # fmt: skip
    """One program per token copies its WIDTH = Hkv * D keys and values (paged layout: arXiv 2309.06180).

    k, v [T, WIDTH] contiguous; caches [slots, WIDTH] contiguous, any of the three dtypes (the store
    converts); slots [T] int64, in tokens from the start of the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    k = tl.load(k_ptr + token * WIDTH + column, mask=inside)
    v = tl.load(v_ptr + token * WIDTH + column, mask=inside)
    tl.store(k_cache_ptr + slot * WIDTH + column, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(v_cache_ptr + slot * WIDTH + column, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See reference.write_kv. Raises ValueError for what the kernels do not handle."""
    check_inputs(k, k_cache, v_cache)
    width = k.shape[1] * k.shape[2]
    if len(slots):
        kv_write_kernel[(len(slots),)](
            k.contiguous(), v.contiguous(), k_cache, v_cache, slots,
            width, triton.next_power_of_2(width), **TILES.options,
        )  # fmt: skip
