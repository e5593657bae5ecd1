"""Anyone's own data: text files, folders of them, and JSONL with prompts.

Owns: reading and checking the files, and cutting texts into samples.
Must not know: models, settings, how a sample is run.

A text's sample is `context` tokens of it, and the next ones are what the model is made to follow. A JSONL
line is an object with "prompt" (text) or "messages" (a chat), and optionally "answer" (text or a list of
texts, which all must occur in the reply).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_oasis.eval.tasks import Sample, encode_prompt
from nano_oasis.request import RequestError
from nano_oasis.tokenizer import TemplateError, Tokenizer
from nano_oasis.tokenizer.messages import normalise_messages

_FIELDS = ("prompt", "messages", "answer")


class DataError(ValueError):
    """Data that cannot be used. Names the file, the line, what is wrong and what is allowed."""


@dataclass(frozen=True)
class Prompt:
    """One line of a JSONL file."""

    where: str  # file:line
    prompt: str | None
    messages: list[dict[str, Any]] | None
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Data:
    """One --data: a text, or prompts."""

    name: str
    text: str = ""
    prompts: list[Prompt] = field(default_factory=list)


def read_data(path: str | Path) -> Data:
    """A .jsonl file, any other file of text, or a folder: all its UTF-8 files one after another.

    Raises DataError.
    """
    path = Path(path)
    if path.is_dir():
        return Data(path.resolve().name, text=_folder(path))
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"data: {path}: {error.strerror}") from error
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"data: {path}:{line}: is not UTF-8 text") from error
    if not text.strip():
        raise DataError(f"data: {path}: the file is empty")
    if path.suffix == ".jsonl":
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        return Data(path.stem, prompts=[_prompt(line, f"{path}:{i}") for i, line in lines])
    return Data(path.name, text=text)


def _folder(folder: Path) -> str:
    parts = []
    for path in sorted(folder.rglob("*")):
        if any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts):
            continue
        if path.is_file():
            raw = path.read_bytes()
            try:
                text = "" if b"\0" in raw else raw.decode()
            except UnicodeDecodeError:
                continue
            if text.strip():
                parts.append(f"### {path.relative_to(folder)}\n{text}")
    if not parts:
        raise DataError(f"data: {folder}: the folder holds no text files")
    return "\n\n".join(parts)


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"data: {where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"data: {where}: must be an object with prompt or messages, got {line[:60]!r}")
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise DataError(f"data: {where}: unknown field {unknown[0]!r}; the fields are {', '.join(_FIELDS)}")
    prompt, messages = value.get("prompt"), value.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError(f"data: {where}: needs exactly one of prompt and messages")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise DataError(f"data: {where}: prompt must be a non-empty text, got {prompt!r:.60}")
    if messages is not None:
        try:
            messages = normalise_messages(messages)
        except RequestError as error:
            raise DataError(f"data: {where}: {error}") from error
    answer = value.get("answer")
    answers = [] if answer is None else [answer] if isinstance(answer, str) else answer
    empty = answer is not None and not answers
    if empty or not isinstance(answers, list) or not all(isinstance(a, str) and a for a in answers):
        raise DataError(f"data: {where}: answer must be a text or a list of texts, got {answer!r:.60}")
    return Prompt(where, prompt, messages, tuple(answers))


def data_samples(
    data: Data,
    tokenizer: Tokenizer,
    contexts: Sequence[int],
    count: int,
    steps: int,
    max_new: int,
    max_len: int,
) -> list[Sample]:
    """At most `count` samples per context of a text (its windows are spread evenly), or of prompts.

    steps: tokens of a text that follow its context. max_new: length of a reply. Raises DataError.
    """
    if data.prompts:
        return [
            _prompt_sample(data, i, tokenizer, max_new, max_len) for i in range(min(count, len(data.prompts)))
        ]
    ids = tokenizer.encode(data.text, parse_special=False)
    prefix = ids[: len(ids) - len(tokenizer.encode(data.text, add_special_tokens=False, parse_special=False))]
    samples = []
    for context in contexts:
        need = context + steps
        if len(ids) < need:
            raise DataError(
                f"data: {data.name}: its {len(ids)} tokens are fewer than --context {context} plus --steps "
                f"{steps}; give a shorter context or a longer text"
            )
        fit = min(count, max(len(ids) // need, 1))  # windows do not overlap
        for i in range(fit):
            at = (len(ids) - need) * i // max(fit - 1, 1) if fit > 1 else 0
            window = prefix + ids[at:] if at and prefix else ids[at:]
            part, after = tuple(window[:context]), tuple(window[context:need])
            samples.append(Sample(data.name, i, context, part, steps, teacher=after))
    return samples


def _prompt_sample(data: Data, index: int, tokenizer: Tokenizer, max_new: int, max_len: int) -> Sample:
    line = data.prompts[index]
    name = "prompt" if line.messages is None else "messages"
    try:
        if line.messages is not None:
            ids = tokenizer.encode_chat(line.messages)
        else:
            ids = encode_prompt(tokenizer, line.prompt or "")
    except (RequestError, TemplateError) as error:
        raise DataError(f"data: {line.where}: {name}: {error}") from error
    if len(ids) + max_new > max_len:
        raise DataError(
            f"data: {line.where}: {name} has {len(ids)} tokens, and {max_new} are kept for the "
            f"reply: together at most {max_len}, the model's context"
        )
    if len(ids) < 2:
        raise DataError(f"data: {line.where}: {name} has fewer than 2 tokens")
    return Sample(data.name, index, 0, tuple(ids), max_new, line.answers)
