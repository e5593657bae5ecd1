"""What a run found: the records, summed up by task, context and setting.

Owns: Result and its sums. Must not know: models, how records were made, how plots are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from nano_oasis.eval.records import Record

DENSE_FLOOR = 20.0  # a task that dense scores below is listed, and not averaged: there is nothing to lose


@dataclass(frozen=True)
class Row:
    """One task or text, context and setting ("dense": none), over its samples. None: not measured.

    kl in nats; divergence: median first differing token of the samples that differ; rates are 0 to 1.
    """

    group: str
    context: int
    label: str
    setting: dict[str, Any] | None
    samples: int
    failed: int
    prompt_tokens: float | None
    score: float | None
    output_tokens: float | None
    kl_mean: float | None
    kl_p99: float | None
    same_top: float | None
    diverged: float | None
    divergence: float | None
    hit_rate: float | None
    skipped: float | None
    wait_share: float | None
    device_bytes: float | None
    dense_bytes: float | None


@dataclass
class Result:
    """meta: what was run. records: see records.py, in the order of the plan."""

    meta: dict[str, Any]
    records: list[Record]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [_row(*item) for item in _grouped(self.runs).items()]
        lost = {_place(r) for r in self.runs if r["status"] != "ok"}
        whole = [r for r in self.runs if _place(r) not in lost]
        # A sample that one setting could not do would else make that setting's average better or worse.
        self._whole_rows = [_row(*item) for item in _grouped(whole).items()]

    @property
    def runs(self) -> list[Record]:
        return [r for r in self.records if r["kind"] == "run"]

    @property
    def recalls(self) -> list[Record]:
        return [r for r in self.records if r["kind"] == "recall" and r.get("layers")]

    @property
    def failed(self) -> list[Record]:
        return [r for r in self.records if r["status"] != "ok"]

    @property
    def labels(self) -> list[str]:
        """Dense first, then the settings in their order."""
        return list(dict.fromkeys(row.label for row in self.rows))

    def find(self, group: str, context: int, label: str) -> Row | None:
        for row in self.rows:
            if (row.group, row.context, row.label) == (group, context, label):
                return row
        return None

    def averaged(self) -> list[tuple[str, int]]:
        """The (task, context) whose scores are averaged: those with known answers that dense can do."""
        dense = [r for r in self.rows if r.label == "dense" and r.score is not None]
        return [(r.group, r.context) for r in dense if (r.score or 0) >= DENSE_FLOOR]

    def average(self, label: str) -> dict[str, float | None]:
        """Means over tasks and contexts: score and reply length over averaged(), the other figures over all
        that have them; samples that failed under any setting left out."""
        rows = [r for r in self._whole_rows if r.label == label]
        places = self.averaged()
        scored = [r for r in rows if (r.group, r.context) in places]
        names = ("kl_mean", "same_top", "hit_rate", "wait_share", "device_bytes", "dense_bytes")
        # Where a whole task failed there is no average: it would leave out what could not be done.
        score = mean(r.score for r in scored) if places and len(scored) == len(places) else None
        means = {n: mean(getattr(r, n) for r in rows) for n in names}
        return {"score": score, "output_tokens": mean(r.output_tokens for r in scored or rows)} | means

    def predictors(self) -> list[dict[str, Any]]:
        """Next-step recall by choice of blocks and predictor, over all samples and layers."""
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for r in self.recalls:
            c = r["choice"]
            key = (r["budget"], c["selector"], c["block"], c["head_groups"])
            groups.setdefault(key, []).append(r)
        rows = []
        for (budget, selector, block, head_groups), records in groups.items():
            row: dict[str, Any] = {
                "budget": budget, "selector": selector, "block": block, "head_groups": head_groups,
                "drafts_right": mean(r["drafts_right"] for r in records),
            }  # fmt: skip
            for name in records[0]["found"]:
                row[f"found_{name}"] = mean(x for r in records for x in r["found"][name])
                row[f"read_{name}"] = mean(x for r in records for x in r["read"][name])
            rows.append(row)
        return rows

    # --- output ------------------------------------------------------------------------------------
    def table(self) -> Table:
        """For a terminal: print it with rich."""
        title = f"{self.meta['model']}: scores 0 to 100, KL to dense in nats"
        table = Table(title=title, title_justify="left")
        for name in ("task", "context", "setting"):
            table.add_column(name, no_wrap=name != "task")
        for name in ("n", "score", "out", "KL", "KL p99", "same top", "differ", "hit", "wait", "device"):
            table.add_column(name, justify="right")
        previous = None
        for row in self.rows:
            place = (row.group, row.context)
            if previous not in (None, place):
                table.add_section()
            known = place in self.averaged() or row.score is None
            group, context = ("", "") if place == previous else (row.group, str(row.context or "own"))
            previous = place
            table.add_row(
                group, context, row.label, f"{row.samples}" + (f" (-{row.failed})" if row.failed else ""),
                show(row.score, 1) + ("" if known else "*"), show(row.output_tokens, 0), show(row.kl_mean, 4),
                show(row.kl_p99, 3), percent(row.same_top), percent(row.diverged), percent(row.hit_rate),
                percent(row.wait_share), ratio(row.dense_bytes, row.device_bytes),
            )  # fmt: skip
        table.add_section()
        for label in self.labels:
            a = self.average(label)
            table.add_row(
                "average" if label == self.labels[0] else "", "", label, "", show(a["score"], 1),
                show(a["output_tokens"], 0), show(a["kl_mean"], 4), "", percent(a["same_top"]), "",
                percent(a["hit_rate"]), percent(a["wait_share"]), ratio(a["dense_bytes"], a["device_bytes"]),
            )  # fmt: skip
        notes = [escape(note) for note in self.meta.get("notes", [])]
        weak = [r for r in self.rows if r.label == "dense" and r.score is not None]
        if any((r.group, r.context) not in self.averaged() for r in weak):
            notes = [f"* dense scores below {DENSE_FLOOR:.0f}: not averaged", *notes]
        if notes:
            table.caption, table.caption_justify = "\n".join(notes), "left"
        return table

    def to_json(self) -> str:
        """Everything but the tokens' texts, as one JSON document."""
        samples = [{k: v for k, v in r.items() if k != "pieces"} for r in self.records]
        value = {
            "meta": self.meta, "rows": [vars(r) for r in self.rows],
            "average": {label: self.average(label) for label in self.labels},
            "averaged": self.averaged(), "predictors": self.predictors(), "samples": samples,
        }  # fmt: skip
        return json.dumps(value, indent=1, allow_nan=False)

    def save(self, folder: str | Path) -> Path:
        """eval.json and report.html in a folder, which is made; returns the report's path."""
        from nano_oasis.eval.report import report_html

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "eval.json").write_text(self.to_json())
        (folder / "report.html").write_text(report_html(self))
        return folder / "report.html"


def _grouped(runs: Iterable[Record]) -> dict[tuple[str, int, str], list[Record]]:
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for r in runs:
        groups.setdefault((r["group"], r["context"], r["label"]), []).append(r)
    return groups


def _place(record: Record) -> tuple[str, int, int]:
    return record["group"], record["context"], record["index"]


def _row(place: tuple[str, int, str], records: list[Record]) -> Row:
    good = [r for r in records if r["status"] == "ok"]
    kl = sorted(x for r in good for x in r.get("kl", []))
    apart = sorted(r["divergence"] for r in good if r["divergence"] is not None)
    dense = place[2] == "dense"
    return Row(
        *place, records[0]["setting"], len(good), len(records) - len(good),
        prompt_tokens=_over(good, "prompt_tokens"), score=_over(good, "score"),
        output_tokens=_over(good, "output_tokens"), kl_mean=mean(kl), kl_p99=quantile(kl, 0.99),
        same_top=mean(x for r in good for x in r.get("same_top", [])),
        diverged=len(apart) / len(good) if good and not dense else None, divergence=quantile(apart, 0.5),
        hit_rate=_over(good, "hit_rate"), skipped=_over(good, "skipped"),
        wait_share=_over(good, "wait_share"),
        device_bytes=_over(good, "device_bytes"), dense_bytes=_over(good, "dense_bytes"),
    )  # fmt: skip


def _over(records: Iterable[Record], name: str) -> float | None:
    return mean(r.get(name) for r in records)


def mean(values: Iterable[float | None]) -> float | None:
    """Over those that are not None; None if there is none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Of sorted values: the smallest that at least the share q of them do not exceed."""
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else None


def show(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def ratio(dense: float | None, device: float | None) -> str:
    """How many times less the device holds than dense mode would."""
    return f"{dense / device:.2f}x" if dense and device else ""
