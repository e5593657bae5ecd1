"""What a task is, and how a prompt is given its exact length.

Owns: Draft, Sample and Task, the table of tasks, fitting a prompt to a context.
Must not know: what the tasks ask (tasks_*.py), models, how an answer is produced.

A task draws a Draft from a seeded generator: everything but the filler. The filler then grows until the
prompt, its chat template, and the room for the answer fill the context: the longest that fits, to the unit of
filler.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nano_oasis.tokenizer import TemplateError, Tokenizer


class TaskError(ValueError):
    """A task that cannot be made as asked. Says what was given, what is allowed and what to do."""


@dataclass(frozen=True)
class Draft:
    """A prompt but for its filler. render(n) is the user's message with n units of filler."""

    render: Callable[[int], str]
    answers: tuple[str, ...]
    lead: str = ""  # the answer's first words, put into the model's mouth
    match: str = "all"  # see score.py
    max_new: int = 64  # room for the answer, in tokens
    most: int = 1 << 20  # units of filler there are


@dataclass(frozen=True)
class Sample:
    """One prompt, ready to run. Position 0 is ids[0]; `max_new` tokens may follow it."""

    group: str  # the task, or the name of the data
    index: int
    context: int  # what was asked for; len(ids) + max_new is at most this (for data: exactly the prompt's)
    ids: tuple[int, ...]
    max_new: int
    answers: tuple[str, ...] = ()
    match: str = "all"
    teacher: tuple[int, ...] = ()  # a text's own continuation; empty: what the dense model says

    @property
    def name(self) -> str:
        return f"{self.group}/{self.context}/{self.index}"


@dataclass(frozen=True)
class Task:
    """draft(generator, context): context is the length aimed at, for tasks whose content grows with it."""

    name: str
    about: str
    draft: Callable[[random.Random, int], Draft]


def make_sample(
    task: Task, tokenizer: Tokenizer, context: int, index: int, seed: int, max_new: int | None = None
) -> Sample:
    """Sample `index` of a task at `context` tokens. The same arguments give the same sample, on any machine.

    max_new: instead of the task's own room for the answer. Raises TaskError when the context is too short.
    """
    draft = task.draft(random.Random(f"{task.name} {context} {index} {seed}"), context)
    room = draft.max_new if max_new is None else max_new

    def encode(units: int) -> list[int]:
        return encode_prompt(tokenizer, draft.render(units), draft.lead)

    limit = context - room
    least = len(encode(0))
    if least > limit:
        raise TaskError(
            f"context: {context} tokens are too few for {task.name}: its shortest prompt has {least}, and "
            f"{room} are kept for the answer; give at least {least + room}"
        )
    low, high = 0, 64
    while high < draft.most and len(encode(high)) <= limit:
        low, high = high, 2 * high
    high = min(high, draft.most + 1)
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if len(encode(middle)) <= limit else (low, middle)
    return Sample(task.name, index, context, tuple(encode(low)), room, draft.answers, draft.match)


def encode_prompt(tokenizer: Tokenizer, text: str, lead: str = "") -> list[int]:
    """One user message through the chat template, then the first words of the reply.

    A model without a chat template gets the text as it is.
    """
    try:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    except TemplateError:
        if tokenizer.chat_template is not None:
            raise
        return tokenizer.encode(f"{text}\n{lead}", parse_special=False)
    return ids + tokenizer.encode(lead, add_special_tokens=False, parse_special=False) if lead else ids


def place(words: list[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """The words as one text, with each needle put in at its depth (0 to 1), at the end of a sentence if one
    is near. Needles at the same place keep their order."""
    cuts = []
    for depth in depths:
        at = round(depth * len(words))
        near = [i for i in range(max(at - 12, 0), min(at + 12, len(words))) if words[i - 1].endswith(".")]
        cuts.append(min(near, key=lambda i: abs(i - at)) if near else at)
    parts: list[str] = []
    start = 0
    for cut, needle in sorted(zip(cuts, needles, strict=True), key=lambda p: p[0]):
        parts += [*words[start:cut], needle]
        start = max(start, cut)
    return " ".join(parts + words[start:])


def fingerprint(*parts: object) -> str:
    """16 hex digits that change with any of the parts (by their repr)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def all_tasks() -> dict[str, Task]:
    """By name, in the order of the tables."""
    from nano_oasis.eval import tasks_aggregate, tasks_long, tasks_needle

    return {t.name: t for module in (tasks_needle, tasks_aggregate, tasks_long) for t in module.TASKS}


GROUPS = {  # names that stand for several tasks
    "niah": lambda name: name.startswith("niah_"),
    "ruler": lambda name: name.startswith(("niah_", "qa_")) or name in ("vt", "cwe", "fwe"),
    "all": lambda name: True,
}


def choose_tasks(names: Sequence[str]) -> list[Task]:
    """Task and group names -> tasks, each once. Raises TaskError naming the one that is not known."""
    known = all_tasks()
    chosen: dict[str, Task] = {}
    for name in names:
        if name in GROUPS:
            chosen |= {n: t for n, t in known.items() if GROUPS[name](n)}
        elif name in known:
            chosen[name] = known[name]
        else:
            raise TaskError(
                f"tasks: no task {name!r}; the tasks are {', '.join(known)}, and the groups "
                f"{', '.join(GROUPS)}"
            )
    return list(chosen.values())
