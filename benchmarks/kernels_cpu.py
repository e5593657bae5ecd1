"""Times the torch attention twins against the byte and flop floors of this CPU.

    python benchmarks/kernels_cpu.py [--threads 2] [--shape 9,3,64]

Decode reads every key and value of the context once, so its floor is bytes / bandwidth; prefill is
products, so its floor is flops / (products per second). Both ceilings are measured here, first.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch

from nano_oasis.kernels import make_batch, select_kernels

BLOCK = 16


def best(run: Callable[[], object], seconds: float = 0.7) -> float:
    """Seconds of the fastest call; the machine may be shared, and the fastest is the least disturbed."""
    run()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    return least


def ceilings() -> tuple[float, float]:
    """Bytes per second of a plain read (64 MiB: beyond the caches), flops per second of an fp32 product."""
    big = torch.randn(2**24)
    square = torch.randn(768, 768)
    return big.numel() * 4 / best(big.sum), 2 * 768**3 / best(lambda: square @ square)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", default="9,3,64", help="query heads, KV heads, head size")
    parser.add_argument(
        "--layers", type=int, default=8, help="caches visited in turn, as the layers of a model"
    )
    parser.add_argument("--seconds", type=float, default=0.7, help="per line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    heads, kv_heads, dim = map(int, args.shape.split(","))
    kernels, scale = select_kernels("cpu"), dim**-0.5
    bandwidth, speed = ceilings()
    print(f"{args.threads} threads, read {bandwidth / 1e9:.1f} GB/s, products {speed / 1e9:.0f} GFLOP/s")
    total = 8 * (8000 // BLOCK + 1)
    caches = [torch.randn(2, total, BLOCK, kv_heads, dim) for _ in range(args.layers)]

    def report(name: str, rows: list[tuple[list[int], int, int]], floor: float, unit: str) -> None:
        batch = make_batch(rows, BLOCK)
        q = torch.randn(batch.query_list[-1], heads, dim)
        calls = iter(range(10**9))

        def run() -> None:
            k, v = caches[next(calls) % args.layers]
            kernels.attention(q, k, v, batch, scale, None)

        took = best(run, args.seconds)
        print(
            f"{name:<44}{took * 1e6:>9.0f} us{floor * 1e6:>9.0f} us{floor / took:>7.0%} of {unit}", flush=True
        )

    print(f"{'one layer':<44}{'measured':>12}{'floor':>12}")
    for order in ("in order", "scattered"):
        for rows in (1, 8):
            for context in (100, 1000, 4000, 8000):
                need = -(-context // BLOCK)
                ids = list(range(rows * need))
                if order == "scattered":
                    random.Random(0).shuffle(ids)
                plan = [(ids[r * need : (r + 1) * need], context - 1, 1) for r in range(rows)]
                floor = rows * context * kv_heads * dim * 4 * 2 / bandwidth
                report(f"decode, {rows} x {context} tokens, blocks {order}", plan, floor, "read speed")
    for start, count in ((0, 512), (3584, 512), (0, 2048)):
        need = -(-(start + count) // BLOCK)
        pairs = count * start + count * (count + 1) / 2  # query and key pairs under the causal mask
        floor = pairs * heads * dim * 4 / speed
        report(
            f"prefill, {count} tokens after {start}",
            [(list(range(need)), start, count)],
            floor,
            "product speed",
        )


if __name__ == "__main__":
    main()
