"""Decode throughput at several numbers of streams, beside the byte floor of this machine.

Owns: one measurement, run by hand: python benchmarks/decode.py [--model M] [--streams 1,8,32].
Must not know: anything but the public Python API.

The floor of a step is (weights + KV read) / bandwidth, with the bandwidth measured in the same run by
summing a large tensor. Prefill is not part of the figure: tokens are counted from the first to the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from nano_oasis import LLM, SamplingParams


def read_bandwidth() -> float:
    """Bytes per second of reading a tensor that does not fit any cache; best of 10."""
    x = torch.ones(64 * 2**20)
    best = min(_timed(x.sum) for _ in range(10))
    return x.nbytes / best


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def decode_rate(llm: LLM, streams: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens per second summed over streams, first to last token of the batch."""
    vocab = min(llm.tokenizer.vocab_size, 40000)
    prompts = [
        {"prompt_token_ids": [(i * 7919 + j * 31) % vocab for j in range(prompt_tokens)]}
        for i in range(streams)
    ]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)  # prefill: the timed run finds it in the prefix cache
    full = SamplingParams(temperature=0, max_tokens=new_tokens + 1, ignore_eos=True)
    first = _timed(lambda: llm.generate(prompts, params, use_tqdm=False))
    whole = _timed(lambda: llm.generate(prompts, full, use_tqdm=False))
    return streams * new_tokens / (whole - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-mode", default="dense", choices=("dense", "oasis"))
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    with LLM(args.model, dtype=args.dtype, kv_mode=args.kv_mode) as llm:
        model, engine = llm.engine.model_config, llm.engine
        weights = engine.runner.model.weight_bytes
        size = getattr(torch, engine.info.dtype).itemsize
        context = args.prompt_tokens + args.new_tokens // 2
        print(
            f"read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {weights / 1e6:.0f} MB, {engine.info.dtype}"
        )
        for streams in map(int, args.streams.split(",")):
            rates = [
                decode_rate(llm, streams, args.prompt_tokens, args.new_tokens) for _ in range(args.repeats)
            ]
            kv = streams * context * model.kv_bytes_per_token(size)
            floor = streams * bandwidth / (weights + kv)
            rate = statistics.median(rates)
            row = {"streams": streams, "tokens_per_s": round(rate, 1), "floor": round(floor, 1)}
            print(
                json.dumps(row | {"of_floor": round(rate / floor, 2), "spread": [round(r, 1) for r in rates]})
            )


if __name__ == "__main__":
    main()
