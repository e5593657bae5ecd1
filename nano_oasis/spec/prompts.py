"""What the target is made to write, so that a draft head can learn from it: prompts without end, by number.

Owns: reading texts, the split into documents for training and for holding out, and the wording of prompts.
Must not know: models, how prompts are run, what is learned.

A prompt is a function of (seed, its number) alone, so a run that was killed goes on with the same ones. What
is held out is whole documents: files, or lines of topics.txt; no prompt of training shows any part of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from nano_oasis.config import ConfigError
from nano_oasis.tokenizer import Tokenizer

HELD_EVERY = 20  # one document, and one prompt, of so many is held out
CHAT_TOPIC, CHAT_TEXT = 0.6, 0.27  # shares of prompts; the rest continues a text without any template
TEMPERATURE = 0.7  # of half of the prompts in training; the other half, and all that is held out, is greedy
WINDOW = (60, 280)  # tokens of a text in a prompt
_MAX_FILE = 4 << 20  # bytes read of one file
_PIECE = 6000  # characters: a single file is cut into pieces, which then are the documents

_ABOUT = (
    "Explain {} in simple words.", "Tell me about {}.", "Write a short story about {}.",
    "Give me five tips about {}.", "Write a paragraph about {}.", "What should I know about {}?",
    "List some interesting facts about {}.",
    "Explain {} to a child.", "Write an e-mail to a friend about {}.", "Write a short essay about {}.",
    "What are the most important things about {}?", "Ask me three questions about {} and answer them.",
    "Write a poem about {}.", "Give an example that has to do with {}.", "Why does {} matter?",
    "Write the beginning of a blog post about {}.", "What do people often get wrong about {}?",
)  # fmt: skip
_WITH_TEXT = (
    "Summarise the following text:", "Summarise this in two sentences:", "Explain this:",
    "Continue this text:", "Rewrite this in simpler words:", "Rewrite this so that it is shorter:",
    "Fix the mistakes in this text:",
    "List the main points of this text:", "What is this about?", "Answer three questions about this text:",
    "Repeat this text and then explain it:", "Give this text a title and say why:", "Write more like this:",
    "Turn this into a list:", "What would a beginner find difficult here?", "Complete this:",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    topic: bool = False  # a line of topics.txt


@dataclass(frozen=True)
class Prompt:
    """`ids` are the prompt's tokens; `held` says that its document is held out."""

    number: int
    ids: tuple[int, ...]
    temperature: float
    held: bool
    kind: str  # topic, text (a request about one), or raw (a text to continue)


def topics() -> list[Document]:
    """Everyday questions and subjects that come with the package."""
    lines = (Path(__file__).parent / "topics.txt").read_text().splitlines()
    return [Document(line, line, topic=True) for line in lines if line.strip()]


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """Files, and all the UTF-8 files of folders, in the order of their names. Raises ConfigError."""
    found: list[Document] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"data: {path}: no such file or folder")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        texts = [(str(f.relative_to(path)) if path.is_dir() else f.name, _text(f)) for f in files]
        if not path.is_dir() and texts[0][1] is None:
            raise ConfigError(f"data: {path}: is not UTF-8 text")
        documents = [Document(name, text) for name, text in texts if text and text.strip()]
        if not documents:
            raise ConfigError(f"data: {path}: holds no text")
        found += documents
    if len(found) == 1:
        text = found[0].text
        found = [
            Document(f"{found[0].name}[{at}]", text[at : at + _PIECE]) for at in range(0, len(text), _PIECE)
        ]
        found = [d for d in found if d.text.strip()]
    if len(found) < 2:
        raise ConfigError("data: one short text is not enough: another is needed to be held out")
    return found


def _text(path: Path) -> str | None:
    """None if it is not text. Of a file that is cut short, the last character may be incomplete."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE)
    except OSError as error:
        raise ConfigError(f"data: {path}: {error.strerror}") from error
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8", "ignore" if len(raw) == _MAX_FILE else "strict")
    except UnicodeDecodeError:
        return None


def digest(documents: Sequence[Document]) -> str:
    """Changes when a document does."""
    state = hashlib.blake2b(digest_size=12)
    for document in documents:
        state.update(f"{document.name}\0{document.text}\0".encode())
    return state.hexdigest()


class PromptMaker:
    """Prompts by number. Without a chat template every prompt is raw text."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.chat = tokenizer.chat_template is not None
        self._texts = _split([d for d in documents if not d.topic])
        self._topics = _split(topics()) if self.chat else ([], [])

    def __call__(self, number: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{number}")
        held = number % HELD_EVERY == HELD_EVERY - 1
        place = rng.random()
        if self.chat and place < CHAT_TOPIC:
            kind = "topic"
            topic = rng.choice(self._topics[held]).text
            # A line that is a sentence is asked as it stands.
            asked = topic if topic[-1] in '.?!"' else rng.choice(_ABOUT).format(topic)
            ids = self.tokenizer.encode_chat([{"role": "user", "content": asked}])
        else:
            texts = self._texts[held]
            (document,) = rng.choices(texts, cum_weights=list(accumulate(len(d.text) ** 0.5 for d in texts)))
            text = self._window(document.text, rng)
            kind = "text" if self.chat and place < CHAT_TOPIC + CHAT_TEXT else "raw"
            if kind == "text":
                asked = f"{rng.choice(_WITH_TEXT)}\n\n{text}"
                ids = self.tokenizer.encode_chat([{"role": "user", "content": asked}])
            else:
                ids = self.tokenizer.encode(text, parse_special=False) or self.tokenizer.encode(" ")
        temperature = 0.0 if held or rng.random() < 0.5 else TEMPERATURE
        return Prompt(number, tuple(ids), temperature, held, kind)

    def _window(self, text: str, rng: random.Random) -> str:
        """A stretch from the start of a line on (where there is one), WINDOW tokens long if it can be."""
        start = rng.randrange(max(len(text) - 400, 1))
        line = text.find("\n", start, start + 400)
        start = line + 1 if line >= 0 else start
        wanted = rng.randint(*WINDOW)
        ids = self.tokenizer.encode(
            text[start : start + 8 * wanted], add_special_tokens=False, parse_special=False
        )[:wanted]
        return self.tokenizer.decode(ids).strip("\ufffd").strip() or text.strip()[:200]


def _split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(for training, held out): chosen by the hash of the name, at least one of each."""
    ordered = sorted(documents, key=lambda d: hashlib.blake2b(d.name.encode(), digest_size=8).digest())
    held = max(len(ordered) // HELD_EVERY, 1)
    return ordered[held:], ordered[:held]
