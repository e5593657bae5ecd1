"""One tensor's place in a file, and its bytes as a torch tensor.

Owns: the stored number formats, plain and block-quantised. Must not know: file headers, tensor names.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from nano_oasis.memory.huge_pages import empty_on_huge_pages
from nano_oasis.weights.errors import CheckpointError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")  # GGUF only
_CHUNK = 1 << 18  # elements dequantised at once: the temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`kind` is the file's name for the number format; `shape` is in torch order; `offset` is absolute."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int

    def check_kind(self, allowed: tuple[str, ...]) -> None:
        """Raise CheckpointError, naming tensor and type, unless `kind` can be read."""
        if self.kind not in allowed:
            raise CheckpointError.at(
                self.path,
                f"tensor {self.name!r} has type {self.kind}; types that can be read: {', '.join(allowed)}",
            )


def map_file(path: Path) -> mmap.mmap:
    """The whole file, mapped copy-on-write (torch wants a writable buffer; nothing writes to it)."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_tensor(data: mmap.mmap, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """A new CPU tensor of `stored.shape` in `dtype`; the only full-size memory it takes is the result."""
    count = int(np.prod(stored.shape, dtype=np.int64))
    out = empty_on_huge_pages((count,), dtype)  # the table of embeddings is read whole for every token
    if stored.kind in PLAIN:
        if count:
            out.copy_(torch.frombuffer(data, dtype=PLAIN[stored.kind], count=count, offset=stored.offset))
    else:
        kind = gguf.GGMLQuantizationType[stored.kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(data, np.uint8, stored.nbytes, stored.offset)
        for start in range(0, count, _CHUNK):
            stop = min(start + _CHUNK, count)
            part = raw[start // block * block_bytes : stop // block * block_bytes]
            out[start:stop] = torch.from_numpy(gguf.quants.dequantize(part.reshape(1, -1), kind)).flatten()
    return out.view(stored.shape)
