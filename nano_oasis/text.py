"""From a request's token ids to its settled text: detokenising, and stopping at strings.

Owns: what text may be shown already, and whether a stop string ended the request.
Must not know: where tokens come from, blocks, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from nano_oasis.tokenizer import IncrementalDecoder, Tokenizer


class TextStream:
    """The text of one choice. What was returned is final; what might begin a stop string is held back."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str], skip_special_tokens: bool
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], may_stop: bool = True) -> str:
        """New settled text. If `stopped_by` is set afterwards, the text ended before that stop string.

        Under min_tokens (`may_stop` False) nothing is matched and nothing held back.
        """
        return self._take(self._decoder.push(token_ids), may_stop)

    def finish(self) -> str:
        """Everything still held back; half a character becomes U+FFFD, as in a full decode."""
        if self.stopped_by is not None:
            return ""
        rest = self._take(self._decoder.flush(), may_stop=True)
        rest, self._held = rest + self._held, ""
        return rest

    def _take(self, new: str, may_stop: bool) -> str:
        text = self._held + new
        self._held = ""
        if not self._stop or not may_stop or not text:
            return text
        found = [(text.find(s), s) for s in self._stop if s in text]
        if found:
            at, self.stopped_by = min(found, key=lambda hit: hit[0])
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
