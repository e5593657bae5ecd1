"""Triton twin of reference_blocks.gather_blocks.

Owns: reading many scattered blocks out of pinned host memory in one launch. Must not know: tickets, which
blocks, who waits. Copies enqueued one by one cost the CPU time for each, and the link is poorly used by
small ones; a kernel has thousands of reads in flight whatever the size of a block.
"""

# mypy: allow-untyped-defs
# (a kernel's arguments have Triton's types, not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_oasis.kernels.triton_common import Tiles

CHUNK_BYTES = 8192  # of keys and as many of values per program: four reads of 16 bytes a thread, twice


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "slots_ptr"])
def gather_kernel(
    host_k_ptr, host_v_ptr, slot_k_ptr, slot_v_ptr, blocks_ptr, slots_ptr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK elements of the keys and of the values of one block. Grid (n, chunks of a block).

    host [N, BLOCK_SIZE, ROW] with these strides, in elements: pinned host memory, which the GPU reads over
    the link; slots [S, BLOCK_SIZE, ROW] contiguous; blocks, slots [n] int64 on the device. ROW = H * D.
    """
    i = tl.program_id(0)
    block, slot = tl.load(blocks_ptr + i), tl.load(slots_ptr + i)
    e = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = e < BLOCK_SIZE * ROW
    source = e if TOKEN_STRIDE == ROW else e // ROW * TOKEN_STRIDE + e % ROW  # whole blocks lie in one piece
    k = tl.load(host_k_ptr + block * BLOCK_STRIDE + source, mask=inside)
    v = tl.load(host_v_ptr + block * BLOCK_STRIDE + source, mask=inside)
    tl.store(slot_k_ptr + slot * (BLOCK_SIZE * ROW) + e, k, mask=inside)
    tl.store(slot_v_ptr + slot * (BLOCK_SIZE * ROW) + e, v, mask=inside)


def gather_tiles(elements: int, itemsize: int) -> Tiles:
    """n elements a program."""
    return Tiles(1, min(CHUNK_BYTES // itemsize, triton.next_power_of_2(elements)), warps=4, stages=1)


def gather_blocks(
    host_keys: Tensor, host_values: Tensor, slot_keys: Tensor, slot_values: Tensor, blocks: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    """See reference_blocks.gather_blocks. The host tensors must be pinned, or Triton raises ValueError.

    blocks and slots may be on the device already; from pageable memory their copy waits.
    """
    _, block_size, heads, dim = host_keys.shape
    shape, stride = (block_size, heads, dim), host_keys.stride()
    same = all(
        x.shape[1:] == shape and x.dtype == host_keys.dtype for x in (slot_keys, slot_values, host_values)
    )
    if not same or host_values.stride() != stride:
        raise ValueError(
            "keys and values of the host and the slots must be blocks of one shape and dtype, the host's of "
            f"one layout; got {list(host_keys.shape)} {host_keys.dtype} and "
            f"{list(slot_keys.shape)} {slot_keys.dtype}"
        )
    if stride[2:] != (dim, 1) or not (slot_keys.is_contiguous() and slot_values.is_contiguous()):
        raise ValueError("slots must be contiguous, and so must the heads of one token in host memory")
    if len(blocks):
        tiles = gather_tiles(block_size * heads * dim, host_keys.itemsize)
        device = slot_keys.device
        where = [x.to(device, torch.int64, non_blocking=True) for x in (blocks, slots)]
        gather_kernel[(len(blocks), triton.cdiv(block_size * heads * dim, tiles.n))](
            host_keys, host_values, slot_keys, slot_values, *where,
            stride[0], stride[1], heads * dim, block_size, tiles.n, **tiles.options,
        )  # fmt: skip
