"""Times the CPU kernels against the byte and flop floors of this CPU, and against their torch twins.

    python benchmarks/kernels_cpu.py [--threads 2] [--shape 9,3,64]

With --threads 1 a busy machine disturbs the ratios little: CPU time is taken, not time on the clock.
Decode reads every key and value of the context once, so its floor is bytes / bandwidth; prefill is
products, so its floor is flops / (products per second). Both ceilings are measured here, first.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch

from nano_oasis.kernels import Kernels, make_batch, reference, select_kernels
from nano_oasis.memory.sketch import FourBit, Selector

BLOCK = 16


def best(run: Callable[[], object], seconds: float = 0.7) -> float:
    """Seconds of the fastest call; the machine may be shared, and the fastest is the least disturbed."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        run()
        least = min(least, clock() - start)
    return least


def ceilings() -> tuple[float, float]:
    """Bytes per second of a plain read (64 MiB: beyond the caches), flops per second of an fp32 product."""
    big = torch.randn(2**24)
    square = torch.randn(768, 768)
    return big.numel() * 4 / best(big.sum), 2 * 768**3 / best(lambda: square @ square)


def sketch(heads: int, kv_heads: int, dim: int, bandwidth: float, seconds: float) -> None:
    """Twelve queries against the four-bit sketches of 7,040 tokens each."""
    rows, blocks = 12, 440
    selector = FourBit()
    slabs = selector.build(torch.randn(rows * blocks, BLOCK, kv_heads, dim))
    table, counts = torch.randperm(rows * blocks).view(rows, blocks), torch.full((rows,), blocks)
    q = torch.randn(rows, heads, dim)
    took = best(lambda: selector.logits_at(q, slabs, table, counts), seconds)
    twin = best(lambda: Selector.logits_at(selector, q, slabs, table, counts), seconds)
    floor = sum(x.nbytes for x in slabs.values()) / bandwidth
    print(
        f"{'sketch scores, 12 x 7040 tokens, fourbit':<44}{took * 1e6:>9.0f} us{floor * 1e6:>9.0f} us"
        f"{floor / took:>7.0%} of read speed, torch x {twin / took:.1f}",
        flush=True,
    )


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
    twins = Kernels("torch", reference.write_kv, reference.paged_decode, reference.paged_prefill)
    bandwidth, speed = ceilings()
    print(f"{args.threads} threads, read {bandwidth / 1e9:.1f} GB/s, products {speed / 1e9:.0f} GFLOP/s")
    total = 8 * (8000 // BLOCK + 1)  # blocks in a cache
    caches = [torch.randn(2, total, BLOCK, kv_heads, dim) for _ in range(args.layers)]

    def report(name: str, rows: list[tuple[list[int], int, int]], floor: float, unit: str) -> None:
        batch = make_batch(rows, BLOCK)
        q = torch.randn(batch.query_list[-1], heads, dim)
        calls = iter(range(10**9))

        def run(with_kernels: Kernels) -> None:
            k, v = caches[next(calls) % args.layers]
            with_kernels.attention(q, k, v, batch, scale, None)

        took = best(lambda: run(kernels), args.seconds)
        line = f"{name:<44}{took * 1e6:>9.0f} us{floor * 1e6:>9.0f} us{floor / took:>7.0%} of {unit}"
        if batch.num_decodes and kernels.name != "torch":
            line += f", torch x {best(lambda: run(twins), args.seconds) / took:.1f}"
        print(line, flush=True)

    print(f"{'one layer':<44}{'measured':>12}{'floor':>12}")
    for order in ("in order", "scattered"):
        for rows, contexts in ((1, (100, 1000, 4000, 8000)), (8, (100, 1000, 4000, 8000)), (12, (512,))):
            for context in contexts:
                need = -(-context // BLOCK)
                ids = list(range(rows * need))
                if order == "scattered":
                    random.Random(0).shuffle(ids)
                plan = [(ids[r * need : (r + 1) * need], context - 1, 1) for r in range(rows)]
                floor = rows * context * kv_heads * dim * 4 * 2 / bandwidth
                report(f"decode, {rows} x {context} tokens, blocks {order}", plan, floor, "read speed")
    sketch(heads, kv_heads, dim, bandwidth, args.seconds)
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
