"""Block-quantised tensors of a GGUF file as PackedWeight: the file's own numbers, in an order kernels read.

Owns: the block layouts of the types with one scale per 32 weights. Must not know: names, what reads them.

    type   bytes of a block of 32 (Q4_K, Q5_K: of 256)                weight
    Q4_0   scale fp16, 16 of codes                                    (code - 8) * scale
    Q4_1   scale, min fp16, 16 of codes                               code * scale + min
    Q5_0   scale, 4 of fifth bits, 16 of codes                        (code - 16) * scale
    Q5_1   scale, min, 4 of fifth bits, 16 of codes                   code * scale + min
    Q8_0   scale, 32 of codes                                         code * scale
    Q4_K   scale, min fp16, 12 of eight 6-bit factors for each of     code * scale * factor
           both, 128 of codes                                           - min * factor
    Q5_K   the same, with 32 of fifth bits before the codes

Every weight equals that of gguf-py's dequantize(), bit for bit.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from nano_oasis.kernels.packed_weight import GROUP, PackedWeight
from nano_oasis.weights.stored import StoredTensor

Array = Any  # numpy's, of any type
Parts = tuple[Array, Array, Array | None]  # codes: 32 int8 or 16 uint8 of a group; scales; mins


def read_packed(data: mmap.mmap, stored: StoredTensor) -> PackedWeight:
    """A matrix [out, in] of a kind in PACKABLE."""
    kind = gguf.GGMLQuantizationType[stored.kind]
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.frombuffer(data, np.uint8, stored.nbytes, stored.offset).reshape(-1, block_bytes)
    codes, scales, mins = PACKABLE[stored.kind](blocks)
    rows = stored.shape[0]
    parts = [codes, scales] + ([] if mins is None else [mins])
    return PackedWeight(*(torch.from_numpy(part.reshape(rows, -1).copy()) for part in parts))


def can_pack(stored: StoredTensor) -> bool:
    return stored.kind in PACKABLE and len(stored.shape) == 2 and stored.shape[1] % GROUP == 0


def _halves(blocks: Array, at: int, count: int = 1) -> list[Array]:
    """`count` float16 of each block from byte `at`, each [n, 1]."""
    return [blocks[:, at + 2 * i : at + 2 * i + 2].copy().view(np.float16) for i in range(count)]


def _q4_0(blocks: Array) -> Parts:
    (scales,) = _halves(blocks, 0)
    with np.errstate(over="ignore"):
        mins = scales * np.float16(-8)  # exact, unless it is too large
    if not np.isfinite(mins).all():
        mins = scales.astype(np.float32) * -8
    return blocks[:, 2:], scales, mins


def _q4_1(blocks: Array) -> Parts:
    scales, mins = _halves(blocks, 0, 2)
    return blocks[:, 4:], scales, mins


def _fives(low: Array, high: Array) -> Array:
    """Codes of five bits: low [n, 16], the fifth bits [n, 4], one bit of a uint32 each."""
    bits = np.unpackbits(high, axis=1, bitorder="little")  # [n, 32]
    return (np.concatenate([low & 15, low >> 4], 1) | bits << 4).astype(np.int8)


def _q5_0(blocks: Array) -> Parts:
    return _fives(blocks[:, 6:], blocks[:, 2:6]) - np.int8(16), _halves(blocks, 0)[0], None


def _q5_1(blocks: Array) -> Parts:
    scales, mins = _halves(blocks, 0, 2)
    return _fives(blocks[:, 8:], blocks[:, 4:8]), scales, mins


def _q8_0(blocks: Array) -> Parts:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0)[0], None


def _factors(blocks: Array) -> tuple[Array, Array]:
    """Of Q4_K and Q5_K: scales and mins of the eight groups of a block, fp32 [n, 8]."""
    scale, low = (x.astype(np.float32) for x in _halves(blocks, 0, 2))
    first, second, both = (blocks[:, at : at + 4] for at in (4, 8, 12))
    of_scale = np.concatenate([first & 63, (both & 15) | (first >> 2) & 48], 1)
    of_min = np.concatenate([second & 63, (both >> 4) | (second >> 2) & 48], 1)
    return scale * of_scale.astype(np.float32), -(low * of_min.astype(np.float32))


def _fours(codes: Array) -> Array:
    """[n, 128] -> codes [n, 8, 32]: 32 bytes have one group in their low bits and one in the high ones."""
    runs = codes.reshape(len(codes), 4, 1, GROUP)
    return np.concatenate([runs & 15, runs >> 4], 2).reshape(len(codes), 8, GROUP)


def _q4_k(blocks: Array) -> Parts:
    fours = _fours(blocks[:, 16:])
    half = GROUP // 2
    return fours[:, :, :half] | fours[:, :, half:] << 4, *_factors(blocks)


def _q5_k(blocks: Array) -> Parts:
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # [n, 32 weights, 8 groups]
    return (_fours(blocks[:, 48:]) | bits.transpose(0, 2, 1) << 4).astype(np.int8), *_factors(blocks)


PACKABLE: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
}  # fmt: skip
