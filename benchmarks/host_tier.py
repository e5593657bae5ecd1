"""Bytes per token of each host KV format, and how fast blocks go in and out beside a plain copy.

Owns: one measurement, run by hand: python benchmarks/host_tier.py [--path FILE] [--shape 30,3,64].
Must not know: anything above the memory package.

GB/s counts the KV in the model's dtype, whatever the format stores. The plain copy moves the same number of
bytes out of a tensor as large as the tier, so it is as cold as the tier's own copies. Blocks are scattered
at random over the tier and every call takes the next layer. One thread, as in the engine, and its CPU time:
what other programs take of the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import count

import torch

from nano_oasis.config import ModelConfig, RopeConfig, format_bytes
from nano_oasis.memory.formats import DTYPES
from nano_oasis.memory.host_tier import HostTier, num_blocks_for


def median(run: Callable[[], object], seconds: float) -> float:
    """CPU seconds of the median call."""
    run()
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()
        run()
        took.append(time.thread_time() - start)
    return sorted(took)[len(took) // 2]


def measure(config: ModelConfig, dtype: torch.dtype, fmt: str, args: argparse.Namespace) -> list[float]:
    """Bytes per second of [plain copy, store, load, load_into], `args.blocks` blocks per call."""
    blocks = num_blocks_for(args.memory, config, args.block_size, dtype, fmt)
    shape = (args.block_size, config.num_kv_heads, config.head_dim)
    n, layers, turn = args.blocks, config.num_layers, count()
    with HostTier.create(config, blocks, args.block_size, dtype, fmt, args.path) as tier:
        source = torch.randn(layers, n, *shape).to(dtype)
        for first in range(0, blocks - n + 1, n):  # touch every page
            tier.store(torch.arange(first, first + n), source, source)
        picks = [torch.randperm(blocks)[:n] for _ in range(64)]
        slots = torch.randperm(4 * n)[:n]
        pool = torch.zeros(2, 4 * n, *shape, dtype=dtype)
        out = torch.zeros(2, n, *shape, dtype=dtype)
        plain = torch.zeros(args.memory // dtype.itemsize, dtype=dtype)
        piece = plain[: 2 * source[0].numel()]
        places = plain.numel() // piece.numel()

        def copy() -> None:
            i = next(turn) * 7919 % places
            piece.copy_(plain[i * piece.numel() : (i + 1) * piece.numel()])

        def pick() -> tuple[int, torch.Tensor]:
            i = next(turn)
            return i % layers, picks[i % len(picks)]

        runs: list[tuple[Callable[[], object], int]] = [
            (copy, piece.nbytes),
            (lambda: tier.store(pick()[1], source, source), 2 * source.nbytes),
            (lambda: tier.load(*pick(), out[0], out[1]), out.nbytes),
            (lambda: tier.load_into(*pick(), slots, pool[0], pool[1]), out.nbytes),
        ]
        return [nbytes / median(run, args.seconds) for run, nbytes in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="30,3,64", help="layers, KV heads, head size")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=32, help="blocks per call")
    parser.add_argument("--memory", type=int, default=2**30, help="bytes of the tier")
    parser.add_argument("--path", help="file or folder of a file-backed tier")
    parser.add_argument("--seconds", type=float, default=2.0, help="per figure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, heads, dim = map(int, args.shape.split(","))
    config = ModelConfig(
        family="llama", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=layers, num_heads=heads,
        num_kv_heads=heads, head_dim=dim, max_position=1, rms_eps=1e-5, rope=RopeConfig(),
    )  # fmt: skip
    where = f"in {args.path}" if args.path else "in memory"
    print(f"{layers} layers, {heads} KV heads of {dim}; blocks of {args.block_size} {where}")
    print(f"{'model':<10}{'format':<9}{'bytes/token':>12}{'per 8K':>11}{'copy':>8}  GB/s (share of the copy)")
    with torch.inference_mode():
        for dtype, name in DTYPES.items():
            for fmt in ("auto", "int8"):
                copy, *others = measure(config, dtype, fmt, args)
                with HostTier.create(config, 1, args.block_size, dtype, fmt) as tier:
                    per_token = tier.bytes_per_block / args.block_size
                    kind = tier.format
                figures = "".join(
                    f"  {label} {speed / 1e9:.1f} ({speed / copy:.0%})"
                    for label, speed in zip(("store", "load", "load_into"), others, strict=True)
                )
                print(
                    f"{name:<10}{kind:<9}{per_token:>12.0f}{format_bytes(8192 * per_token):>11}"
                    f"{copy / 1e9:>8.1f}{figures}", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
