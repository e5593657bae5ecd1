"""Needles in a haystack: RULER's eight, and passkey.

Owns: their wording and parameters (Hsieh et al., arXiv 2404.06654, appendix B).
Must not know: tokenizers, lengths, models.

| task | haystack | keys | values | needles | asked for |
|---|---|---|---|---|---|
| niah_single_1, 2, 3 | noise, essay, essay | words | numbers, numbers, uuids | 1 | 1 |
| niah_multikey_1, 2, 3 | essay, needles, needles | words, words, uuids | numbers, numbers, uuids | 4, all,
all | 1 | | niah_multivalue | essay | words | numbers | 4 of one key | 4 | | niah_multiquery | essay | words |
numbers | 4 | 4 |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from nano_oasis.eval import words as w
from nano_oasis.eval.tasks import Draft, Task, place

_MAKE = {"words": w.make_keys, "numbers": w.make_numbers, "uuids": w.make_uuids}
_KIND = {"numbers": "number", "uuids": "uuid", "words": "word"}


def niah(
    rng: random.Random, context: int, haystack: str, keys: str = "words", values: str = "numbers",
    needles: int = 1, per_key: int = 1, asked: int = 1,
) -> Draft:  # fmt: skip
    """`needles` keys with `per_key` values each, of which the first `asked` keys are asked for."""
    kind = _KIND[values]
    # A haystack of needles has as many as the context may need: the keys must differ from each other.
    spare = context // 12 if haystack == "needles" else 0
    names = _MAKE[keys](rng, needles + spare)
    found = _MAKE[values](rng, needles * per_key + spare)
    pairs = [(names[i // per_key], found[i]) for i in range(needles * per_key)]
    lines = [f"One of the special magic {kind}s for {key} is: {value}." for key, value in pairs]
    order = rng.sample(range(len(lines)), len(lines))
    depths = [rng.random() for _ in lines]
    start = rng.randrange(len(w.essay()))
    others = list(zip(names[needles:], found[needles * per_key :], strict=True))

    def hay(units: int) -> list[str]:
        if haystack == "noise":
            return w.noise_words(0, units)
        if haystack == "essay":
            return w.essay_words(start, units)
        return [f"One of the special magic {kind}s for {k} is: {v}." for k, v in others[:units]]

    wanted = names[:asked]
    what = ", ".join(wanted[:-1]) + f", and {wanted[-1]}" if asked > 1 else wanted[0]
    several = asked * per_key > 1
    noun = f"special magic {kind}{'s' if several else ''}"
    verb = "are" if several else "is"

    def render(units: int) -> str:
        text = place(hay(units), [lines[i] for i in order], depths)
        return (
            f"Some special magic {kind}s are hidden in the text below. Remember them: you will be asked "
            f"about them afterwards.\n\n{text}\n\n"
            f"What {verb} {'all ' if several else ''}the {noun} for {what} mentioned in the text?"
        )

    return Draft(
        render, tuple(v for k, v in pairs if k in wanted),
        lead=f"The {noun} for {what} mentioned in the text {verb}",
        max_new=128, most=len(others) if haystack == "needles" else 1 << 20,
    )  # fmt: skip


def passkey(rng: random.Random, context: int) -> Draft:
    """Five digits in noise (Mohtashami and Jaggi, arXiv 2305.16300)."""
    number, depth = w.make_numbers(rng, 1, 5)[0], rng.random()
    needle = f"The pass key is {number}. Remember it. {number} is the pass key."

    def render(units: int) -> str:
        text = place(w.noise_words(0, units), [needle], [depth])
        return (
            "Important information is hidden in a lot of irrelevant text. Find it and memorise it.\n\n"
            f"{text}\n\nWhich number is the pass key mentioned in the text?"
        )

    return Draft(render, (number,), lead="The pass key mentioned in the text is the number", max_new=16)


def _task(name: str, about: str, draft: Callable[..., Draft], **parameters: object) -> Task:
    return Task(name, about, partial(draft, **parameters))


TASKS = [
    _task("niah_single_1", "one number in noise", niah, haystack="noise"),
    _task("niah_single_2", "one number in prose", niah, haystack="essay"),
    _task("niah_single_3", "one uuid in prose", niah, haystack="essay", values="uuids"),
    _task("niah_multikey_1", "one of four numbers in prose", niah, haystack="essay", needles=4),
    _task("niah_multikey_2", "one number among nothing but numbers", niah, haystack="needles"),
    _task(
        "niah_multikey_3", "one uuid among nothing but uuids", niah, haystack="needles", keys="uuids",
        values="uuids",
    ),
    _task("niah_multivalue", "four numbers of one key, in prose", niah, haystack="essay", per_key=4),
    _task(
        "niah_multiquery", "four numbers of four keys, in prose", niah, haystack="essay", needles=4, asked=4
    ),
    _task("passkey", "five digits in noise", passkey),
]  # fmt: skip
