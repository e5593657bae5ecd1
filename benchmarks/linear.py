"""All linear layers of SmolLM2-135M for a few rows, in ms: torch's two products and the compiled one.

Owns: the table in kernels/linear.py. Must not know: the engine. Run by hand: python benchmarks/linear.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_oasis.kernels.cpu_linear import linear_rows

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
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
    print("rows          " + "".join(f"{rows:6}" for rows in ROWS))
    for name, product in (("F.linear", F.linear), ("(W @ x.T).T", transposed), ("compiled", linear_rows)):
        print(f"{name:14}" + "".join(f"{measure(product, weights, rows):6.1f}" for rows in ROWS), flush=True)


def measure(product: Callable[[Tensor, Tensor], Tensor], weights: list[Tensor], rows: int) -> float:
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
