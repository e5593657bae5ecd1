"""The evaluation end to end, on tiny models: exactness, resuming, failures, the report, the command line.

Owns: what needs a model. Must not know: tasks' words (test_eval_tasks.py).
"""

from __future__ import annotations

import html.parser
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from make_checkpoints import make_hf
from make_tokenizers import CHATML, write_bpe_folder

from nano_oasis.config import ConfigError
from nano_oasis.eval import api, run
from nano_oasis.eval.__main__ import build_parser, main
from nano_oasis.eval.decoder import Decoder
from nano_oasis.eval.recall import Choice, RecordingView, measure_recall
from nano_oasis.eval.session import Session
from nano_oasis.eval.settings import Setting
from nano_oasis.eval.tasks import Sample
from nano_oasis.tokenizer import load_tokenizer

SMALL = {"tasks": "passkey", "context": 400, "samples": 2, "steps": 6, "max_new_tokens": 8, "threads": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {}
    for family in ("llama", "gemma3"):
        paths[family] = tmp_path_factory.mktemp(family)
        make_hf(family, paths[family], vocab_size=640)
        write_bpe_folder(paths[family], chat_template=CHATML)
    return paths


def samples_of(lengths, teacher=()):
    generator = torch.Generator().manual_seed(0)
    ids = [tuple(torch.randint(6, 600, (n,), generator=generator).tolist()) for n in lengths]
    pairs = enumerate(zip(lengths, ids, strict=True))
    return [Sample("text", i, n, x, 20, teacher=teacher) for i, (n, x) in pairs]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def session(request, folders):
    path = folders[request.param]
    decoder = Decoder.load(path, load_tokenizer(path), 400)
    # 1: nothing but the last token; 16, 17: one whole block and 0 or 1 token; the others: shared device
    session = Session(decoder, samples_of([2, 17, 18, 100, 161, 200]), 20)
    for row in range(len(session.samples)):
        session.prefill(row)
    yield session
    session.close()


def dense_outputs(session, rows, length):
    kept = {}

    def keep(step, going, logits):
        for i, row in zip(going, logits, strict=True):
            kept.setdefault(i, []).append(row)

    outputs, _ = session.decoder.play(session.dense, session.dense_requests(rows), [length] * len(rows), keep)
    return outputs, kept


@pytest.mark.parametrize(
    ("block", "groups", "predictor"), [(8, 1, "current"), (16, 2, "previous"), (8, 2, "lookahead")]
)
def test_a_budget_for_everything_equals_dense(session, block, groups, predictor):
    """From sealed blocks, through the tier, the tickets and the kernels: nothing is lost or misplaced."""
    rows = range(len(session.samples))
    outputs, logits = dense_outputs(session, rows, 20)
    setting = Setting("400", "mean", predictor, "wait", block, groups)
    worst = 0.0

    def compare(step, going, sparse):
        nonlocal worst
        for i, row in zip(going, sparse, strict=True):
            worst = max(worst, float((row - logits[i][step]).abs().max()))

    got, errors, measured = session.oasis(setting, rows, [20] * len(rows), compare)
    assert got == outputs and not errors and worst < 2e-3
    assert measured.misses == measured.fetched_now and not measured.skipped
    # The same host blocks again, in another order and company: decoding did not spoil them.
    again, _, _ = session.oasis(setting, [5, 3], [20, 20])
    assert again == [outputs[5], outputs[3]]


def test_drafts_foretell_and_a_simulated_link_is_waited_for(session):
    """A lookahead setting orders by its guesses' queries; a slow wire costs time and changes nothing else."""
    rows, lengths, slow = [3, 4, 5], [8, 8, 8], Session(session.decoder, session.samples, 20, bandwidth=2e6)
    slow.cache, slow.dense = session.cache, session.dense
    try:
        for predictor in ("previous", "lookahead"):
            setting, ahead = Setting("96", "exact", predictor, "wait", 8), predictor == "lookahead"
            want, _, fast = session.oasis(setting, rows, lengths)
            with slow._oasis(setting, rows) as (kv, requests):
                got, errors = session.decoder.play(kv, requests, lengths, drafts=ahead)
                measured = kv.lookahead.agreement["lookahead"].count
                assert kv.coordinator.stats.exposed_s > fast.exposed_s
            assert got == want and not errors  # every miss is waited for: the same blocks are read
            assert (measured > 0) == ahead
    finally:
        slow.close()


def test_means_stand_in_for_what_is_missing(session):
    """Of prefixes that no engine sealed: with the right means estimating is nearer to dense than skipping."""
    rows = [3, 4, 5]
    _, dense = dense_outputs(session, rows, 1)
    far = {}
    for policy in ("estimate", "skip"):
        errors = []

        def compare(step, going, sparse, errors=errors):
            errors += [float((row - dense[i][0]).norm()) for i, row in zip(going, sparse, strict=True)]

        with session._oasis(Setting("96", "exact", "previous", policy), rows) as (kv, requests):
            for seat in kv.seats.values():
                seat.cold = False  # nothing is fetched: all that is wanted and sealed long ago is missing
            session.decoder.play(kv, requests, [1] * 3, compare)
            assert kv.stats.estimated == (kv.stats.misses if policy == "estimate" else 0)
            assert kv.stats.misses > 0
        far[policy] = sum(errors)
    assert far["estimate"] < far["skip"]


def test_pressure_is_real(session):
    rows = [3, 4, 5]
    outputs, _ = dense_outputs(session, rows, 20)
    with session._oasis(Setting("96", "mean"), rows) as (kv, requests):
        assert all(not s.dense and s.cold for s in kv.seats.values())
        session.decoder.play(kv, requests, [20] * 3)
        kv.check()
        for request in requests:
            seat = kv.seats[request.id]
            assert not seat.dense and seat.budget == 12
        held = int((kv.residency.slot_of >= 0).sum()) + len(kv.flights)
        assert held <= kv.pool.num_slots - kv.reserve + kv.planes * len(rows)
        assert kv.pool.num_slots == kv.reserve + sum(s.floor for s in kv.seats.values())
    assert all(outputs)


def test_recall_grows_with_the_budget_and_the_oracle_leads(session):
    row, teacher = 5, list(range(100, 112))
    choices = [Choice(s, b, 8, g) for s in ("mean", "exact") for b in (48, 96, 400) for g in (1, 2)]
    recall = measure_recall(session, row, teacher, choices)
    c = session.decoder.config
    full = [i for i in range(c.num_layers) if c.window(i) is None]
    assert all(r.layers == full for r in recall.values())
    for g in (1, 2):
        small, middle, whole = (recall[Choice("mean", b, 8, g)] for b in (48, 96, 400))
        assert all(a < b < 1 for a, b in zip(small.mass, middle.mass, strict=True))
        assert whole.mass == pytest.approx([1.0] * len(full), abs=1e-5)
        exact = recall[Choice("exact", 48, 8, g)]
        assert sum(exact.mass) > sum(small.mass)
        assert exact.found["current"] == exact.found["oracle"] == [1.0] * len(full)
        assert exact.read["current"] == exact.read["oracle"] == small.read["oracle"]
        assert all(0 <= x < 1 for p in ("lookahead", "previous") for x in small.found[p])
        assert whole.found["previous"] == [1.0] * len(full) or None in whole.found["previous"]


def test_a_draft_that_is_right_sees_what_the_next_step_sees(session, monkeypatch):
    teacher = list(range(100, 108))
    last = session.samples[5].ids[-1]  # what follows is 100, 101, ..
    monkeypatch.setattr(
        "nano_oasis.eval.recall.draft_next", lambda known: 100 if known[-1] == last else known[-1] + 1
    )
    (recall,) = measure_recall(session, 5, teacher, [Choice("mean", 48, 8, 1)]).values()
    assert recall.drafts_right == 1.0
    assert recall.read["lookahead"] == pytest.approx(recall.read["current"], abs=1e-6)
    assert recall.found["lookahead"] == recall.found["current"]


def test_the_recording_pass_is_the_model(session):
    """Its hidden states are those of dense decoding: the mask and the positions of its rows are right."""
    outputs, logits = dense_outputs(session, [5], 6)
    view = RecordingView(session, 5, 6, [])
    tokens = torch.tensor([session.samples[5].ids[-1], *outputs[0][:5], *[7] * 5])
    with torch.inference_mode():
        model = session.decoder.model
        got = model.logits(model.forward(tokens, view.positions, view))[:6, : session.decoder.num_tokens]
    assert float((got - torch.stack(logits[0])).abs().max()) < 2e-3


# --- runs --------------------------------------------------------------------------------------------------
def test_a_run_prefills_once_and_continues(folders, tmp_path, monkeypatch):
    prefills = []
    real = Session.prefill
    monkeypatch.setattr(Session, "prefill", lambda self, row: (prefills.append(row), real(self, row)))
    options = {**SMALL, "budget": ["64", "1/2"], "selector": ["mean", "exact"], "output": tmp_path / "out"}
    told = []
    first = run(str(folders["llama"]), **options, progress=lambda *x: told.append(x))
    assert prefills == [0, 1] and not first.failed
    assert first.labels == ["dense", "mean 64", "mean 1/2", "exact 64", "exact 1/2"]
    assert [len(first.runs), len(first.recalls)] == [10, 8]
    one = run(str(folders["llama"]), **options, recall_samples=1)
    assert [len(one.runs), len(one.recalls)] == [10, 4] and len(prefills) == 2
    assert not run(str(folders["llama"]), **options, recall_samples=0).recalls
    assert told[-1][1:] == (18, 18)
    for r in first.runs:
        if r["label"] != "dense":
            assert r["budget_tokens"] == (64 if "64" in r["label"] else 200)
            assert (
                r["device_bytes"] > 0 and 0 <= r["hit_rate"] <= 1 and len(r["kl"]) == len(r["same_top"]) > 0
            )
    # Everything is there: nothing is loaded.
    monkeypatch.setattr(Decoder, "load", None)
    assert run(str(folders["llama"]), **options).to_json() == first.to_json()
    monkeypatch.undo()
    # Killed while writing: half a line goes, what it held is made again, and nothing else.
    file = tmp_path / "out/results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lost = next(i for i, line in enumerate(lines) if '"label": "mean 1/2"' in line)
    file.write_text("".join(lines[:lost] + lines[lost + 1 :]) + lines[lost][:50])
    again = run(str(folders["llama"]), **options)
    assert len(file.read_text().splitlines()) == len(lines) and not again.failed
    assert [r["key"] for r in again.records] == [r["key"] for r in first.records]
    more = run(str(folders["llama"]), **{**options, "selector": "mean", "steps": 4})
    assert not {r["key"] for r in more.records} & {r["key"] for r in first.records}


def test_one_failing_sample_does_not_lose_the_run(folders, tmp_path, monkeypatch):
    real = Session.prefill

    def prefill(self, row):
        if self.samples[row].index == 1:
            raise RuntimeError("the disk is on fire")
        real(self, row)

    options = {**SMALL, "samples": 3, "selector": "mean", "output": tmp_path}
    monkeypatch.setattr(Session, "prefill", prefill)
    result = run(str(folders["llama"]), **options)
    assert {(r["index"], r["error"]) for r in result.failed} == {(1, "RuntimeError: the disk is on fire")}
    assert [(r.samples, r.failed) for r in result.rows] == [(2, 1), (2, 1)]
    assert "the disk is on fire" in (tmp_path / "report.html").read_text()
    monkeypatch.undo()
    assert not run(str(folders["llama"]), **options).failed  # what failed is tried again


def test_a_failing_setting_costs_no_other(folders, monkeypatch):
    real = Session.oasis

    def oasis(self, setting, rows, *rest):
        if setting.selector == "exact" and any(self.samples[i].index == 0 for i in rows):
            raise ValueError("no room")
        return real(self, setting, rows, *rest)

    monkeypatch.setattr(Session, "oasis", oasis)
    result = run(str(folders["llama"]), **{**SMALL, "selector": ["exact", "mean"]})
    assert [(r.label, r.samples, r.failed) for r in result.rows] == [
        ("dense", 2, 0), ("exact 1/8", 1, 1), ("mean 1/8", 2, 0)
    ]  # fmt: skip
    monkeypatch.setattr("nano_oasis.eval.sweep.measure_recall", None)
    result = run(str(folders["llama"]), **SMALL)
    assert len(result.failed) == 2 and not any(r.failed for r in result.rows) and not result.recalls


def test_texts_prompts_and_answers(folders, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello", "answer": "zzz"}\n{"prompt": "a b"}\n')
    data = [tmp_path / "text.txt", tmp_path / "p.jsonl"]
    result = run(str(folders["llama"]), data=data, **{**SMALL, "tasks": ()}, selector="mean")
    text, prompts = (result.find(g, c, "mean 1/8") for g, c in (("text.txt", 400), ("p", 0)))
    assert text.score is None and text.kl_mean >= 0 and text.output_tokens <= 6 and text.prompt_tokens == 400
    assert prompts.score == 0 and prompts.samples == 2 and result.averaged() == []
    assert all(len(r["kl"]) == 6 for r in result.runs if r["group"] == "text.txt" and r["setting"])


def test_the_report_stands_alone(folders, tmp_path):
    options = {**SMALL, "context": [300, 400], "budget": ["64", "1/2"], "selector": ["mean", "exact"]}
    result = run(str(folders["gemma3"]), **options, output=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<script|<link|@import|url\(|https?:", page)
    assert page.count("<svg") >= 5 and page.count("<title>") > 20 and "prefers-color-scheme: dark" in page
    open_tags = []

    class Balance(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "i"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            if tag != "i":
                assert open_tags.pop() == tag

        def handle_startendtag(self, tag, attrs):
            pass

    Balance().feed(page)
    assert not open_tags
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert saved["average"]["mean 64"]["kl_mean"] == result.average("mean 64")["kl_mean"] > 0
    assert len(saved["rows"]) == 2 * 5 and {p["selector"] for p in saved["predictors"]} == {"mean", "exact"}
    assert result.table().row_count == 10 + 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing to evaluate"),
        ({"tasks": "vt", "context": 5000}, "context: 5000 tokens are more than the model's 4096"),
        ({"tasks": "vt", "context": "x"}, "context: must be whole numbers"),
        ({"tasks": "vt", "link_bandwidth": "fast"}, "link_bandwidth: expected a number of bytes"),
        ({"tasks": "vt", "head_groups": 3}, "head_groups: 3 does not divide the model's 2 KV heads"),
        ({"tasks": "vt", "samples": 0}, "samples: must be a whole number of at least 1, got 0"),
        ({"tasks": "vt", "miss_policy": "hope"}, "miss_policy: must be one of"),
        ({"tasks": "vt", "dtype": "int3"}, "dtype: must be one of"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(folders, options, words, monkeypatch):
    monkeypatch.setattr(Decoder, "load", None)  # before the slow part
    with pytest.raises(ConfigError, match=words):
        api.run(str(folders["llama"]), **options)


def test_the_command_line(folders, tmp_path, capsys):
    assert main(["--tasks", "list"]) == 0 and "niah_multikey_2" in capsys.readouterr().out
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{oops\n')
    (tmp_path / "empty.txt").write_text("")
    model = str(folders["llama"])
    for arguments, words in (
        (["--model", str(tmp_path / "nothing"), "--tasks", "vt"], "no such file or folder"),
        (["--model", model, "--data", str(tmp_path / "bad.jsonl")], "bad.jsonl:2: is not JSON"),
        (["--model", model, "--data", str(tmp_path / "empty.txt")], "empty.txt: the file is empty"),
        (["--model", model, "--tasks", "vt", "--block", "x"], "--block: expected whole numbers"),
        (["--model", model, "--tasks", "tv"], "no task 'tv'"),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error
    good = f"--model {model} --tasks passkey --context 400 --samples 1 --selector mean".split()
    good += ["--steps", "4", "--max-new-tokens", "5", "--threads", "1", "--output", str(tmp_path / "out")]
    assert main([*good, "--budget", "64,1/2"]) == 0
    said = capsys.readouterr().out
    assert "mean 64 " in said and "mean 1/2" in said and "passkey" in said and "report.html" in said


def test_documented_commands_are_understood():
    page = (Path(__file__).parent.parent / "docs/15-evaluation.md").read_text()
    commands = re.findall(r"^\.venv/bin/python -m nano_oasis\.eval (.+)$", page, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        build_parser().parse_args(shlex.split(command))
