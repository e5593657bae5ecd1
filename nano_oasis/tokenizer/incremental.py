"""Token ids to text while they are being generated: what is settled now, never taken back.

Owns: IncrementalDecoder. Must not know: stop strings, requests, how tokens are made.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from nano_oasis.tokenizer.base import Tokenizer


class IncrementalDecoder:
    """The text of tokens that follow `prompt_ids`, handed out as soon as it is certain.

    All deltas joined equal `decode(prompt + output)` without the text the prompt had settled. A delta never
    ends inside a character: its bytes wait until it is complete (or until flush, which shows U+FFFD, as
    decode does). A character begun by the prompt's last tokens belongs to the output. The cost of a push is
    that of its own tokens, whatever came before.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(self._last_bytes(prompt_ids))  # what comes out of it the prompt has settled
        # Encoders with a prefix space put it before the first word of all; later words keep theirs.
        self._at_start = tokenizer.strips_first_space and not any(map(self._visible, prompt_ids))

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with `ids` (any number of tokens)."""
        return self._emit(self._utf8.decode(b"".join([self._visible(id) for id in ids])))

    def flush(self) -> str:
        """The end of the text: an unfinished character comes out as U+FFFD."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def _visible(self, id: int) -> bytes:
        return b"" if id in self._hidden else self._token_bytes(id)

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        """The unfinished character at the end of `ids`, if any (at most 3 bytes)."""
        data = b""
        for id in reversed(ids):
            data = self._visible(id) + data
            for start in range(len(data) - 1, max(len(data) - 4, -1), -1):
                if data[start] < 0x80:
                    return b""
                if data[start] >= 0xC0:  # the first byte of a character
                    return data[start:]
            if len(data) > 3:
                return b""
        return b""
