"""Small inline SVG figures: lines, points, heat maps. No scripts, no fonts, no files beside them.

Owns: scales, axes, marks, tooltips (<title>). Must not know: what is plotted, results, tasks.

Colours are CSS classes (c0 to c7, h for heat cells), so that one style sheet serves light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
W, H = 460, 270  # of a chart, with its margins
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 44


@dataclass(frozen=True)
class Point:
    """x: a number, or the place of a category; tip: what the tooltip says."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int
    flat: bool = False  # a reference: one level, dashed, over the whole width


def chart(
    series: Sequence[Series], x_title: str, y_title: str, *, categories: Sequence[str] | None = None,
    log: bool = False, low: float | None = None, high: float | None = None, lines: bool = True,
) -> str:  # fmt: skip
    """Lines (or points only) over numbers, or over categories at 0, 1, 2, ..; a legend above. "" if empty.

    log: y is logarithmic; values of 0 and below stand at the lowest tick. low, high: of the y axis.
    """
    every = [p for s in series for p in s.points]
    if not every:
        return ""
    ys = _axis([p.y for p in every], low, high, log)
    if categories is not None:
        xs = _Axis(-0.4, len(categories) - 0.6, list(range(len(categories))), lambda v: categories[int(v)])
    else:
        xs = _axis([p.x for s in series if not s.flat for p in s.points] or [0.0], None, None, False)
    place_x = xs.scale(LEFT, W - RIGHT)
    place_y = ys.scale(H - BOTTOM, TOP)
    parts = [_legend(series), f'<svg viewBox="0 0 {W} {H}" role="img" aria-label="{escape(y_title)}">']
    for tick in ys.ticks:
        y = place_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{W - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(ys.label(tick))}</text>'
        )
    for tick in xs.ticks:
        x = place_x(tick)
        parts.append(
            f'<text x="{x:.1f}" y="{H - BOTTOM + 16}" text-anchor="middle">{escape(xs.label(tick))}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{W - RIGHT}" y1="{H - BOTTOM}" y2="{H - BOTTOM}"/>')
    middle = (TOP + H - BOTTOM) / 2
    parts.append(_name(f'x="{(LEFT + W - RIGHT) / 2}" y="{H - 8}"', x_title))
    parts.append(_name(f'transform="translate(12 {middle}) rotate(-90)"', y_title))
    for s in series:
        parts += _marks(s, place_x, place_y, lines)
    return "\n".join([*parts, "</svg>"])


def _marks(s: Series, x: Callable[[float], float], y: Callable[[float], float], lines: bool) -> list[str]:
    if not s.points:
        return []
    if s.flat:
        at, tip = y(s.points[0].y), escape(s.points[0].tip)
        return [
            f'<line class="flat c{s.colour}" x1="{LEFT}" x2="{W - RIGHT}" y1="{at:.1f}" y2="{at:.1f}">'
            f"<title>{tip}</title></line>"
        ]
    parts = []
    if lines and len(s.points) > 1:
        path = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in s.points)
        parts.append(f'<polyline class="line c{s.colour}" points="{path}"/>')
    for p in s.points:
        parts.append(
            f'<circle class="dot c{s.colour}" cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="4.5">'
            f"<title>{escape(p.tip)}</title></circle>"
        )
    return parts


def _name(where: str, title: str) -> str:
    return f'<text class="name" {where} text-anchor="middle">{escape(title)}</text>'


def _legend(series: Sequence[Series]) -> str:
    names = [
        f'<span class="key"><i class="{"dash" if s.flat else "square"} c{s.colour}"></i>'
        f"{escape(s.name)}</span>"
        for s in series
        if s.points
    ]
    return f'<div class="legend">{"".join(names)}</div>'


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], row_title: str,
    column_title: str, low: float, high: float,
) -> str:  # fmt: skip
    """values[row][column] as cells from pale (low) to strong (high); each cell's tooltip has its number."""
    tall = max(9, min(22, 330 // max(len(rows), 1)))
    wide = max(34, min(90, 300 // max(len(columns), 1)))
    left, top = 46, 22
    width, height = left + wide * len(columns) + 8, top + tall * len(rows) + 26
    every = max(1, math.ceil(11 / tall))
    parts = [
        f'<svg class="fixed" width="{width}" viewBox="0 0 {width} {height}" role="img" aria-label="heat map">'
    ]
    for j, name in enumerate(columns):
        x = left + wide * (j + 0.5)
        parts.append(f'<text x="{x}" y="{top - 6}" text-anchor="middle">{escape(name)}</text>')
    for i, name in enumerate(rows):
        y = top + tall * i
        if i % every == 0:
            parts.append(
                f'<text x="{left - 6}" y="{y + tall / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
        for j, value in enumerate(values[i]):
            if value is None:
                continue
            share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 1.0
            tip = f"{row_title} {name}, {column_title} {columns[j]}: {value:.4f}"
            parts.append(
                f'<rect class="h" x="{left + wide * j}" y="{y}" width="{wide - 1}" height="{tall - 1}" '
                f'fill-opacity="{0.06 + 0.94 * share:.3f}"><title>{escape(tip)}</title></rect>'
            )
    middle = top + tall * len(rows) / 2
    parts.append(_name(f'transform="translate(10 {middle}) rotate(-90)"', row_title))
    x = left + wide * len(columns) / 2
    parts.append(_name(f'x="{x}" y="{height - 8}"', column_title))
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    log: bool = False

    def scale(self, start: float, end: float) -> Callable[[float], float]:
        """From values to coordinates; values outside are put at the edge."""

        def place(value: float) -> float:
            low, high = self.low, self.high
            if self.log:
                value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
            share = min(max((value - low) / (high - low), 0.0), 1.0)
            return start + share * (end - start)

        return place


def _axis(values: Sequence[float], low: float | None, high: float | None, log: bool) -> _Axis:
    if log:
        positive = [v for v in values if v > 0] or [1e-3]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        last = max(last, first + 1)
        steps = (1,) if last - first > 2 else (1, 2, 5)  # few decades need lines between them
        ticks = [m * 10.0**e for e in range(first, last) for m in steps] + [10.0**last]
        return _Axis(10.0**first, 10.0**last, ticks, lambda v: f"{v:g}", True)
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    if top <= bottom:
        bottom, top = bottom - 0.5, top + 0.5
    if low is None:
        bottom -= 0.05 * (top - bottom)
    if high is None:
        top += 0.05 * (top - bottom)
    step = _step((top - bottom) / 5)
    ticks = [step * i for i in range(math.ceil(bottom / step - 1e-9), math.floor(top / step + 1e-9) + 1)]
    return _Axis(bottom, top, ticks, lambda v: f"{v:.6g}")


def _step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    base = 10.0 ** math.floor(math.log10(rough))
    return next(base * m for m in (1, 2, 5, 10) if base * m >= rough * 0.999)
