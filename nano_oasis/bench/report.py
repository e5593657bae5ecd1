"""Figures and how they are shown: medians with their spread, percentiles, a table, a JSON file.

Owns: these. Must not know: what was measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import nano_oasis

WIDTH = 160


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing, in the unit of each."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def scaled(self, factor: float) -> Spread:
        return Spread(tuple(v * factor for v in self.values))

    def __str__(self) -> str:
        """The median, and half the range as a share of it."""
        share = (self.high - self.low) / 2 / self.median if self.median else 0.0
        return digits(self.median) + (f" ±{share:.0%}" if len(self.values) > 1 else "")


def digits(value: float) -> str:
    """Three significant digits, or all before the point."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percentile(values: Sequence[float], share: float) -> float:
    """share in percent, linear between neighbours, as numpy's default; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; the first column is text, the others are numbers."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a file has no width: nothing is cut off
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(digits(x) if isinstance(x, float) else str(x) for x in row))
    console.print(table)


def save(path: Path, what: str, options: Mapping[str, Any], results: object) -> None:
    """A JSON file that says what was run, when, where and with which version. Spreads become their values.

    options: of the command line; those that say where to write and what to call are left out."""
    document = {
        "benchmark": what,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "version": nano_oasis.__version__,
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "system": platform.platform(terse=True),
        },
        "options": {k: v for k, v in options.items() if k not in ("output", "work")},
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
    part.replace(path)  # a killed run leaves the old file or the new one


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return {"median": value.median, "values": value.values}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
