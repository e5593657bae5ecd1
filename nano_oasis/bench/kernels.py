"""`bench kernels`: every CPU kernel against the floor of its bytes or its products.

Owns: the cases: which shapes, how many bytes and flops each must move at least. Must not know: how a kernel
works, requests.

Each case visits several layers' tensors in turn, as a model does, so that nothing is found in a cache that a
model would not find there.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nano_oasis.bench.report import digits, save, show
from nano_oasis.bench.roofline import measure_ceilings, timed
from nano_oasis.config import ConfigError
from nano_oasis.kernels import make_batch, select
from nano_oasis.kernels.batch import AttentionBatch
from nano_oasis.kernels.dispatch import select_kernels, select_oasis_kernels
from nano_oasis.kernels.linear import linear
from nano_oasis.memory.huge_pages import on_huge_pages
from nano_oasis.memory.sketch import FourBit

LINEAR_ROWS = (1, 4, 8, 16, 64)
BLOCK, CHOSEN_BLOCK = 16, 8  # tokens of a block: in dense mode; where attention chooses
FLOAT = 4


@dataclass(frozen=True)
class Shape:
    """Of one layer; the defaults are SmolLM2-135M's. layers: tensors that are visited in turn."""

    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    hidden: int = 576
    mlp: int = 1536
    layers: int = 8


@dataclass(frozen=True)
class Case:
    """read, flops: the least bytes and products of one call."""

    name: str
    run: Callable[[], object]
    read: float
    flops: float


def add_options(parser: argparse.ArgumentParser) -> None:
    s = Shape()
    add = parser.add_argument
    add("--shape", default=f"{s.heads},{s.kv_heads},{s.dim}", help="query heads, KV heads, head size")
    add("--hidden", default=f"{s.hidden},{s.mlp}", help="hidden size, MLP size")
    add("--only", default="", help="cases whose name contains this")
    add("--repeats", type=int, default=5, help="of each case; medians are shown (default: 5)")
    add("--threads", type=int, default=0, help="CPU threads; 0 = torch's own number")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for options that mean nothing."""
    shape = _shape(args)
    if args.repeats < 1 or args.threads < 0:
        raise ConfigError("--repeats: at least 1; --threads: at least 0")
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    ceilings = measure_ceilings()
    print(ceilings)
    found, rows = [], []
    with torch.inference_mode():
        for case in cases(shape):
            if args.only not in case.name:
                continue
            took = timed(case.run, args.repeats)
            floor = ceilings.floor(case.read, case.flops)
            of = "products" if case.flops / ceilings.products > case.read / ceilings.bandwidth else "bytes"
            found.append({
                "name": case.name, "seconds": took, "floor_s": floor, "floor_of": of,
                "share_of_floor": floor / took.median, "bytes": case.read, "flops": case.flops,
            })  # fmt: skip
            rate = case.read / took.median / 1e9 if of == "bytes" else case.flops / took.median / 1e9
            unit = "GB/s" if of == "bytes" else "GFLOP/s"
            rows.append([
                case.name, took.scaled(1e6), floor * 1e6, f"{floor / took.median:.0%} of {of}",
                f"{digits(rate)} {unit}",
            ])  # fmt: skip
    if not found:
        raise ConfigError(f"--only: no case's name contains {args.only!r}")
    show("one layer, fp32", ("", "us", "floor, us", "floor / time", "rate"), rows)
    if args.output:
        save(args.output, "kernels", vars(args), {"ceilings": ceilings.figures(), "cases": found})
    return 0


def cases(s: Shape) -> Iterator[Case]:
    yield from _linear(s)
    for rows, context in ((1, 1000), (1, 8000), (8, 4000), (8, 8000)):
        yield _dense(s, rows, context)
    for rows in (1, 8):
        yield _sparse(s, rows, 1024)
    yield _scores(s, 8, 7000)
    yield _choice(s, 8, 7000, 512)
    for start, count in ((0, 512), (3584, 512)):
        yield _prefill(s, start, count)
    yield _gather(s)


def _linear(s: Shape) -> Iterator[Case]:
    out, width = 2 * s.mlp, s.hidden
    weights = _turn(on_huge_pages([torch.randn(out, width) for _ in range(max(s.layers, 8))]))
    for n in LINEAR_ROWS:
        x = torch.randn(n, width)
        yield Case(
            f"linear {width} -> {out}, {n} rows", lambda x=x: linear(x, next(weights)),  # type: ignore[misc]
            FLOAT * width * out, 2.0 * n * width * out,
        )  # fmt: skip


def _dense(s: Shape, rows: int, context: int) -> Case:
    """One query per row over its whole context, blocks scattered."""
    need = -(-context // BLOCK)
    ids = torch.randperm(rows * need).tolist()
    plan = [(ids[r * need : (r + 1) * need], context - 1, 1) for r in range(rows)]
    batch, caches = make_batch(plan, BLOCK), _turn(_caches(s, rows * need, BLOCK, s.kv_heads))
    q = torch.randn(rows, s.heads, s.dim)
    pairs = rows * context
    return Case(
        f"decode, {rows} x {context} tokens", _attention(s, q, caches, batch),
        2.0 * FLOAT * pairs * s.kv_heads * s.dim, 4.0 * pairs * s.heads * s.dim,
    )  # fmt: skip


def _sparse(s: Shape, rows: int, budget: int) -> Case:
    """The working sets of the oasis mode: a choice for each KV head, small blocks, scattered slots."""
    need, groups = budget // CHOSEN_BLOCK, s.kv_heads
    caches = _turn(_caches(s, rows * need * groups, CHOSEN_BLOCK, 1))
    table = torch.randperm(rows * need * groups).view(groups * rows, need).int()
    lens = torch.full((groups * rows,), budget, dtype=torch.int32)
    q, kernels = torch.randn(groups * rows, s.heads // groups, s.dim), select_kernels("cpu")
    pairs = rows * budget
    return Case(
        f"decode, {rows} working sets of {budget} tokens",
        lambda: kernels.paged_decode(q, *next(caches), table, lens, s.dim**-0.5),
        2.0 * FLOAT * pairs * s.kv_heads * s.dim, 4.0 * pairs * s.heads * s.dim,
    )  # fmt: skip


def _scores(s: Shape, rows: int, context: int) -> Case:
    need = context // CHOSEN_BLOCK
    built = [
        FourBit().build(torch.randn(rows * need, CHOSEN_BLOCK, s.kv_heads, s.dim)) for _ in range(s.layers)
    ]
    slabs = _turn(built)
    table, counts = torch.randperm(rows * need).view(rows, need), torch.full((rows,), need)
    q = torch.randn(rows, s.heads, s.dim)
    return Case(
        f"sketch scores, {rows} x {context} tokens, four-bit",
        lambda: FourBit().mass_at(q, next(slabs), table, counts, s.dim**-0.5, s.kv_heads),
        float(sum(x.nbytes for x in built[0].values())), 2.0 * rows * context * s.heads * s.dim,
    )  # fmt: skip


def _choice(s: Shape, rows: int, context: int, budget: int) -> Case:
    """The choice of blocks by mass, where all of it is on the device: no search for victims."""
    blocks, groups, kernels = context // CHOSEN_BLOCK, s.kv_heads, select_kernels("cpu")
    masses = _turn([
        np.random.default_rng(i).exponential(size=(groups, rows, blocks)).astype(np.float32)
        for i in range(s.layers)
    ])  # fmt: skip
    row = [0, 0, blocks, 1, blocks - 4, budget // CHOSEN_BLOCK, CHOSEN_BLOCK, select.WAIT]
    columns = np.array([[i, *row[1:]] for i in range(rows)], np.int32)
    held = np.arange(groups * rows * blocks, dtype=np.int32).reshape(groups, rows, blocks)
    used, caps, pool = np.zeros_like(held), np.full(rows, blocks, np.int32), select.Pool(1)
    wanted, read = np.zeros((2, groups, rows, blocks), np.bool_)
    table = np.zeros((groups, rows, groups * budget // CHOSEN_BLOCK), np.int32)
    tokens, asks = np.zeros((groups, rows), np.int32), np.zeros((4, held.size), np.int32)
    counts, most = np.zeros(4, np.int64), np.zeros(rows, np.int32)

    def choose() -> None:
        state = next(masses), columns, held, used, caps, pool.free, pool.count, 0
        kernels.choose_now(*state, np.float32(0.1), wanted, asks, counts)
        kernels.choose_read(*state, 1, most, CHOSEN_BLOCK, None, wanted, read, table, tokens, asks, counts)

    return Case(f"choice of blocks, {rows} x {context} tokens", choose, 2.0 * FLOAT * held.size, 0.0)


def _prefill(s: Shape, start: int, count: int) -> Case:
    need = -(-(start + count) // BLOCK)
    batch = make_batch([(list(range(need)), start, count)], BLOCK)
    caches = _turn(_caches(s, need, BLOCK, s.kv_heads))
    q = torch.randn(count, s.heads, s.dim)
    pairs = count * start + count * (count + 1) / 2  # query and key pairs under the causal mask
    return Case(
        f"prefill, {count} tokens after {start}",
        _attention(s, q, caches, batch),
        2.0 * FLOAT * (start + count) * s.kv_heads * s.dim, 4.0 * pairs * s.heads * s.dim,
    )  # fmt: skip


def _gather(s: Shape) -> Case:
    """64 missing blocks of single KV heads from host to device memory, both RAM here."""
    count, total = 64, 4096
    hosts = _turn(_caches(s, total, CHOSEN_BLOCK, s.kv_heads))
    (keys, values), gather = _caches(s, count, CHOSEN_BLOCK, 1)[0], select_oasis_kernels("cpu").gather_groups
    blocks, slots = torch.randperm(total)[:count], torch.randperm(count)
    groups = torch.randint(s.kv_heads, (count,))
    return Case(
        f"copy of {count} blocks of one KV head",
        lambda: gather(*next(hosts), keys, values, blocks, groups, slots),
        2.0 * 2.0 * FLOAT * count * CHOSEN_BLOCK * s.dim, 0.0,  # read and written
    )  # fmt: skip


def _attention(
    s: Shape, q: torch.Tensor, caches: Iterator[Any], batch: AttentionBatch
) -> Callable[[], object]:
    kernels = select_kernels("cpu")

    def attend() -> object:
        keys, values = next(caches)
        return kernels.attention(q, keys, values, batch, s.dim**-0.5)

    return attend


def _caches(s: Shape, blocks: int, size: int, heads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """On large pages, as the engine's are."""
    shape = (blocks, size, heads, s.dim)
    pairs = (on_huge_pages([torch.randn(shape), torch.randn(shape)]) for _ in range(s.layers))
    return [(keys, values) for keys, values in pairs]


def _turn(things: Sequence[Any]) -> Iterator[Any]:
    return itertools.cycle(things)


def _shape(args: argparse.Namespace) -> Shape:
    try:
        heads, kv_heads, dim = map(int, args.shape.split(","))
        hidden, mlp = map(int, args.hidden.split(","))
        if min(heads, kv_heads, dim, hidden, mlp) < 1 or heads % kv_heads or dim % 8:
            raise ValueError
    except ValueError:
        raise ConfigError(
            "--shape: three numbers such as 9,3,64, the KV heads a divisor of the heads, the size a multiple"
            f" of 8; --hidden: two such as 576,1536; got {args.shape!r} and {args.hidden!r}"
        ) from None
    return Shape(heads, kv_heads, dim, hidden, mlp)
