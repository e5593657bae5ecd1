"""Counted figures of docs/ on the default model: python benchmarks/default_model.py weights|text|kv.

Owns: one small table per name, the same on every machine, so that the tests check the pages against it.
Must not know: time, the engine.
"""

from __future__ import annotations

import argparse
import math

from nano_oasis.config import format_bytes
from nano_oasis.tokenizer import IncrementalDecoder, load_tokenizer
from nano_oasis.weights import load_config, resolve_model
from nano_oasis.weights.gguf_scan import scan_gguf


def weights() -> None:
    """What the file holds, and what it becomes in memory."""
    header = scan_gguf(resolve_model("smollm2"))
    found = list(header.tensors.values())
    print("stored as  tensors  MB in the file  MB as float32")
    for kind in sorted({t.kind for t in found}):
        group = [t for t in found if t.kind == kind]
        stored, dense = sum(t.nbytes for t in group), 4 * sum(math.prod(t.shape) for t in group)
        print(f"{kind:9} {len(group):8} {stored / 1e6:15.1f} {dense / 1e6:14.1f}")
    size, start = header.path.stat().st_size, min(t.offset for t in found)
    print(f"checked before the first weight is read: {start} of {size} bytes ({start / size:.1%})")


SAMPLES = {
    "English": "The quick answer is rarely the whole answer, but it is a start.",
    "Python": "for i, row in enumerate(rows):\n    total += row[i] * weight[i]\n",
    "Chinese": "缓存里的每一块都有主人，也都会被归还。",
    "Emoji": "👩‍👩‍👧 🦜 🧮 👍🏽",
}


def text() -> None:
    """How many tokens end inside a character, so that their text waits for a later one."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    print("text     characters  bytes  tokens  tokens that end inside a character")
    for name, sample in SAMPLES.items():
        ids = tokenizer.encode(sample, add_special_tokens=False)
        decoder = IncrementalDecoder(tokenizer)
        deltas = [decoder.push([i]) for i in ids]
        assert "".join(deltas) + decoder.flush() == tokenizer.decode(ids) == sample
        print(
            f"{name:8} {len(sample):10} {len(sample.encode()):6} {len(ids):7} {deltas.count(''):35}",
        )


def kv() -> None:
    """What the KV of one token, of one block and of a full context takes."""
    config = load_config(resolve_model("smollm2"))
    print("dtype     bytes per token  per block of 16  per 8,192-token context")
    for name, size in (("float32", 4), ("bfloat16", 2)):
        token = config.kv_bytes_per_token(size)
        print(f"{name:9} {token:15} {token * 16:16} {format_bytes(token * 8192):>24}")


FIGURES = {f.__name__: f for f in (weights, text, kv)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FIGURES)
    FIGURES[parser.parse_args(argv).name]()


if __name__ == "__main__":
    main()
