"""What the commands share: engine options on the command line, and the display of progress.

Owns: the translation of EngineConfig's table to argparse and back, and the progress bars.
Must not know: sockets, the engine, what any option does.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import threading
import time
from typing import IO, Any, get_args, get_type_hints

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import nano_oasis
from nano_oasis.config import EngineConfig

_SILENCE_S = 30  # without a terminal: one line of progress this often


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser with --help and --version that accepts no abbreviations."""
    parser = argparse.ArgumentParser(
        prog=f"python -m nano_oasis.{command}", description=description, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=nano_oasis.__version__)
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of EngineConfig: max_num_seqs -> --max-num-seqs, bools as --x / --no-x."""
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        name, meta = "--" + field.name.replace("_", "-"), field.metadata
        if hints[field.name] is bool:
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(name, action=action, default=field.default, help=meta["help"])
            continue
        group.add_argument(
            name,
            type=_value_type(hints[field.name], meta),
            default=field.default,
            choices=meta.get("choices"),
            metavar=None if "choices" in meta else field.name.rpartition("_")[2].upper(),
            help=_help(field),
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError when a value is outside its limits."""
    return EngineConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig)})


def _value_type(hint: Any, meta: Any) -> Any:
    if meta.get("bytes"):
        return str  # "2GiB" or a plain number: EngineConfig reads both
    types = [t for t in (get_args(hint) or (hint,)) if t is not type(None)]
    return types[0]


def _help(field: dataclasses.Field[Any]) -> str:
    """The field's own words, its limits and its default; argparse needs % doubled."""
    text = str(field.metadata["help"])
    if "low" in field.metadata:
        text += f"; {field.metadata['low']} to {field.metadata['high']}"
    if field.default is not None:
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


class LoadProgress:
    """A progress callback (what, done, total): bars on a terminal, else one plain line per finished part.

    May be called from any thread. Use as a context manager.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._done: set[str] = set()
        self._bars: Progress | None = None
        if self._stream.isatty():
            columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=Console(file=self._stream), transient=True)

    def __enter__(self) -> LoadProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            if self._bars is not None:
                if what not in self._tasks:
                    self._tasks[what] = self._bars.add_task(what, total=total)
                self._bars.update(self._tasks[what], completed=done, total=total)
            elif done >= total and what not in self._done:
                self._done.add(what)
                print(f"loaded {what}", file=self._stream, flush=True)


class WorkProgress:
    """A progress callback (what, done, total) of long work: a bar on a terminal, else a line now and then.

    line: what is printed without a terminal. Use as a context manager.
    """

    def __init__(self, line: str = "{done} of {total}: {what}") -> None:
        self._line = line
        self._bar: tuple[Progress, TaskID] | None = None
        self._said, self._last = 0.0, ("", 0, 0)

    def __enter__(self) -> WorkProgress:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            now, state = time.monotonic(), (what, done, total)
            if state != self._last and (now - self._said > _SILENCE_S or done == total):
                self._said, self._last = now, state
                print(self._line.format(what=what, done=done, total=total), file=sys.stderr, flush=True)
            return
        if self._bar is None:
            columns = (
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            bars = Progress(*columns, console=Console(file=sys.stderr), transient=True)
            bars.start()
            self._bar = bars, bars.add_task("")
        bars, task = self._bar
        bars.update(task, description=what[:60], completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()
