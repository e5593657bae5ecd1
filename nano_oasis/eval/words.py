"""Words and texts that tasks are made of; all of it ships with Python or is written here.

Owns: word lists, made-up words, keys and values, and the three kinds of haystack text.
Must not know: tasks, tokenizers, how long a prompt has to be.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
import random
import uuid
from collections.abc import Callable

# The noise of the passkey task (Mohtashami and Jaggi, arXiv 2305.16300), which RULER repeats too.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _list(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _list("""
    amber ancient brave bright broad calm careful cheerful clever cold cosy crisp curious daring deep
    eager early elegant faint fancy fierce fluent fond frosty gentle giant glad golden grand happy hasty
    hidden honest humble icy jolly keen kind large late lively lone loud lucky merry mighty misty modest
    narrow neat noble odd pale patient plain polite proud quick quiet rapid rare restless rich rough round
    rusty salty sandy sharp shiny shy silent silver simple sleepy slow small smooth snowy soft solid spare
    steady steep stern strong sturdy sunny sweet swift tall tame tender tidy tiny tough vast vivid warm
    wary weary wide wild windy wise witty young
""")
NOUNS = _list("""
    acorn anchor apple arrow badge barrel basket beacon bell bench bird blanket boat bottle bridge brook
    bucket button cabin candle canyon carpet castle chair chimney circle clock cloud coin comet compass
    copper cradle crane crown curtain desk dolphin door dragon drum eagle engine falcon feather fence
    fiddle field flame flute forest fountain fox garden gate glacier glove guitar hammer harbor harp hat
    hill horse island jacket jar kettle key kite ladder lake lamp lantern leaf lemon letter lion lizard
    magnet maple marble market meadow mirror monkey moon mountain needle nest oak ocean orchard otter owl
    paddle palace panda paper parrot pebble pencil penguin piano pillow pine planet plum pocket pond
    puzzle quilt rabbit raven ribbon river robin rocket saddle sailor scarf shell shovel signal spoon
    stone stork table tiger torch tower train tulip turtle valley violin wagon walnut whale wheel window
    wolf yarn
""")
PEOPLE = _list("""
    Ada Bruno Carla Dario Elena Felix Greta Hugo Irma Jonas Klara Lars Mara Nils Olga Pavel Quinn Rosa
    Stefan Thea Ulrich Vera Walter Xenia Yara Zeno Agnes Boris Celia Dmitri Edith Frida Gustav Hanna Ivan
    Judith
""")
FAMILIES = _list("""
    Abel Berger Conti Dahl Egger Ferrari Graf Hansen Iversen Jensen Keller Lang Moretti Novak Olsen Peters
    Quist Rossi Schmid Tanner Urban Vogel Weber Young Zimmer
""")
CITIES = _list("""
    Lisbon Oslo Cairo Lima Quito Vienna Prague Dublin Athens Kyoto Nairobi Havana Bogota Tunis Riga Sofia
    Manila Seoul Warsaw Delhi Bern Turin Ghent Porto Leeds Malmo Graz Split Kiel Dakar Accra Osaka
""")
JOBS = _list("""
    baker carpenter dentist engineer farmer gardener historian jeweller lawyer mechanic nurse optician
    painter pilot potter sailor surgeon tailor teacher translator
""")
HOBBIES = _list("""
    chess archery astronomy birdwatching calligraphy climbing cycling drawing fencing fishing juggling
    knitting origami photography rowing sailing skating surfing weaving yoga
""")
COLOURS = _list("""
    red green blue yellow white black orange purple brown grey pink
""")
ROOMS = _list("""
    kitchen hall attic cellar library studio garage porch nursery pantry office workshop
""")


@functools.cache
def essay() -> tuple[str, ...]:
    """Words of real prose: the language reference that comes with Python, in a fixed order."""
    topics = pydoc_data.topics.topics
    words = " ".join(topics[key] for key in sorted(topics)).split()
    return tuple(word for word in words if any(c.isalnum() for c in word))  # without the rules of tables


def essay_words(start: int, count: int) -> list[str]:
    """`count` words of the essay from word `start` on; it begins again where it ends."""
    words = essay()
    return [words[(start + i) % len(words)] for i in range(count)]


def noise_words(start: int, count: int) -> list[str]:
    words = NOISE.split()
    return [words[(start + i) % len(words)] for i in range(count)]


def make_keys(rng: random.Random, count: int) -> list[str]:
    """Different two-word keys, such as "rusty-otter"."""
    return distinct(lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", count)


def make_numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    return distinct(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)), count)


def make_uuids(rng: random.Random, count: int) -> list[str]:
    return distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)), count)


def made_up_words(rng: random.Random, count: int) -> list[str]:
    """Words of three or four syllables that no text contains."""

    def word() -> str:
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randrange(3, 5)))

    return distinct(word, count)


def distinct(make: Callable[[], str], count: int) -> list[str]:
    """The first `count` different values that make() gives."""
    found: dict[str, None] = {}
    for _ in range(1000 * count + 1000):
        if len(found) == count:
            return list(found)
        found.setdefault(make())
    raise ValueError(f"there are not {count} different values")
