"""All linear layers of SmolLM2-135M for a few rows, in ms: torch's two products, the compiled one by format.

Owns: a table in docs/04-weights.md. Must not know: the engine. Run by hand: python benchmarks/linear.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_oasis.kernels.cpu_linear import linear_rows
from nano_oasis.kernels.matrix import Matrix, parts_of
from nano_oasis.kernels.packed_weight import PackedWeight

ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
HIDDEN, MLP, VOCAB, LAYERS = 576, 1536, 49152, 30


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(w, x.T).T.contiguous()


def main() -> None:
    shapes = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP)] * LAYERS + [(VOCAB, HIDDEN)]
    weights = [torch.randn(shape) for shape in shapes]
    size = sum(w.nbytes for w in weights)
    flat = torch.cat([w.flatten() for w in weights])
    best = min(timed(lambda: flat.dot(flat)) for _ in range(7))
    print(f"{size / 1e6:.0f} MB of weights; read at {size / best / 1e9:.1f} GB/s by one dot product")
    print("rows              MB" + "".join(f"{rows:6}" for rows in ROWS))
    line("F.linear", F.linear, weights)
    line("(W @ x.T).T", transposed, weights)
    line("compiled fp32", linear_rows, weights)
    line("float16", linear_rows, [w.half() for w in weights])
    line("int8", linear_rows, [PackedWeight.of(w) for w in weights])
    line("four bits", linear_rows, [four_bits(w) for w in weights])


def four_bits(weight: Tensor) -> PackedWeight:
    """Any nibbles with scales and mins, as Q4_1 has them."""
    out, wide = weight.shape
    scales = torch.full((out, wide // 32), 0.1, dtype=torch.float16)
    return PackedWeight(torch.randint(0, 256, (out, wide // 2), dtype=torch.uint8), scales, -8 * scales)


def line(name: str, product: Callable[..., Tensor], weights: list[Matrix]) -> None:
    size = sum(part.nbytes for w in weights for part in parts_of(w)) / 1e6
    took = "".join(f"{measure(product, weights, rows):6.1f}" for rows in ROWS)
    print(f"{name:14}{size:6.0f}{took}", flush=True)


def measure(product: Callable[..., Tensor], weights: list[Matrix], rows: int) -> float:
    x = {k: torch.randn(rows, k) for k in (HIDDEN, MLP)}

    def layers() -> None:
        for w in weights:
            product(x[w.shape[1]], w)

    layers()
    return 1000 * statistics.median(timed(layers) for _ in range(7))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
