"""What the machine can do at best, measured, and the least time that work can take on it.

Owns: the ceilings (bytes and products per second), timing, the floor of given bytes and flops.
Must not know: how anything is computed.

A step cannot be faster than its bytes over the read bandwidth, nor than its products over the product speed
(the roofline of Williams et al., CACM 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nano_oasis.bench.report import Spread
from nano_oasis.memory.huge_pages import on_huge_pages

READ = 2**29  # bytes of the plain read: beyond any cache of a shared machine
SIDE = 1024  # of the square product


@dataclass(frozen=True)
class Ceilings:
    """bandwidth in bytes per second, products in fp32 flops per second, with `threads` threads."""

    bandwidth: float
    products: float
    threads: int

    def floor(self, read: float, flops: float = 0.0) -> float:
        """Seconds that work of so many bytes and flops takes at least."""
        return max(read / self.bandwidth, flops / self.products)

    def figures(self) -> dict[str, float]:
        return {
            "bytes_per_s": self.bandwidth, "flops_per_s": self.products, "threads": self.threads,
        }  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.threads} threads: read {self.bandwidth / 1e9:.1f} GB/s, "
            f"fp32 products {self.products / 1e9:.0f} GFLOP/s"
        )


def timed(work: Callable[[], object], repeats: int, least: float = 0.05) -> Spread:
    """Seconds of one call, `repeats` times; of short work the mean over calls that take `least` seconds."""
    work()
    start = time.perf_counter()
    work()
    calls = max(1, int(least / max(time.perf_counter() - start, 1e-7)))
    values = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        values.append((time.perf_counter() - start) / calls)
    return Spread(tuple(values))


def measure_ceilings(repeats: int = 7) -> Ceilings:
    """The best of several tries: a ceiling is what is possible, not what is usual."""
    (big,) = on_huge_pages([torch.ones(READ // 4)])  # as weights and KV are
    square = torch.randn(SIDE, SIDE)
    read = timed(big.sum, repeats).low
    product = timed(lambda: square @ square, repeats).low
    return Ceilings(READ / read, 2 * SIDE**3 / product, torch.get_num_threads())
