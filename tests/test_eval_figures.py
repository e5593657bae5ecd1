"""What the evaluation's figures leave out, and what it says about itself, on a tiny model.

Owns: names of settings and models, averages, notes, what stops a run early. Must not know: exactness
(test_eval.py).
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from make_checkpoints import make_hf
from make_tokenizers import CHATML, write_bpe_folder

from nano_oasis.config import ConfigError
from nano_oasis.eval import api, run
from nano_oasis.eval.__main__ import main
from nano_oasis.eval.results import Result
from nano_oasis.model import Model

SMALL = {"tasks": "passkey", "context": 400, "samples": 1, "steps": 4, "max_new_tokens": 6, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_hf("llama", path, vocab_size=640)
    write_bpe_folder(path, chat_template=CHATML)
    return path


def test_budgets_that_come_to_the_same_are_rows_of_their_own(folder, tmp_path):
    """400 / 8 = 50: the same tokens under two names, here, but not in a context of 480."""
    result = run(str(folder), **SMALL | {"context": [400, 480]}, budget="50,1/8", output=tmp_path)
    assert [(r.context, r.label, r.samples) for r in result.rows] == [
        (c, label, 1) for c in (400, 480) for label in ("dense", "fourbit 50", "fourbit 1/8")
    ]
    assert [(p["budget"], p["block"]) for p in result.predictors()] == [("50", 8), ("1/8", 8)]
    assert "1/8" in (tmp_path / "report.html").read_text()
    again = run(str(folder), **SMALL, budget="2/16", output=tmp_path)  # 50 tokens as well
    assert again.labels == ["dense", "fourbit 2/16"]


def test_a_model_is_known_by_its_bytes(folder, tmp_path):
    """Two of the same shape, names and sizes are not the same model."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (weights,) = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1000:] = bytes(1000)  # zeros in some tensor
    weights.write_bytes(data)
    found = {r["key"] for r in run(str(folder), **SMALL).records}
    assert found.isdisjoint(r["key"] for r in run(str(other), **SMALL).records)


def test_logits_that_are_no_numbers_are_a_failure(folder, monkeypatch, tmp_path):
    """KL is then NaN, and NaN equals dense's NaN at every step."""
    logits = Model.logits
    monkeypatch.setattr(Model, "logits", lambda self, *args: logits(self, *args) * torch.nan)
    result = run(str(folder), **SMALL, output=tmp_path)
    assert result.failed and all("not finite" in r["error"] for r in result.failed)
    json.loads((tmp_path / "eval.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_an_average_is_over_samples_that_every_setting_did():
    def record(index, label, score, status="ok"):
        return {"key": f"{index}{label}", "kind": "run", "group": "g", "context": 9, "index": index,
                "setting": None, "label": label, "status": status, "score": score, "output_tokens": index,
                "divergence": None, "error": "x"}  # fmt: skip

    records = [record(0, "dense", 0), record(1, "dense", 100), record(2, "dense", 60)]
    records += [record(0, "s", None, "failed"), record(1, "s", 100), record(2, "s", 50)]
    result = Result({"model": "m"}, records)
    assert (result.average("dense")["score"], result.average("s")["score"]) == (80, 75)
    assert result.average("s")["output_tokens"] == 1.5
    all_failed = Result({"model": "m"}, records[:3] + [record(i, "s", None, "failed") for i in range(3)])
    assert all_failed.average("s")["score"] is None


def test_reply_lengths_are_those_of_the_tasks_that_are_averaged():
    def record(group, label, score, tokens):
        return {"key": group + label, "kind": "run", "group": group, "context": 9, "index": 0,
                "setting": None, "label": label, "status": "ok", "score": score, "output_tokens": tokens,
                "divergence": None}  # fmt: skip

    result = Result({"model": "m"}, [record("can", "dense", 100, 10), record("cannot", "dense", 0, 90)])
    assert (result.average("dense")["score"], result.average("dense")["output_tokens"]) == (100, 10)


def test_notes_say_what_was_not_done_as_asked(folder, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one two three four five"}\n' * 3)
    options = SMALL | {"tasks": "", "context": 10**9}
    result = run(str(folder), **options, data=prompts, budget="8,1/1")
    assert result.meta["notes"] == [
        "p: the first 1 of 3 prompts (--samples)",
        "fourbit 8: raised to 48 tokens, the least, in 1 samples",
        "fourbit 8: the budget covers the whole prompt in 1 samples",
        "fourbit 1/1: raised to 48 tokens, the least, in 1 samples",
        "fourbit 1/1: the budget covers the whole prompt in 1 samples",
    ]
    assert "first 1 of 3" in result.table().caption


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "256,,512"}, "budget: a value is empty"),
        ({"selector": ""}, "selector: a value is empty"),
        ({"predictor": []}, "predictor: a value is empty"),
        ({"context": None}, "context: must be whole numbers"),
        ({"threads": -3}, "threads: must be a whole number of at least 0"),
        ({"recall_samples": -1}, "recall_samples: must be a whole number of at least 0"),
        ({"steps": 1}, "steps: must be a whole number of at least 2"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        run(str(folder), **SMALL | options)


def test_an_output_that_cannot_be_used_is_refused_before_any_work(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api, "make_sample", lambda *args: pytest.fail("prompts were made"))
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "taken" / "results.jsonl").mkdir(parents=True)
    for output in (file, file / "inside", tmp_path / "taken"):
        assert main(["--model", str(folder), "--tasks", "passkey", "--output", str(output)]) == 1
        assert "error: output: " in capsys.readouterr().err


def test_a_path_with_a_comma_is_one_path(folder, tmp_path):
    text = tmp_path / "a,b.txt"
    text.write_text("some words that are read again and again. " * 60)
    result = run(str(folder), **SMALL | {"tasks": "", "context": 60}, data=str(text))
    assert [r.group for r in result.rows] == ["a,b.txt"] * 2
    assert os.path.exists(text)
