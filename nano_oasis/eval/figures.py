"""The report's figures: from a Result to marks.

Owns: what goes on which axis. Must not know: pages, styles, how results were made.
"""

from __future__ import annotations

from html import escape
from typing import Any

from nano_oasis.eval.records import Record
from nano_oasis.eval.results import Result, mean, percent, show
from nano_oasis.eval.settings import Setting
from nano_oasis.eval.svg import COLOURS, Point, Series, chart, heat_map

STRIPS = 8  # samples shown token by token


def _settings(result: Result) -> dict[str, dict[str, Any]]:
    """label -> setting, without dense."""
    return {r.label: r.setting for r in result.rows if r.setting is not None}


def _budgets(result: Result) -> list[str]:
    """As they were asked for, smallest first."""
    sizes: dict[str, list[float | None]] = {}
    for r in result.runs:
        if r["setting"] and "budget_tokens" in r:
            sizes.setdefault(r["setting"]["budget"], []).append(r["budget_tokens"])
    return sorted(sizes, key=lambda b: mean(sizes[b]) or 0.0)


def _families(result: Result) -> dict[str, dict[str, str]]:
    """Settings that differ in the budget only: name -> budget -> label. The selector is the name's first
    word."""
    families: dict[str, dict[str, str]] = {}
    for label, setting in _settings(result).items():
        words = str(Setting(**setting)).split()
        name = " ".join([words[0], *words[2:]])
        families.setdefault(name, {})[setting["budget"]] = label
    return families


def _by_budget(result: Result, figure: str, digits: int) -> list[Series]:
    budgets = _budgets(result)
    series = []
    for i, (name, labels) in enumerate(_families(result).items()):
        points = []
        for x, budget in enumerate(budgets):
            value = result.average(labels[budget])[figure] if budget in labels else None
            if value is not None:
                points.append(Point(x, value, f"{name}, budget {budget}: {value:.{digits}f}"))
        series.append(Series(name, points, i % COLOURS))
    return series


def score_by_budget(result: Result) -> str:
    dense = result.average("dense")["score"]
    if dense is None:
        return ""
    reference = Series("dense", [Point(0, dense, f"dense: {dense:.1f}")], 7, flat=True)
    series = [reference, *_by_budget(result, "score", 1)]
    return chart(series, "budget (tokens per layer)", "score", categories=_budgets(result), low=0, high=100)


def kl_by_budget(result: Result) -> str:
    series = _by_budget(result, "kl_mean", 4)
    return chart(series, "budget (tokens per layer)", "KL (nats)", categories=_budgets(result), log=True)


def memory_quality(result: Result) -> str:
    """One point per setting: dense bytes over device bytes, and KL; the tooltip has the score too."""
    series = []
    for i, (name, labels) in enumerate(_families(result).items()):
        points = []
        for budget, label in labels.items():
            a = result.average(label)
            if a["kl_mean"] is not None and a["device_bytes"] and a["dense_bytes"]:
                times = a["dense_bytes"] / a["device_bytes"]
                score = f", score {a['score']:.1f}" if a["score"] is not None else ""
                tip = f"{name}, budget {budget}: {times:.2f} times less, KL {a['kl_mean']:.4f}{score}"
                points.append(Point(times, a["kl_mean"], tip))
        series.append(Series(name, sorted(points, key=lambda p: p.x), i % COLOURS))
    return chart(series, "times less device KV than dense", "KL (nats)", log=True)


def hit_by_context(result: Result) -> str:
    contexts = sorted({_context(r) for r in result.runs if r["status"] == "ok"})
    series = []
    for i, label in enumerate(_settings(result)):
        points = []
        for x, context in enumerate(contexts):
            rates = [
                r["hit_rate"] for r in result.runs
                if r["label"] == label and r["status"] == "ok" and _context(r) == context
            ]  # fmt: skip
            rate = mean(rates)
            if rate is not None:
                points.append(Point(x, 100 * rate, f"{label}, {context} tokens: {percent(rate)}"))
        series.append(Series(label, points, i % COLOURS))
    return chart(series, "context (tokens)", "hit rate (%)", categories=[str(c) for c in contexts], high=100)


def _context(record: Record) -> int:
    """What was asked for; of a prompt with its own length, that length in steps of 1,000."""
    return int(record["context"] or -(-record["prompt_tokens"] // 1000) * 1000)


def heat_maps(result: Result) -> str:
    """One per selector, block and head groups; all with the same scale."""
    kinds: dict[str, dict[str, list[Record]]] = {}
    for r in result.recalls:
        c = r["choice"]
        kind = str(
            Setting(r["budget"], c["selector"], block=c["block"], head_groups=c["head_groups"])
        ).split()
        kinds.setdefault(" ".join([kind[0], *kind[2:]]), {}).setdefault(r["budget"], []).append(r)
    if not kinds:
        return ""
    order = _budgets(result)
    lowest = min(x for records in kinds.values() for rs in records.values() for r in rs for x in r["mass"])
    low = int(lowest * 10) / 10  # the scale's pale end
    maps = []
    for name, records in kinds.items():
        budgets = [b for b in order if b in records]
        layers = records[budgets[0]][0]["layers"]
        values = [[mean(r["mass"][i] for r in records[b]) for b in budgets] for i in range(len(layers))]
        drawn = heat_map([str(x) for x in layers], budgets, values, "layer", "budget", low, 1.0)
        whole = show(mean(v for row in values for v in row), 3)
        maps.append(f"<div><b>{escape(name)}</b> <span class=soft>mean {whole}</span>{drawn}</div>")
    note = f'<p class="soft">Palest cell: {low:.1f} or less; fullest: 1.</p>'
    return f'<div class="row">{"".join(maps)}</div>{note}'


def strips(result: Result) -> str:
    """Answers of the first samples that some setting changes, one of each task and text before a second
    one."""
    dense = {(r["group"], r["context"], r["index"]): r for r in result.runs if r["label"] == "dense"}
    changed: dict[tuple[Any, ...], list[Record]] = {}
    for r in result.runs:
        if r["label"] != "dense" and r["status"] == "ok":
            changed.setdefault((r["group"], r["context"], r["index"]), []).append(r)
    places = [p for p, rs in changed.items() if any(r["divergence"] is not None for r in rs) and p in dense]
    parts = []
    for place in sorted(places, key=lambda p: p[2])[:STRIPS]:
        group, context, index = place
        title = f"{group} {context or ''} #{index}"
        parts.append(f"<p><b>{escape(title)}</b></p>{_strip('dense', dense[place], None)}")
        parts += [_strip(r["label"], r, dense[place]) for r in changed[place]]
    if not parts and changed:
        return '<p class="soft">Every answer equals the dense one, token for token.</p>'
    return "\n".join(parts)


def _strip(label: str, record: Record, dense: Record | None) -> str:
    """One answer as spans. Beside the label: its score, and where it parts from dense."""
    at = record["divergence"]
    notes = [] if record["score"] is None else [f"score {record['score']:.0f}"]
    if dense is not None:
        notes.append("all the same" if at is None else f"differs from token {at} on")
    spans = []
    for i, piece in enumerate(record["pieces"]):
        kind = ""
        if dense is not None:
            same = i < len(dense["pieces"]) and dense["pieces"][i] == piece
            kind = "same" if same else "other"
            kind += " cut" if i == at else ""
        spans.append(f'<span class="{kind}" title="token {i}">{escape(piece)}</span>')
    note = f" ({', '.join(notes)})" if notes else ""
    return f'<div class="strip"><b>{escape(label)}{escape(note)}</b>{"".join(spans)}</div>'
