"""Tasks that need more than one place of the text: RULER's tracing, aggregation and questions.

Owns: variable tracking, common words, frequent words, templated facts: wording and parameters
(Hsieh et al., arXiv 2404.06654, appendix B; their questions come from data sets, ours from templates).
Must not know: tokenizers, lengths, models.
"""

from __future__ import annotations

import itertools
import random
import string
from functools import partial

from nano_oasis.eval import words as w
from nano_oasis.eval.tasks import Draft, Task, place

CHAINS, HOPS = 1, 4
COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
FREQUENT, ALPHA = 3, 2.0


def _chain(rng: random.Random, names: list[str]) -> tuple[str, list[str]]:
    """A value, and the assignments that hand it from name to name."""
    value = str(rng.randrange(10000, 100000))
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)]
    return value, [f"{s}." for s in steps]


def variable_tracking(rng: random.Random, context: int) -> Draft:
    """A chain of four assignments in noise; all five names that end up with the value are asked for."""
    letters = w.distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), CHAINS * (HOPS + 1) + 4)
    shown, names = letters[-4:], letters[: HOPS + 1]
    value, steps = _chain(rng, names)
    example_value, example_steps = _chain(rng, shown)
    depths = sorted(rng.random() for _ in steps)

    def ask(text: str, value: str) -> str:
        return (
            f"Follow the chain of variable assignments hidden in this text.\n\n{text}\n\n"
            f"Find all variables that are assigned the value {value} in the text above."
        )

    def lead(count: int, value: str) -> str:
        return f"{count} variables are assigned the value {value}, directly or through others:"

    example = ask(place(w.noise_words(0, 60), example_steps, [0.1, 0.4, 0.6, 0.9]), example_value)
    example += f" {lead(len(shown), example_value)} {', '.join(shown)}"

    def render(units: int) -> str:
        return f"{example}\n\n{ask(place(w.noise_words(0, units), steps, depths), value)}"

    return Draft(render, tuple(names), lead=lead(len(names), value), max_new=40)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def common_words(rng: random.Random, context: int) -> Draft:
    """A numbered list in which ten words come thirty times each and all others three times.

    The unit of filler is one of the other words. Where the context is too short for thirty (and three) times,
    RULER takes ten (and one), and so does this.
    """
    often, seldom = (COMMON_TIMES, OTHER_TIMES) if context >= 4000 else (10, 1)
    names = rng.sample(w.NOUNS, 60)
    common, shown = names[:COMMON], names[COMMON : 2 * COMMON]
    other = [x for x in w.NOUNS + w.ADJECTIVES if x not in names]
    other += w.made_up_words(rng, max(context // 8, 100))
    rng.shuffle(other)
    shuffle = rng.random()

    def ask(words: list[str]) -> str:
        return (
            "Below is a numbered list of words. Some of them come much more often than the others. Memorise "
            f"the ones that come most often.\n\n{_numbered(words)}\n\n"
            f"What are the {COMMON} words that come most often in the list?"
        )

    example_words = [x for x in shown for _ in range(3)] + names[2 * COMMON : 3 * COMMON]
    random.Random(shuffle).shuffle(example_words)
    example = f"{ask(example_words)} They are: {_numbered(shown)}"

    def render(units: int) -> str:
        words = [x for x in common for _ in range(often)] + [x for x in other[:units] for _ in range(seldom)]
        random.Random(shuffle).shuffle(words)
        return f"{example}\n\n{ask(words)}"

    return Draft(render, tuple(common), lead="They are:", max_new=120, most=len(other))


def frequent_words(rng: random.Random, context: int) -> Draft:
    """Made-up words whose frequency falls with their rank to the power -2; the three most frequent are asked
    for.

    The first one is the dots that RULER calls noise, and is not counted.
    """
    vocabulary = w.made_up_words(rng, max(context // 50, 20))
    shares = [rank**-ALPHA for rank in range(1, len(vocabulary) + 2)]
    seed = rng.random()

    def render(units: int) -> str:
        """About `units` words. Counts are rounded, not drawn, so that no two of the first can change
        places."""
        counts = [round(units * share / sum(shares)) for share in shares]
        rest = [max(min(n, counts[FREQUENT] - 1), 0) for n in counts[FREQUENT + 1 :]]
        counts = counts[: FREQUENT + 1] + rest
        words = [word for word, n in zip(["...", *vocabulary], counts, strict=True) for _ in range(n)]
        random.Random(seed).shuffle(words)
        return (
            'Read the coded text below and keep track of how often each coded word comes. The dots "..." are '
            f"noise and do not count.\n\n{' '.join(words)}\n\n"
            f"What are the {FREQUENT} coded words that come most often in the text?"
        )

    return Draft(
        render,
        tuple(vocabulary[:FREQUENT]),
        lead=f"The {FREQUENT} words that come most often are:",
        max_new=50,
    )


def questions(rng: random.Random, context: int, hops: int) -> Draft:
    """Facts about people, each sentence of the same form; one is asked for.

    hops 1: where somebody lives. hops 2: the hobby of whoever has a trade in a city, two sentences away.
    """
    people = [f"{a} {b}" for a in w.PEOPLE for b in w.FAMILIES]
    rng.shuffle(people)
    places = [(job, city) for job in w.JOBS for city in w.CITIES]
    rng.shuffle(places)  # a trade and a city belong to one person only
    count = min(len(people), len(places))
    hobbies = [rng.choice(w.HOBBIES) for _ in range(count)]

    def facts(i: int) -> list[str]:
        job, city = places[i]
        return [
            f"{people[i]} works as a {job} in {city}.",
            f"In the evenings {people[i]} likes {hobbies[i]} best.",
        ]

    depth, seed = rng.random(), rng.random()
    job, city = places[0]
    if hops == 1:
        question, answer = f"In which city does {people[0]} work?", city
        lead = f"{people[0]} works in"
    else:
        question, answer = f"What does the person who works as a {job} in {city} like best?", hobbies[0]
        lead = f"The person who works as a {job} in {city} likes"

    def render(units: int) -> str:
        lines = [line for i in range(1, units + 1) for line in facts(i)]
        random.Random(seed).shuffle(lines)
        for fact, at in zip(facts(0), (depth, 1 - depth), strict=True):
            lines.insert(round(at * len(lines)), fact)
        return (
            "Answer the question from the facts below. Give the answer only.\n\n"
            f"{' '.join(lines)}\n\nQuestion: {question}"
        )

    return Draft(render, (answer,), lead=lead, match="part", max_new=32, most=count - 1)


TASKS = [
    Task("vt", "all names along a chain of assignments, in noise", variable_tracking),
    Task("cwe", "the ten words that come most often in a list", common_words),
    Task("fwe", "the three most frequent of made-up words", frequent_words),
    Task("qa_1", "one fact about one of many people", partial(questions, hops=1)),
    Task("qa_2", "two facts that must be joined", partial(questions, hops=2)),
]
