"""Counted figures of docs/: python benchmarks/counts.py trace|batching|preemption|prefix|seeds|choices.

Owns: one small experiment per name, deterministic, so that the tests check the pages against its output.
Must not know: time (see decode.py), real models (see default_model.py).

Scheduling does not depend on weights, so these run the real engine around the tests' fake model.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from fakes import VOCAB, Caller, FakeModel, make_engine, run, turn

from nano_oasis import sampler
from nano_oasis.request import SamplingParams

Jobs = list[tuple[list[int], SamplingParams]]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def sampled(max_tokens: int, seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def serve(jobs: Jobs, at_once: int | None = None, **options) -> tuple[FakeModel, list[Caller]]:
    """Run jobs to the end on a new engine, all submitted at once or `at_once` at a time."""
    model = FakeModel()
    engine = make_engine(model=model, **options)
    callers: list[Caller] = []
    size = at_once or len(jobs)
    for i in range(0, len(jobs), size):
        group = [Caller(engine, prompt, params) for prompt, params in jobs[i : i + size]]
        run(engine, *group, limit=100_000)
        callers += group
    return model, callers


def tokens_of(callers: list[Caller]) -> list[list[int]]:
    return [o.token_ids for c in callers for o in c.outputs]


def preemptions(callers: list[Caller]) -> int:
    return sum(r.num_preemptions for c in callers for r in c.submission.requests)


def trace() -> None:
    """Two requests, step by step. B arrives after step 2; its first 10 tokens are those of A."""
    engine = make_engine(num_blocks=16, block_size=4, max_num_batched_tokens=8)
    prompt = random_ids(random.Random(0), 18)
    plans, plan = [], engine.scheduler.plan
    engine.scheduler.plan = lambda: plans.append(plan()) or plans[-1]
    names, callers = {}, []

    def submit(name: str, ids: list[int], max_tokens: int) -> None:
        callers.append(Caller(engine, ids, greedy(max_tokens)))
        names[callers[-1].submission.requests[0].id] = name

    submit("A", prompt[:10], 5)
    print("step  rows                   tokens  blocks held  blocks cached")
    while not all(c.done for c in callers):
        turn(engine)
        rows = [
            f"{names[r.request.id]}[{r.start}:{r.start + r.num_tokens}]{'*' * r.samples}"
            for r in plans[-1].rows
        ]
        used, cached = engine.scheduler.blocks.num_used, engine.scheduler.blocks.num_cached
        print(f"{len(plans):4}  {'  '.join(rows):22} {plans[-1].num_tokens:6} {used:12} {cached:14}")
        if len(plans) == 2:
            submit("B", prompt, 2)


def batching() -> None:
    """32 requests, prompts of 4 to 60 tokens, 4 to 40 new tokens; at most 64 tokens a step."""
    rng = random.Random(0)
    jobs = [(random_ids(rng, rng.randrange(4, 61)), greedy(rng.randrange(4, 41))) for _ in range(32)]
    ways = {
        "one at a time": (1, None),
        "8 at a time, all waited for": (8, 8),
        "continuous, 8 places": (8, None),
    }
    print("                             steps  tokens per step")
    outputs = []
    for name, (seats, at_once) in ways.items():
        options = {"num_blocks": 1000, "max_num_seqs": seats, "max_num_batched_tokens": 64}
        model, callers = serve(jobs, at_once, **options)
        outputs.append(tokens_of(callers))
        print(f"{name:28} {len(model.steps):5} {sum(model.steps) / len(model.steps):16.1f}")
    print(f"same output: {all(o == outputs[0] for o in outputs)}")


def preemption() -> None:
    """8 requests of 8 prompt and 24 new tokens: 64 blocks of 4 tokens hold them all, 24 do not."""
    rng = random.Random(1)
    jobs = [(random_ids(rng, 8), greedy(24)) for _ in range(8)]
    least = 8 * (8 + 24 - 1)  # the last new token is never computed: nothing attends to it
    print("blocks  preemptions  tokens computed  of these again")
    outputs = []
    for blocks in (64, 24):
        model, callers = serve(jobs, num_blocks=blocks)
        outputs.append(tokens_of(callers))
        total = sum(model.steps)
        print(f"{blocks:6} {preemptions(callers):12} {total:16} {total - least:15}")
    print(f"same output: {outputs[0] == outputs[1]}")


def prefix() -> None:
    """4 conversations of 5 turns that send everything again each turn; a shared system prompt."""
    print("prefix cache  prompt tokens sent  computed  found cached")
    for on in (False, True):
        rng, sent, found = random.Random(2), 0, 0
        engine = make_engine(num_blocks=400, block_size=16, max_num_batched_tokens=128, prefix=on)
        system = random_ids(rng, 64)
        chats = [list(system) for _ in range(4)]
        for _ in range(5):
            for chat in chats:
                chat += random_ids(rng, 20)
                caller = Caller(engine, chat, greedy(30))
                run(engine, caller)
                sent += len(chat)
                found += caller.builder.result.num_cached_tokens
                chat += caller.outputs[0].token_ids
        print(f"{'on' if on else 'off':12} {sent:19} {sent - found:9} {found / sent:13.0%}")


def seeds() -> None:
    """24 seeded requests alone, then together in a pool so small that some are preempted."""
    rng = random.Random(3)
    jobs = [(random_ids(rng, 6), sampled(20, seed=i)) for i in range(24)]
    own = sampler.uniform
    print("a draw depends on              preemptions  equal to the run alone")
    for name, shared in (("(seed, choice, position)", False), ("what was drawn before it", True)):

        def tokens(some: Jobs, shared: bool = shared, **options) -> tuple[list[list[int]], int]:
            stream = random.Random(0)
            sampler.uniform = (lambda *_: stream.random()) if shared else own
            try:
                _, callers = serve(some, **options)
            finally:
                sampler.uniform = own
            return tokens_of(callers), preemptions(callers)

        alone = [tokens([job])[0][0] for job in jobs]
        together, preempted = tokens(jobs, num_blocks=28)
        equal = sum(a == b for a, b in zip(alone, together, strict=True))
        print(f"{name:30} {preempted:11} {f'{equal} of {len(jobs)}':>23}")


def choices() -> None:
    """Eight answers of 16 tokens to one prompt of 200 tokens, with room for all in one step."""
    prompt = random_ids(random.Random(4), 200)
    eight = [(prompt, sampled(16, seed=i)) for i in range(8)]
    ways = {
        "one request with n = 8": ([(prompt, sampled(16, seed=0, n=8))], None),
        "8 requests at the same moment": (eight, None),
        "8 requests one after the other": (eight, 1),
    }
    print("                                tokens computed  steps")
    for name, (jobs, at_once) in ways.items():
        model, _ = serve(jobs, at_once, num_blocks=400, block_size=16, max_num_batched_tokens=2048)
        print(f"{name:31} {sum(model.steps):15} {len(model.steps):6}")


FIGURES = {f.__name__: f for f in (trace, batching, preemption, prefix, seeds, choices)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FIGURES)
    FIGURES[parser.parse_args(argv).name]()


if __name__ == "__main__":
    main()
