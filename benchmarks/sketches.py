"""Compares key sketches: KL to dense on real texts, bytes per request, scoring time.

Owns: which configurations are compared and the tables. Must not know: how sparse attention is done.
Run by hand: python benchmarks/sketches.py [bytes] [time] [kl] [variants] [rules]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from sparse_decode import Decoder, Sparse, real_texts
from torch import Tensor

from nano_oasis.config import ModelConfig
from nano_oasis.memory.sketch import SELECTORS, make_selector

STEPS = 64  # teacher-forced tokens after each prefix
DEFAULT = "fourbit"


SELECTOR_TABLE = [
    *[Sparse(name) for name in ("exact", DEFAULT, "twobit", "sign1", "minmax", "mean")],
    *[Sparse(name, per_head=True) for name in ("exact", DEFAULT, "minmax")],
    Sparse(DEFAULT, predictor="previous"),
]
VARIANT_TABLE = [
    *[Sparse(name, early=early) for early in (1, 0) for name in ("exact", DEFAULT)],
    *[Sparse(name, early=1, estimate="centroid") for name in ("exact", DEFAULT)],
    *[Sparse(name, early=1, block=32) for name in ("exact", DEFAULT)],
    Sparse("minmax", early=1),
    Sparse("twobit", per_head=True, early=1),
]

# Early layers as the others, as in the engine. The first rule is the engine's.
RULES_TABLE = [
    Sparse(name, early=1, per_head=head, **rule)  # type: ignore[arg-type]
    for head in (False, True)
    for rule in ({}, {"recent": 32}, {"recent": 32, "rule": "max"}, {"recent": 32, "pool": True})
    for name in ("exact", DEFAULT, "minmax")
    if head or "pool" not in rule
]


# --- KL ---------------------------------------------------------------------------------------------
def measure_kl(decoder: Decoder, text: str, configs: list[Sparse], prefix: int, windows: int) -> Tensor:
    """[configs, windows * STEPS, 2]: KL(dense || sparse) in nats, and 1 where both prefer the same token.

    Window w decodes tokens [prefix + w * STEPS, + STEPS) sparsely after a dense prefill of all before.
    """
    ids = torch.tensor(decoder.tokenizer.encode(text[: 12 * prefix])[: prefix + windows * STEPS])
    if len(ids) < prefix + windows * STEPS:
        raise SystemExit(f"a text has {len(ids)} tokens, {prefix + windows * STEPS} are needed")
    view = decoder.view
    view.forget()
    decoder.prefill(ids, 0, prefix)
    result = []
    for start in range(prefix, prefix + windows * STEPS, STEPS):
        rows, before = ids[start : start + STEPS], dict(view.last_query)
        view.sparse = None
        dense = decoder.forward(rows, start)
        after = decoder.snapshot(start, start + STEPS)
        view.prefix = start
        part = []
        for config in configs:
            view.sparse, view.last_query = config, dict(before)
            sparse = decoder.forward(rows, start)
            kl = (dense.exp() * (dense - sparse)).sum(-1)
            part.append(torch.stack((kl, (dense.argmax(-1) == sparse.argmax(-1)).float()), -1))
            decoder.restore(after)
        result.append(torch.stack(part))
    return torch.cat(result, 1)


def print_kl(decoder: Decoder, configs: list[Sparse], prefix: int, windows: int) -> None:
    print(f"\nKL(dense || sparse) at {prefix} tokens, {windows * STEPS} steps: mean / p99 / same top token")
    for name, text in real_texts().items():
        result = measure_kl(decoder, text, configs, prefix, windows)
        mean = {config: float(r[:, 0].mean()) for config, r in zip(configs, result, strict=True)}
        print(f"\n{name}")
        for config, r in zip(configs, result, strict=True):
            line = f"  {config!s:30} {mean[config]:.4f} / {r[:, 0].quantile(0.99):.3f} / {r[:, 1].mean():.3f}"
            for other in ("exact", "minmax"):  # at the same granularity, everything else equal
                twin = replace(config, selector=other)
                if config.selector == DEFAULT and twin in mean:
                    line += f"   {mean[config] / mean[twin]:.2f} of {other}'s"
            print(line, flush=True)


# --- bytes ------------------------------------------------------------------------------------------
def device_bytes(
    model: ModelConfig, sparse: Sparse, context: int, element: int, centroids: bool = False
) -> dict[str, float]:
    """Device KV bytes of one request and how many times less than dense, everything counted.

    element: bytes per KV element. Each layer holds its budget and one tail block of K and V, and the
    sketch of every block of the context. Layers 0 and 1 hold `early` times the budget (0: the whole
    context, and no sketch). The estimate also keeps the mean value of every block, fp16; its mean key
    comes out of the sketch's scores.
    """
    heads, dim, blocks = model.num_kv_heads, model.head_dim, -(-context // sparse.block)
    token = 2 * heads * dim * element  # K and V, one layer
    selector = make_selector(sparse.selector)
    sketch = blocks * selector.bytes_per_block(sparse.block, heads, dim)
    if centroids:
        sketch += blocks * 2 * heads * dim
    early = min(2, model.num_layers)
    late = model.num_layers - early
    held = sparse.budget + sparse.block
    early_held = min(context, sparse.early * sparse.budget + sparse.block) if sparse.early else context
    kv = token * (late * held + early * early_held)
    sketches = sketch * (model.num_layers if sparse.early else late)
    dense = token * model.num_layers * context
    return {"kv": kv, "sketches": sketches, "dense": dense, "times": dense / (kv + sketches)}


def print_bytes(model: ModelConfig) -> None:
    print(
        "\ndevice KV bytes per request, dense / oasis at budget 512 (block 16, layers 0-1 at 4x the budget)"
    )
    for name in SELECTORS:
        if name == "exact":
            continue
        for centroids in (False, True):
            row = [f"  {name + (' + centroids' if centroids else ''):22}"]
            for element, dtype in ((4, "fp32"), (2, "bf16")):
                for context in (8000, 32000, 128000):
                    b = device_bytes(model, Sparse(name), context, element, centroids)
                    row.append(f"{dtype} {context // 1000}K {b['times']:.2f}x")
            print(", ".join(row))
    for early in (0, 1, 2, 4):
        b = device_bytes(model, Sparse(DEFAULT, early=early), 8000, 4)
        c = device_bytes(model, Sparse(DEFAULT, early=early), 8000, 2)
        rule = f"{early}x" if early else "dense"
        print(
            f"  {DEFAULT}, layers 0-1 {rule}: fp32 {b['times']:.2f}x ({b['kv'] / 1e6:.1f} + "
            f"{b['sketches'] / 1e6:.1f} of {b['dense'] / 1e6:.1f} MB), bf16 {c['times']:.2f}x"
        )


# --- time -------------------------------------------------------------------------------------------
def print_time(model: ModelConfig, context: int) -> None:
    """One layer's scoring for one query, as a share of dense attention over the same context (fp32).

    CPU time of one thread, best of 30: other programs on the machine hardly disturb it.
    """
    heads, dim, size = model.num_kv_heads, model.head_dim, 16
    keys = torch.randn(context // size, size, heads, dim)
    q, scale = torch.randn(1, model.num_heads, dim), dim**-0.5
    dense_k = torch.randn(1, heads, context, dim)
    dense_q = q.view(1, heads, -1, dim)

    def dense() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(dense_q, dense_k, dense_k, scale=scale)

    base = _best(dense)
    print(
        f"\nscoring one query against {context} tokens, one layer; dense attention takes {base * 1e6:.0f} us"
    )
    for name in SELECTORS:
        selector = make_selector(name)
        sketch = {k: x[None] for k, x in selector.build(keys).items()}
        seconds = _best(lambda: selector.score(q, sketch, scale))  # noqa: B023
        nbytes = sum(x.nbytes for x in sketch.values())
        print(f"  {name:8} {seconds / base:.2f}x dense, reads {nbytes / 1024:.0f} KiB "
              f"({nbytes / (2 * keys.nbytes):.1%} of the KV)")  # fmt: skip


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(30):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["bytes", "time", "kl"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=6000, help="tokens of context before the first step")
    parser.add_argument("--budget", type=int, default=512, help="of `rules`")
    parser.add_argument("--windows", type=int, default=3, help=f"passes of {STEPS} steps per text")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    decoder = Decoder(args.model, args.prefix + args.windows * STEPS + 16)
    if "bytes" in args.parts:
        print_bytes(decoder.config)
    if "time" in args.parts:
        print_time(decoder.config, 8000)
    if "kl" in args.parts:
        print_kl(decoder, SELECTOR_TABLE, args.prefix, args.windows)
    if "variants" in args.parts:
        print_kl(decoder, VARIANT_TABLE, args.prefix, args.windows)
    if "rules" in args.parts:
        table = [replace(config, budget=args.budget) for config in RULES_TABLE]
        print_kl(decoder, table, args.prefix, args.windows)


if __name__ == "__main__":
    main()
