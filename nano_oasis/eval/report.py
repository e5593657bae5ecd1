"""The report: one HTML file with everything in it, readable on a light or a dark screen, without scripts.

Owns: which figures there are, their words, the page. Must not know: how results were made, how marks are
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from nano_oasis.eval.figures import (
    heat_maps,
    hit_by_context,
    kl_by_budget,
    memory_quality,
    score_by_budget,
    strips,
)
from nano_oasis.eval.results import DENSE_FLOOR, Result, percent, ratio, show

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1f24; --soft: #5c6570; --line: #d9dee4; --card:
#f6f8fa;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0569a; --c4: #9a7400; --c5: #2b9fd0; --c6: #7a5cc0;
  --c7: #60666e; --good: #d5ecd9; --bad: #f7d9c8; --heat: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e9ed; --soft: #9aa4af; --line:
#343b44;
  --card: #1c2127; --c0: #56b4e9; --c1: #ff8a3d; --c2: #35c799; --c3: #e08bc9; --c4: #e0b93b; --c5: #8fd3f4;
  --c6: #b39df0; --c7: #a5adb7; --good: #1e4028; --bad: #5a2f19; --heat: #56b4e9; } }
* { box-sizing: border-box } body { margin: 0 auto; max-width: 1060px; padding: 24px 20px 60px;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 36px 0 6px } p { margin: 4px 0 10px }
.soft, figcaption { color: var(--soft) } figcaption { font-size: 13px; margin-top: 4px }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 18px }
figure { margin: 0; padding: 12px 14px; background: var(--card); border: 1px solid var(--line); border-radius:
8px } figure h3 { font-size: 15px; margin: 0 0 6px } .row { display: flex; flex-wrap: wrap; gap: 20px } svg {
width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif } svg.fixed { width: auto;
max-width: 100% } svg text { fill: var(--soft) } svg .name { fill: var(--ink); font-size: 12px } .grid {
stroke: var(--line) } .axis { stroke: var(--soft) } .line { fill: none; stroke-width: 2; stroke: var(--c) }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5 } .flat { stroke: var(--c); stroke-width: 2;
  stroke-dasharray: 5 4 } rect.h { fill: var(--heat) }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) }
.c4 { --c: var(--c4) } .c5 { --c: var(--c5) } .c6 { --c: var(--c6) } .c7 { --c: var(--c7) }
.legend { font-size: 12px; margin: 0 0 4px } .key { display: inline-block; margin-right: 14px }
.key i { display: inline-block; margin-right: 5px } .square { width: 10px; height: 10px; border-radius: 3px;
  background: var(--c) } .dash { width: 16px; border-top: 2px dashed var(--c); vertical-align: middle }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; width: 100% }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 } th[colspan] { text-align: center }
  td.l, th.l { text-align: left } tr.first td { border-top: 2px
solid var(--line) } .strip { font: 12.5px/1.75 ui-monospace, monospace; word-break: break-word; margin: 2px 0
8px } .strip b { font: 600 12px system-ui, sans-serif; color: var(--soft); margin-right: 8px } .strip span {
padding: 1px 0; border-radius: 2px; white-space: pre-wrap } .same { background: var(--good) } .other {
background: var(--bad) } .cut { outline: 2px solid var(--c1) }
"""


def report_html(result: Result) -> str:
    """The page, as text."""
    m = result.meta
    body = [
        f"<h1>{escape(str(m['model']))}: sparse against dense</h1>",
        f'<p class="soft">{m["family"]}, {m["layers"]} layers, {m["kv_heads"]} KV heads of {m["head_dim"]}, '
        f"{m['dtype']}; {m['samples']} samples a task, {m['steps']} teacher-forced steps, "
        f"recall on the first {m['recall_samples']}, up to {m['batch']} "
        f"decoded together, seed {m['seed']}; nano_oasis {m['version']}, "
        f"Python {m['python']}.</p>",
        *(f'<p class="soft">{escape(note)}</p>' for note in m.get("notes", ())),
        _failures(result),
        "<h2>Quality against budget</h2>",
        _pair(
            _figure("Score", score_by_budget, result, f"Mean over the tasks that dense scores at least "
                    f"{DENSE_FLOOR:.0f} on, 0 to 100. Dashed: dense. Nearer to dashed is better."),
            _figure("KL to dense", kl_by_budget, result, "How far the next-token distribution moves, in "
                    "nats, mean over the steps of all samples. Logarithmic; lower is better."),
        ),
        "<h2>What it saves, and what it finds</h2>",
        _pair(
            _figure("Memory against quality", memory_quality, result, "Each setting once: how many times "
                    "less KV the device holds than dense, sketches included, and KL. Best is right and low."),
            _figure("Hit rate by context", hit_by_context, result, "Share of the wanted blocks that were on "
                    "the device before anything was waited for. One point per context length."),
        ),
        "<h2>Recall of the true attention mass</h2>",
        _figure("By layer and budget", heat_maps, result, "Share of the exact attention mass that falls on "
                "the blocks the selector chooses with the step's own query. Pale layers lose attention."),
        _predictors(result),
        "<h2>Where greedy answers part</h2>",
        _figure("Token by token", strips, result, "Green: the same token as dense at the same place. The "
                "outlined token is the first that differs; what follows is another text."),
        "<h2>All figures</h2>",
        _table(result),
    ]  # fmt: skip
    title = escape(f"{m['model']}: sparse against dense")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(part for part in body if part)}\n</body></html>\n"
    )


def _figure(title: str, draw: Callable[[Result], str], result: Result, caption: str) -> str:
    drawn = draw(result) or '<p class="soft">Nothing to show: this run did not measure it.</p>'
    return f"<figure><h3>{title}</h3>{drawn}<figcaption>{caption}</figcaption></figure>"


def _pair(*figures: str) -> str:
    return f'<div class="pair">{"".join(figures)}</div>'


def _failures(result: Result) -> str:
    if not result.failed:
        return ""
    lines = [
        f"<li>{escape(r['group'])} {r['context'] or ''} #{r['index']}, {escape(r['label'])}: "
        f"{escape(r['error'])}</li>"
        for r in result.failed[:20]
    ]
    more = f"<li>and {len(result.failed) - 20} more</li>" if len(result.failed) > 20 else ""
    return f"<h2>{len(result.failed)} failed</h2><ul>{''.join(lines)}{more}</ul>"


def _cells(values: Sequence[Any], left: int, tag: str = "td") -> str:
    return "".join(
        f"<{tag}{' class=l' if i < left else ''}>{escape(str(v))}</{tag}>" for i, v in enumerate(values)
    )


def _predictors(result: Result) -> str:
    rows = result.predictors()
    if not rows:
        return ""
    names = ("oracle", "current", "lookahead", "previous")
    lines = []
    for r in rows:
        values = [r["selector"], r["budget"], r["block"], r["head_groups"] or "all"]
        values += [percent(r[f"found_{n}"]) for n in names] + [percent(r[f"read_{n}"]) for n in names]
        lines.append(f"<tr>{_cells(values, 2)}</tr>")
    head = (
        f"<tr>{_cells([''] * 4, 2, 'th')}<th colspan=4>found</th><th colspan=4>mass</th></tr>"
        f"<tr>{_cells(['selector', 'budget', 'block', 'groups', *names, *names], 2, 'th')}</tr>"
    )
    right = percent(rows[0]["drafts_right"])
    return (
        "<h2>Predicting the next step's blocks</h2><p>Found: of the blocks that the oracle (exact mass, the "
        "step's own query) reads at a step, beyond sink and newest, the share in each predictor's choice. "
        "Mass: the share of the true mass on that choice. Lookahead chooses with the query of a drafted "
        f"token that ran beside the step before; the drafts are n-gram copies, {right} of them right.</p>"
        f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'
    )


def _table(result: Result) -> str:
    head = ["task", "context", "setting", "n", "failed", "score", "output tokens", "KL mean", "KL p99",
            "same top token", "answers differ", "first differing token", "hit rate", "left out", "waiting",
            "device KV"]  # fmt: skip
    lines, previous = [], None
    averaged = result.averaged()
    for r in result.rows:
        place = (r.group, r.context)
        weak = r.score is not None and place not in averaged
        values = [
            r.group, r.context or "own", r.label, r.samples, r.failed or "",
            show(r.score, 1) + ("*" if weak else ""), show(r.output_tokens, 1), show(r.kl_mean, 4),
            show(r.kl_p99, 3), percent(r.same_top),
            percent(r.diverged), show(r.divergence, 0), percent(r.hit_rate), percent(r.skipped),
            percent(r.wait_share), ratio(r.dense_bytes, r.device_bytes),
        ]  # fmt: skip
        kind = ' class="first"' if place != previous else ""
        lines.append(f"<tr{kind}>{_cells(values, 3)}</tr>")
        previous = place
    for i, label in enumerate(result.labels):
        a = result.average(label)
        values = [
            "average" if i == 0 else "", "", label, "", "", show(a["score"], 1), show(a["output_tokens"], 1),
            show(a["kl_mean"], 4), "", percent(a["same_top"]), "", "", percent(a["hit_rate"]), "",
            percent(a["wait_share"]), ratio(a["dense_bytes"], a["device_bytes"]),
        ]  # fmt: skip
        kind = ' class="first"' if i == 0 else ""
        lines.append(f"<tr{kind}>{_cells(values, 3)}</tr>")
    return (
        f'<div class="wide"><table><tr>{_cells(head, 3, "th")}</tr>{"".join(lines)}</table></div>'
        f'<p class="soft">* dense scores below {DENSE_FLOOR:.0f}: listed, not averaged. Device KV: how many '
        "times less than dense. First differing token: the median over the answers that differ. Left out: "
        "wanted blocks that a step read without (policies skip, estimate, repair). Waiting: "
        "share of the decode time spent standing still for copies.</p>"
    )
