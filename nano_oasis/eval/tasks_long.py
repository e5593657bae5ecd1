"""Tasks whose answer is long: where sparse attention's losses hide.

Owns: record extraction and state updates. Must not know: tokenizers, lengths, models.
"""

from __future__ import annotations

import random

from nano_oasis.eval import words as w
from nano_oasis.eval.tasks import Draft, Task

RECORDS, UPDATES = 24, 24


def records(rng: random.Random, context: int) -> Draft:
    """A list of orders with a note each; every order's number and amount must be written out.

    Up to 24 records, fewer where the context is short; the notes are filled with prose to the length.
    """
    count = max(3, min(RECORDS, context // 120))
    numbers = [str(n) for n in rng.sample(range(1000, 10000), count)]
    amounts = w.make_numbers(rng, count, 5)
    people = [f"{rng.choice(w.PEOPLE)} {rng.choice(w.FAMILIES)}" for _ in range(count)]
    cities = [rng.choice(w.CITIES) for _ in range(count)]
    start = rng.randrange(len(w.essay()))

    def render(units: int) -> str:
        lines = []
        for i in range(count):
            a, b = units * i // count, units * (i + 1) // count
            note = " ".join(w.essay_words(start + a, b - a))
            lines.append(
                f"Order {numbers[i]}: {people[i]} from {cities[i]}, amount {amounts[i]}. "
                f"Note: {note or 'none'}"
            )
        body = "\n".join(lines)
        return (
            f"Below are {count} orders.\n\n{body}\n\nList every order of the text, in the same order, one "
            f'line each, in the form "Order number: amount", such as "Order 123: 4567".'
        )

    # Amounts alone: no two are equal, and a reply that copies whole records has found them too.
    return Draft(render, tuple(amounts), lead="Order", max_new=16 * count)


def updates(rng: random.Random, context: int) -> Draft:
    """A log paints rooms again and again; the answer follows it, then gives the state at the end.

    Scored on the last colours only: what the answer wrote on the way helps it, or misleads it.
    """
    count = max(4, min(UPDATES, context // 80))
    rooms = rng.sample(w.ROOMS, max(2, min(6, count // 2)))
    log = [(rooms[i], rng.choice(w.COLOURS)) for i in range(len(rooms))]
    log += [(rng.choice(rooms), rng.choice(w.COLOURS)) for _ in range(count - len(rooms))]
    final = dict(log)
    start = rng.randrange(len(w.essay()))

    def render(units: int) -> str:
        lines = []
        for i, (room, colour) in enumerate(log):
            a, b = units * i // count, units * (i + 1) // count
            note = " ".join(w.essay_words(start + a, b - a))
            lines.append(f"Step {i + 1}: the {room} is painted {colour}. {note}".rstrip())
        body = "\n".join(lines)
        return (
            f"Below is a log of {count} steps. Each step paints one room; a later colour covers an earlier "
            f"one.\n\n{body}\n\n"
            'Write down every step as "Step number: room colour". Then write, one line for each room, '
            '"Final: the room is colour".'
        )

    answers = tuple(f"final: the {room} is {colour}" for room, colour in final.items())
    return Draft(render, answers, lead="Step 1:", max_new=10 * count + 12 * len(rooms))


TASKS = [
    Task("records", "number and amount of every record of a list", records),
    Task("state", "follow a log of updates, then give the final state", updates),
]
