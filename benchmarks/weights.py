"""What each format of the weights costs: KL of the next token to fp32 weights, along real text.

Owns: the table in docs/04-weights.md, run by hand: python benchmarks/weights.py [--tokens 1024 FILE...].
Must not know: the engine; it runs the model over each text once per precision.

float32 and the three after it are what --weights takes. The others are not in the engine and stand here to
show why: `int8 activations` also rounds what goes into each layer, with one scale per row of activations
(dynamic quantisation, as FBGEMM does it, and with smaller groups llama.cpp); one scale for each output
channel; `int4` has four bits per weight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_oasis import layer as layer_module
from nano_oasis import model as model_module
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.kernels.linear import linear
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.model import Model
from nano_oasis.request import Request, SamplingParams, ScheduledRow
from nano_oasis.tokenizer import load_tokenizer
from nano_oasis.weights import load_checkpoint, resolve_model

BLOCK = 16
TEXTS = [sys.modules["argparse"].__file__, str(Path(__file__).parent.parent / "README.md"),
         str(Path(__file__).parent.parent / "docs" / "11-tiers.md")]  # fmt: skip


def rounded(x: Tensor, most: int) -> Tensor:
    """Each row to whole steps of its largest value / most."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
    return (x / step).round() * step


def with_int8_inputs(x: Tensor, weight: object, bias: Tensor | None = None) -> Tensor:
    return linear(rounded(x, 127), weight, bias)


def in_groups(size: int, most: int) -> Callable[..., Tensor]:
    """`size` weights have one scale, the largest is `most`; 0: all of an output channel have."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        groups = weight.unflatten(1, (-1, size)) if size else weight
        return F.linear(x, rounded(groups, most).reshape(weight.shape), bias)

    return product


# name: load_checkpoint's `matrices`, the product, bytes a weight; 0: those of the model
VARIANTS = {
    "float16": ("float16", linear, 0.0),
    "int8": ("int8", linear, 0.0),
    "auto": ("stored", linear, 0.0),
    "int8, int8 activations": ("int8", with_int8_inputs, 0.0),
    "int8, one scale a channel": ("full", in_groups(0, 127), 1.0),
    "int4 in groups of 32": ("full", in_groups(32, 7), 0.5 + 2 / 32),
}  # fmt: skip


@torch.inference_mode()
def logprobs(model: Model, ids: list[int]) -> Tensor:
    """[tokens, V] of one dense pass."""
    blocks = -(-len(ids) // BLOCK)
    cache = KVCache.allocate(model.config, blocks, BLOCK, torch.float32, "cpu")
    request = Request(ids, SamplingParams(), len(ids) + 1, seed=0, block_table=list(range(blocks)))
    store = DenseKV(cache, select_kernels("cpu"), "cpu")
    view = store.begin([ScheduledRow(request, 0, len(ids), samples=True)])
    hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), view)
    return model.logits(hidden).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="*", default=TEXTS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    args = parser.parse_args()
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    texts = [tokenizer.encode(Path(t).read_text(errors="replace"))[: args.tokens] for t in args.texts]

    def load(matrices: str) -> Model:
        checkpoint = load_checkpoint(path, torch.float32, matrices=matrices)
        return Model(
            checkpoint.config, checkpoint.tensors, args.tokens + 1, torch.float32, rounded=matrices == "int8"
        )

    exact = load("full")
    truth = [logprobs(exact, ids) for ids in texts]
    print(f"{path.name}, {sum(map(len, texts))} tokens of {len(texts)} texts, against fp32 weights")
    print(f"{'':26}{'MB a step':>10}{'mean KL':>10}{'p99 KL':>10}{'same top':>10}{'perplexity':>12}")
    mb = exact.weight_bytes / 1e6
    print(f"{'float32':26}{mb:10.0f}{'':30}{perplexity(truth, texts):12.3f}", flush=True)
    for name, (matrices, product, bytes_each) in VARIANTS.items():
        model = exact if matrices == "full" else load(matrices)
        if product is not linear:
            for layer in model.layers:
                layer.compiled = None  # its products are its own
        layer_module.linear = model_module.linear = product
        found = [logprobs(model, ids) for ids in texts]
        layer_module.linear = model_module.linear = linear
        pairs = list(zip(truth, found, strict=True))
        kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in pairs]).clamp_min(0)
        same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs]).float().mean()
        mb = (exact.num_weights * bytes_each or model.weight_bytes) / 1e6
        print(
            f"{name:26}{mb:10.0f}{kl.mean():10.5f}{kl.quantile(0.99):10.4f}{same:10.1%}"
            f"{perplexity(found, texts):12.3f}",
            flush=True,
        )


def perplexity(logs: list[Tensor], texts: list[list[int]]) -> float:
    nll = [
        -log[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
        for log, ids in zip(logs, texts, strict=True)
    ]
    return float(torch.tensor(statistics.fmean(nll)).exp())


if __name__ == "__main__":
    main()
