"""Decode throughput under device memory pressure: dense against oasis or lossless, same device KV memory, one
process.

Owns: one measurement, run by hand: python benchmarks/oasis_throughput.py [--requests 12 --prompt 7000 ...].
Must not know: how either mode works; it times the engine's steps from outside.

The device holds about `--fit` requests in dense mode, so dense runs that many at once and the others wait. A
step counts as decode when it has no prefill chunk; tokens/s is decode tokens over the time of such steps.
Prefill is reported apart. All prompts share a prefix (--shared), so that oasis prefills it once; dense gets
fewer requests of the same shape (--dense-requests), because its rate does not depend on how many wait, and
no prefix cache, which would let its requests share device memory that the comparison wants full.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from nano_oasis import LLM, SamplingParams


class StepTimer:
    """Wraps an engine's step; adds up decode tokens, decode seconds and prefill seconds."""

    def __init__(self, llm: LLM) -> None:
        self.decode_tokens, self.decode_s, self.prefill_tokens, self.prefill_s = 0, 0.0, 0, 0.0
        self.most_rows = self.row_steps = 0
        self._drawn = 0  # tokens of the last step: more than rows, with drafts
        engine, step, execute = llm.engine, llm.engine.step, llm.engine.runner.execute
        self._rows: list = []
        self._kv = llm.engine.runner.kv
        self.device_bytes = 0  # the most that a shrunk request held, everything counted

        def spy(rows):
            self._rows = rows
            results = execute(rows)
            self._drawn = sum(len(r.tokens) for r in results if hasattr(r, "tokens"))
            return results

        def timed() -> None:
            start = time.perf_counter()
            step()
            self._add(time.perf_counter() - start)

        engine.runner.execute, engine.step = spy, timed

    def _add(self, seconds: float) -> None:
        prefill = sum(r.num_tokens for r in self._rows if r.start < len(r.request.prompt_ids))
        if prefill:
            self.prefill_tokens += prefill
            self.prefill_s += seconds
        else:
            self.decode_tokens += self._drawn
            self.row_steps += len(self._rows)
            self.decode_s += seconds
            self.most_rows = max(self.most_rows, len(self._rows))
            shrunk = [s for s in getattr(self._kv, "seats", {}).values() if not s.dense]
            held = [self._kv.device_bytes(s.request) for s in shrunk[:1]]
            self.device_bytes = max([self.device_bytes, *held])


def prompts_of(llm: LLM, args: argparse.Namespace, count: int) -> list[dict]:
    """Real text: this project's sources, repeated as needed; different tails after a shared beginning."""
    root = Path(__file__).parent.parent
    text = "\n".join(f.read_text() for f in sorted(root.glob("nano_oasis/**/*.py")))
    ids = llm.tokenizer.encode(text)
    while len(ids) < args.prompt + count * args.prompt:
        ids = ids + ids
    own = args.prompt - args.shared
    starts = [args.shared + i * own for i in range(count)]
    return [{"prompt_token_ids": ids[: args.shared] + ids[s : s + own]} for s in starts]


def run(args: argparse.Namespace, name: str, count: int, **options) -> dict:
    with LLM(args.model, max_num_seqs=args.requests, max_model_len=args.prompt + args.new, **options) as llm:
        prompts = prompts_of(llm, args, count)
        if name != "dense":  # the shared beginning goes into the host tier
            llm.generate(prompts[0], SamplingParams(max_tokens=1))
        timer = StepTimer(llm)
        params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        kv = llm.engine.runner.kv
        row = {
            "mode": name,
            "requests": count,
            "at_once": timer.most_rows,
            "decode_tokens_per_s": round(timer.decode_tokens / timer.decode_s, 1),
            "ms_per_step": round(1000 * timer.decode_s / max(timer.row_steps / timer.most_rows, 1), 1),
            "tokens_per_row": round(timer.decode_tokens / max(timer.row_steps, 1), 2),
            "prefill_tokens_per_s": round(timer.prefill_tokens / max(timer.prefill_s, 1e-9)),
        }
        if hasattr(kv, "stats"):
            s = kv.stats
            dense_bytes = (args.prompt + args.new) * llm.engine.model_config.kv_bytes_per_token(4)
            row["device_kv_of_dense"] = round(dense_bytes / max(timer.device_bytes, 1), 2)
            row["hit_rate"] = round(s.hits / max(s.hits + s.misses, 1), 3)
            row["exposed_share"] = round(kv.coordinator.stats.exposed_s / timer.decode_s, 3)
    print(json.dumps(row), flush=True)
    return row | {"outputs": [o.outputs[0].token_ids for o in outputs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--dense-requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=7000)
    parser.add_argument("--shared", type=int, default=6500)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--fit", type=float, default=2.25, help="dense requests the device holds")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--mode", default="oasis", choices=("oasis", "lossless"))
    parser.add_argument("--oasis", default="{}", help="more options of the oasis engine, as JSON")
    args = parser.parse_args()
    blocks = int(args.fit * -(-(args.prompt + args.new) // 16))
    dense = run(args, "dense", args.dense_requests, num_device_blocks=blocks, enable_prefix_caching=False)
    more = json.loads(args.oasis)
    oasis = run(
        args, args.mode, args.requests, num_device_blocks=blocks, kv_mode=args.mode, kv_budget=args.budget,
        **more,
    )  # fmt: skip
    print(f"{args.mode} / dense: {oasis['decode_tokens_per_s'] / dense['decode_tokens_per_s']:.2f}")
    both = list(zip(dense["outputs"], oasis["outputs"], strict=False))
    print(f"answers equal to dense: {sum(a == b for a, b in both)} of {len(both)}")


if __name__ == "__main__":
    main()
