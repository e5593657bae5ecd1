"""Tokens per second and acceptance of each draft against plain decoding, one stream, side by side.

Owns: one measurement, run by hand: python benchmarks/speculation.py [--drafts none,ngram,head,auto --repeats
3]. Must not know: how drafts work; it times generate() from outside and reads the metrics.

Each engine answers the same prompts greedily; engines take turns, so that a slow moment of the machine meets
all of them. Reported per task: the median over repeats of tokens/s relative to plain decoding of the same
repeat, and tokens per step. Answers must be the same as without drafts, and are checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from nano_oasis import LLM, SamplingParams

ROOT = Path(__file__).parent.parent


def tasks() -> dict[str, list[str]]:
    """Chat messages by task; texts are this project's own."""
    code = (ROOT / "nano_oasis/memory/kv_cache.py").read_text()
    small = (ROOT / "nano_oasis/memory/audit.py").read_text()
    prose = (ROOT / "docs/02-continuous-batching.md").read_text()
    more = (ROOT / "docs/03-paged-kv.md").read_text()
    return {
        "code editing": [
            f"Rewrite this file with the class renamed to Cache. Answer with the whole file.\n\n{code}",
            f"Add a comment to every line of this function and give the file back.\n\n{small}",
        ],
        "summarising": [
            f"Summarise the following text.\n\n{prose[:3500]}",
            f"Summarise the following text in a few sentences.\n\n{more[:3500]}",
        ],
        "extraction": [
            f"List every file name that is mentioned in this text.\n\n{prose[:3500]}",
            f"Copy the headings of this text.\n\n{more[:3500]}",
        ],
        "questions": [
            "Explain how photosynthesis works.",
            "What is the difference between a list and a tuple in Python?",
        ],
        "writing": [
            "Write a short story about a lighthouse keeper.",
            "Write a letter to a friend about a journey by train.",
        ],
    }


def accepted(llm: LLM) -> tuple[float, float, float]:
    """Drafts made, draft tokens, accepted tokens since start."""
    found = {}
    for line in llm.engine.metrics.render().decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("nano_oasis:spec_decode_num_") and "per_pos" not in name:
            found[name.split("{")[0].removeprefix("nano_oasis:spec_decode_num_")] = float(value)
    return tuple(found.get(f"{n}_total", 0.0) for n in ("drafts", "draft_tokens", "accepted_tokens"))


def answer(llm: LLM, messages: list[str], args: argparse.Namespace) -> dict:
    params = SamplingParams(temperature=0, max_tokens=args.new)
    seconds, tokens, outputs = 0.0, 0, []
    drafts = accepted(llm)
    for text in messages:
        chat = [{"role": "user", "content": text}]
        llm.chat(chat, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)  # caches the prompt
        start = time.perf_counter()
        out = llm.chat(chat, params, use_tqdm=False)[0].outputs[0]
        seconds += time.perf_counter() - start
        tokens += len(out.token_ids)
        outputs.append(out.token_ids)
    _, drafted, right = (b - a for a, b in zip(drafts, accepted(llm), strict=True))
    return {
        "rate": tokens / seconds, "outputs": outputs, "drafted": drafted, "right": right,
        "per_step": tokens / max(tokens - right, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafts", default="none,ngram,head,auto")
    parser.add_argument("--tasks", default=",".join(tasks()), help="some of them (default: %(default)s)")
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--options", default="{}", help="more options of all engines, as JSON")
    args = parser.parse_args()
    names, wanted = args.drafts.split(","), args.tasks.split(",")
    if unknown := set(wanted) - set(tasks()):
        parser.error(f"--tasks: no {sorted(unknown)}")
    options = {"max_model_len": 4096, "max_num_seqs": 4, **json.loads(args.options)}
    engines = {n: LLM(args.model, draft=n, **options) for n in names}
    rows: dict[tuple[str, str], list[dict]] = {}
    for _ in range(args.repeats):
        for task in wanted:
            messages, plain = tasks()[task], None
            for name, llm in engines.items():
                row = answer(llm, messages, args)
                plain = plain or row
                row["ratio"] = row["rate"] / plain["rate"]
                row["same"] = row["outputs"] == plain["outputs"]
                rows.setdefault((task, name), []).append(row)
    print(f"{'task':14} {'draft':6} {'tokens/s':>8} {'ratio':>6} {'tok/step':>8} {'right':>6}  same")
    for (task, name), found in rows.items():
        rate, ratio = (statistics.median(r[k] for r in found) for k in ("rate", "ratio"))
        share = sum(r["right"] for r in found) / max(sum(r["drafted"] for r in found), 1)
        per_step = statistics.median(r["per_step"] for r in found)
        same = all(r["same"] for r in found)
        print(f"{task:14} {name:6} {rate:8.1f} {ratio:6.2f} {per_step:8.2f} {share:6.2f}  {same}")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
