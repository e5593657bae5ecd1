"""Exactness on a real model: greedy tokens and last-token logits against transformers, in fp32.

Owns: one comparison, run by hand: python benchmarks/against_transformers.py [--model smollm2|gemma3-270m].
Must not know: the inside of the engine; it uses the public Python API (and one logits hook).

20 prompts from a few to 4,000 tokens run in batches of 8 with chunked prefill and the prefix cache on, twice.
transformers reads the same GGUF and takes one prompt at a time. Exits 1 if any token differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import transformers

from nano_oasis import LLM, SamplingParams
from nano_oasis.weights import resolve_model

NEW_TOKENS = 64
LENGTHS = [3, 9, 17, 31, 64, 100, 128, 200, 256, 333, 512, 600, 777, 1000, 1024, 1500, 2000, 2500, 3000, 4000]


def real_prompts(llm: LLM) -> list[list[int]]:
    """Prompts of LENGTHS tokens cut from this project's own source and docs; some share prefixes."""
    root = Path(__file__).parent.parent
    files = sorted(root.glob("nano_oasis/**/*.py")) + sorted(root.glob("docs/*.md"))
    ids = llm.tokenizer.encode("\n".join(f.read_text() for f in files))
    prompts = []
    for i, n in enumerate(LENGTHS):
        start = 0 if i % 3 == 0 else 977 * i  # every third prompt starts the same way
        prompts.append(ids[start : start + n])
    return prompts


def reference(hf, prompt: list[int], output: list[int]) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy choice at every step of `output`, and the logits [V] of the prompt's last token.

    One forward pass over prompt + output: if its argmax equals `output` at every step, then greedy
    generation, which would see the same tokens at every step, gives `output` too.
    """
    with torch.inference_mode():
        ids = torch.tensor([prompt + output[:-1]])
        logits = hf(ids, logits_to_keep=len(output)).logits[0]
    return logits.argmax(dim=-1).tolist(), logits[0]


def last_logits(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """What the sampler saw for each prompt's first token."""
    sampler, seen = llm.engine.runner.sampler, {}

    def spy(logits, requests):
        for row, request in zip(logits, requests, strict=True):
            if not request.output_ids:
                seen[tuple(request.prompt_ids)] = row.clone()
        return sampler(logits, requests)

    spy.num_tokens = sampler.num_tokens
    llm.engine.runner.sampler = spy
    run(llm, prompts, 1)
    llm.engine.runner.sampler = sampler
    return [seen[tuple(p)] for p in prompts]


def run(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--longest", type=int, default=4000, help="leave out longer prompts")
    args = parser.parse_args()
    path = resolve_model(args.model)
    with LLM(args.model, max_num_seqs=8, max_model_len=4200, max_num_batched_tokens=512) as llm:
        prompts = [p for p in real_prompts(llm) if len(p) <= args.longest]
        began = time.time()
        cold, warm = run(llm, prompts, NEW_TOKENS), run(llm, prompts, NEW_TOKENS)
        print(f"nano_oasis: {len(prompts)} prompts twice in {time.time() - began:.0f} s", flush=True)
        logits = last_logits(llm, prompts)
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    bad, worst = 0, 0.0
    for prompt, a, b, mine in zip(prompts, cold, warm, logits, strict=True):
        expected, theirs = reference(hf, prompt, a)
        known = min(len(mine), len(theirs))
        finite = mine[:known].isfinite()
        gap = (mine[:known] - theirs[:known])[finite].abs().max().item()
        worst, same = max(worst, gap), a == expected and b == expected
        bad += not same
        print(
            f"{len(prompt):5d} tokens: {'equal' if same else 'DIFFERENT'}, logits within {gap:.1e}",
            flush=True,
        )
    print(f"{len(prompts) - bad} of {len(prompts)} equal for {NEW_TOKENS} tokens; logits within {worst:.1e}")
    return 1 if bad or worst > 1e-3 else 0


if __name__ == "__main__":
    sys.exit(main())
