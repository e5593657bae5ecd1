"""One number hidden in a long text: how often, and how surely, each way of sparse decoding finds it.

Owns: the prompts, the ways compared, the results file and the table. Must not know: how sparse attention
is done (sparse_decode.py).
Run by hand: python benchmarks/needle.py [--table selectors heads budget] [--seeds 0 1] [--results FILE]

Every way decodes the same prompts after the same dense prefill. Results are JSON lines, one for a prompt
and a way; a run that is started again computes only what is not there.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from sparse_decode import RULES, Decoder, Sparse, real_texts

CITIES = ["Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Vienna", "Prague", "Dublin", "Athens", "Kyoto"]
CITIES += ["Nairobi", "Havana", "Bogota", "Tunis", "Riga", "Sofia", "Manila", "Seoul", "Warsaw", "Delhi"]
HEAD = "Here is a long text.\n\n"
NEEDLE = "\n\nOne of the magic numbers for {city} is: {number}.\n\n"
QUESTION = "\n\nWhat is the magic number for {city} mentioned in the text?"
ANSWER = "The magic number for {city} mentioned in the text is"
STEPS = 8  # tokens: a space, five digits, and two to spare
ENGINE = Sparse("fourbit", early=1)  # the rule of the engine, the unsealed tail apart


@dataclass(frozen=True)
class Prompt:
    name: str  # seed-index
    ids: list[int]
    number: str
    answer: list[int]  # the number's tokens, with the space before


def tables() -> dict[str, list[Sparse]]:
    """What can be compared, by name; dense is always measured."""
    names = ("exact", "fourbit", "twobit", "mean", "minmax")
    both = [replace(ENGINE, selector=s) for s in ("fourbit", "exact")]
    heads = [replace(w, rule=rule, free=free) for w in both for rule in RULES for free in (False, True)]
    return {
        "selectors": [
            *(replace(ENGINE, selector=s, per_head=h) for s in names for h in (False, True)),
            *(replace(ENGINE, predictor="previous", per_head=h) for h in (False, True)),
        ],
        "heads": heads,
        "budget": [
            replace(w, **change)
            for w in both
            for change in (
                *({"recent": r} for r in (0, 16, 32, 48, 64)),
                *({"early": e} for e in (0, 2, 4)),
                {"per_head": True}, {"per_head": True, "recent": 32}, {"early": 4, "recent": 32},
            )
        ],
    }  # fmt: skip


def prompts(decoder: Decoder, length: int, seed: int, count: int) -> Iterator[Prompt]:
    """`count` chats of exactly `length` tokens that hide one number at rising depths.

    The depth rises, so that a prompt shares everything before the earlier needle with its predecessor.
    Each seed has its own stretch of text, numbers, and pairs of city and depth.
    """
    encode = decoder.tokenizer.encode
    hay = encode(real_texts()["prose"][12 * length * seed : 12 * length * (seed + 1)])
    if len(hay) < length:
        raise SystemExit(f"seed {seed}: there is not enough text for a haystack of {length} tokens")
    rng = random.Random(seed)
    for i in range(count):
        city, number = CITIES[(i + 7 * seed) % len(CITIES)], str(rng.randrange(10000, 99999))
        chat = decoder.tokenizer.render_chat([{"role": "user", "content": "@@"}]).split("@@")
        head = encode(chat[0] + HEAD)
        needle = encode(NEEDLE.format(city=city, number=number))
        question = encode(QUESTION.format(city=city) + chat[1] + ANSWER.format(city=city))
        room = length - len(head) - len(needle) - len(question)
        depth = int(room * (i + 0.5) / count)
        ids = head + hay[:depth] + needle + hay[depth:room] + question
        yield Prompt(f"{seed}-{i}", ids, number, encode(" " + number))


def key(way: Sparse | None) -> str:
    return json.dumps(asdict(way) if way else "dense", sort_keys=True)


def measure(decoder: Decoder, prompt: Prompt, ways: list[Sparse | None], shared: int) -> Iterator[dict]:
    """A row per way, after a dense prefill of all but the last prompt token (the first `shared` are there).

    The last prompt token is already decoded sparsely, so that no digit comes from the dense prefill.
    nll: of the five digits, teacher-forced, in nats. kl, first_kl: KL(dense || way) in nats, mean over the
    answer's tokens, and of the first, by which the model chooses the form of its answer; lead: how much more
    likely the space is there than the likeliest other token, nats. found: the number is in the greedy answer;
    where every teacher-forced token is the likeliest, greedy decoding says the same and is not done again.
    """
    last = len(prompt.ids) - 1
    view, target = decoder.view, torch.tensor(prompt.answer)
    view.forget()
    decoder.prefill(torch.tensor(prompt.ids), shared, last)
    saved = decoder.snapshot(last, last + STEPS)
    answer = torch.tensor([prompt.ids[last], *prompt.answer[:-1]])
    view.sparse = None
    dense = decoder.forward(answer, last)
    for way in ways:
        # The sketches cover what is sealed; the newest blocks are attended to anyway.
        view.sparse, view.prefix = way, last
        logs = decoder.forward(answer, last)
        kl = (dense.exp() * (dense - logs)).sum(-1)
        found = bool((logs.argmax(-1) == target).all())
        nll = -float(logs.gather(1, target[:, None])[1:].sum())
        decoder.restore(saved)
        if not found:
            found = prompt.number in decoder.tokenizer.decode(greedy(decoder, prompt.ids[last], last))
            decoder.restore(saved)
        first = logs[0].clone()
        first[target[0]] = -torch.inf
        numbers = {"nll": nll, "kl": kl.mean(), "first_kl": kl[0], "lead": logs[0, target[0]] - first.max()}
        row: dict = {"prompt": prompt.name, "way": key(way), "found": found}
        yield row | {name: round(float(x), 5) for name, x in numbers.items()}


def greedy(decoder: Decoder, token: int, position: int) -> list[int]:
    out = []
    for i in range(STEPS):
        token = int(decoder.forward(torch.tensor([token]), position + i)[-1].argmax())
        out.append(token)
    return out


def run(decoder: Decoder, args: argparse.Namespace, ways: list[Sparse | None]) -> dict[tuple[str, str], dict]:
    """Every prompt with every way, from the results file where it has them -> rows by (prompt, way)."""
    rows: dict[tuple[str, str], dict] = {}
    if args.results.exists():
        for line in args.results.read_text().splitlines():
            row = json.loads(line)
            rows[row["prompt"], row["way"]] = row
    setting = f"{args.tokens} {args.model} "
    for seed in args.seeds:
        before: list[int] = []  # of the last prompt that was prefilled
        for prompt in prompts(decoder, args.tokens, seed, args.count):
            name = setting + prompt.name
            missing = [w for w in ways if (name, key(w)) not in rows]
            if not missing:
                continue
            same = next((i for i, (a, b) in enumerate(zip(prompt.ids, before, strict=False)) if a != b), 0)
            before = prompt.ids
            with args.results.open("a") as file:
                for row in measure(decoder, prompt, missing, same):
                    row["prompt"] = name
                    rows[name, row["way"]] = row
                    file.write(json.dumps(row) + "\n")
            print(f"  {prompt.name}", flush=True)
    names = [f"{setting}{seed}-{i}" for seed in args.seeds for i in range(args.count)]
    return {(n, key(w)): rows[n, key(w)] for n in names for w in ways}


def print_table(rows: dict[tuple[str, str], dict], ways: list[Sparse | None], seeds: list[int]) -> None:
    """Found per seed and in all; mean nll, and how much more than dense's, with the standard error."""
    names = sorted({name for name, _ in rows})
    dense = torch.tensor([rows[n, key(None)]["nll"] for n in names])
    print(f"\n{'way':44} {'found per seed':>20}  of {len(names)}   nll   more than dense's")
    for way in ways:
        nll = torch.tensor([rows[n, key(way)]["nll"] for n in names])
        more = nll - dense
        per_seed = [
            sum(r["found"] for (n, k), r in rows.items() if k == key(way) and f" {s}-" in n) for s in seeds
        ]
        line = (
            f"{way or 'dense'!s:44} {' '.join(map(str, per_seed)):>20}  {sum(per_seed):4}   {nll.mean():.3f}"
        )
        print(line + f"   {more.mean():+.3f} +- {more.std() / len(names) ** 0.5:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", nargs="*", default=["selectors"], choices=list(tables()))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--count", type=int, default=20, help="prompts per seed")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--results", type=Path, default=Path("needle.jsonl"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    chosen = [replace(w, budget=args.budget) for name in args.table for w in tables()[name]]
    ways: list[Sparse | None] = [None, *dict.fromkeys(chosen)]
    decoder = Decoder(args.model, args.tokens + 32)
    print_table(run(decoder, args, ways), ways, args.seeds)


if __name__ == "__main__":
    main()
