"""Tokens that are found in text by their spelling: control tokens and user-defined ones.

Owns: AddedToken and the cutting of a text into plain stretches and token ids.
Must not know: how plain text becomes ids, or which file declared the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class AddedToken:
    """One token and how its spelling is matched. `special` tokens control the model and are not text."""

    id: int
    text: str
    special: bool = True
    lstrip: bool = False  # a match swallows the white space before it
    rstrip: bool = False  # and after it
    single_word: bool = False  # no match inside a word


class AddedTokens:
    """A set of added tokens, ready to be found in text; the longest spelling wins."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        self.pattern = re.compile(_longest_of(list(self._by_text))) if self._by_text else None

    def split(self, text: str) -> list[str | int]:
        """`"<s>hi"` -> `[1, "hi"]`: ids of added tokens, and the non-empty text between them."""
        if self.pattern is None:
            return [text] if text else []
        pieces: list[str | int] = []
        done = 0  # text before this offset is in `pieces`
        for match in self.pattern.finditer(text):
            start, end = match.span()
            token = self._by_text[match[0]]
            if start < done or (token.single_word and _inside_word(text, start, end)):
                continue
            plain = text[done:start]
            if token.lstrip:
                plain = plain.rstrip()
            while token.rstrip and end < len(text) and text[end].isspace():
                end += 1
            if plain:
                pieces.append(plain)
            pieces.append(token.id)
            done = end
        if done < len(text):
            pieces.append(text[done:])
        return pieces


def _inside_word(text: str, start: int, end: int) -> bool:
    return bool(re.match(r"\w", text[start - 1 : start]) or re.match(r"\w", text[end : end + 1]))


def _longest_of(words: list[str]) -> str:
    """A regular expression for the longest of `words`, as a tree of shared beginnings.

    A plain `a|b|c` of thousands of tokens (Gemma has 6,249) would try each one at every `<`.
    """
    tails: dict[str, list[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(head) + _longest_of(rest) for head, rest in tails.items()]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{body})?" if "" in words else body
