"""The display of loading: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from nano_oasis.cli import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(stream: io.StringIO) -> str:
    with LoadProgress(stream) as progress:
        for done in range(4):
            progress("weights", done, 3)
        progress("weights", 3, 3)
        progress("warm-up", 1, 1)
    return stream.getvalue()


def test_plain_lines_once_per_part_where_there_is_no_terminal() -> None:
    assert load(io.StringIO()) == "loaded weights\nloaded warm-up\n"


def test_a_terminal_gets_a_bar_and_its_cursor_back() -> None:
    shown = load(Terminal())
    assert "loading weights" in shown and "loaded" not in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0
