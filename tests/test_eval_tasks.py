"""Tasks, scores, data and settings of the evaluation: lengths, seeds, answers, refusals.

Owns: what can be checked without a model. Must not know: how a sample is decoded.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from make_tokenizers import CHATML, write_bpe_folder

from nano_oasis.config import ConfigError
from nano_oasis.eval.data import DataError, data_samples, read_data
from nano_oasis.eval.decoder import draft_next
from nano_oasis.eval.results import quantile
from nano_oasis.eval.score import score_answer
from nano_oasis.eval.settings import Setting, make_settings, parse_budget
from nano_oasis.eval.tasks import TaskError, all_tasks, choose_tasks, encode_prompt, make_sample, place
from nano_oasis.tokenizer import load_tokenizer

CONTEXT = 3000
TASKS = all_tasks()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_bpe_folder(tmp_path_factory.mktemp("bpe"), chat_template=CHATML))


@pytest.fixture(scope="module")
def texts(tokenizer):
    """Task name -> its sample 0 and the prompt's text."""
    samples = {name: make_sample(task, tokenizer, CONTEXT, 0, seed=7) for name, task in TASKS.items()}
    return {name: (s, tokenizer.decode(s.ids)) for name, s in samples.items()}


def test_scores_are_rulers():
    assert score_answer("it is 12, and 34.", ["12", "34"]) == 100
    assert score_answer("it is 12.", ["12", "34"]) == 50
    assert score_answer("it is OSLO", ["Oslo"]) == 100
    assert score_answer("nothing", ["12", "34"]) == 0
    assert score_answer("it is 34", ["12", "34"], "part") == 100
    assert score_answer("nothing", ["12", "34"], "part") == 0
    with pytest.raises(ValueError, match="match: must be one of all, part"):
        score_answer("a", ["a"], "some")
    with pytest.raises(ValueError, match="at least one reference"):
        score_answer("a", [])


def test_the_tasks_are_the_promised_ones():
    niah = ["single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3"]
    niah += ["multivalue", "multiquery"]
    rest = ["passkey", "vt", "cwe", "fwe", "qa_1", "qa_2", "records", "state"]
    assert list(TASKS) == [f"niah_{n}" for n in niah] + rest
    assert [t.name for t in choose_tasks(["vt", "niah", "vt"])] == ["vt", *(f"niah_{n}" for n in niah)]
    with pytest.raises(TaskError, match="no task 'niahs'; the tasks are niah_single_1, "):
        choose_tasks(["niahs"])


@pytest.mark.parametrize("name", TASKS)
def test_length_is_exact_and_samples_are_seeded(tokenizer, texts, name):
    sample, _ = texts[name]
    task = TASKS[name]
    total = len(sample.ids) + sample.max_new
    # Longer by one unit of filler would not fit. The longest unit is a line of two uuids, or of facts.
    assert CONTEXT - 260 <= total <= CONTEXT
    assert make_sample(task, tokenizer, CONTEXT, 0, seed=7) == sample
    others = [make_sample(task, tokenizer, CONTEXT, 1, 7), make_sample(task, tokenizer, CONTEXT, 0, 8)]
    assert len({s.ids for s in [sample, *others]}) == 3
    short = make_sample(task, tokenizer, CONTEXT, 0, 7, max_new=5)
    assert short.max_new == 5 and len(short.ids) >= len(sample.ids)
    with pytest.raises(TaskError, match=rf"context: 40 tokens are too few for {name}: .* give at least \d+"):
        make_sample(task, tokenizer, 40, 0, 7)


def test_filler_grows_to_the_last_unit(tokenizer):
    import random

    draft = TASKS["niah_single_1"].draft(random.Random("x"), 1000)
    lengths = [len(encode_prompt(tokenizer, draft.render(n), draft.lead)) for n in (0, 10, 11)]
    assert lengths[0] < lengths[1] < lengths[2] <= lengths[1] + 8


@pytest.mark.parametrize("name", [n for n in TASKS if n != "state"])
def test_answers_are_in_the_prompt(texts, name):
    sample, text = texts[name]
    assert sample.answers and all(text.count(a) for a in sample.answers)


def test_needles(texts):
    number, uuid = r"\d{7}", r"[0-9a-f-]{36}"
    kinds = {"niah_single_2": (1, number), "niah_single_3": (1, uuid)}
    kinds |= {"niah_multikey_1": (4, number), "niah_multivalue": (4, number)}
    for name, (count, kind) in kinds.items():
        sample, text = texts[name]
        found = re.findall(rf"magic \w+s for ([\w-]+) is: ({kind})\.", text)
        assert len(found) == count
        asked = re.search(r"What (?:is|are all) the special magic \w+ for ([\w-]+) mentioned", text)[1]
        assert {v for k, v in found if k == asked} == set(sample.answers)
    for name in ("niah_multikey_2", "niah_multikey_3"):
        lines = re.findall(r"for (\S+) is: (\S+)\.", texts[name][1])
        assert len(lines) > 8 and len(set(lines)) == len(lines)
        assert len({key for key, _ in lines}) == len(lines)
    assert len(texts["niah_multiquery"][0].answers) == 4


def test_variables_follow_the_chain(texts):
    sample, text = texts["vt"]
    text = text[text.rindex("Follow the chain") :]
    value = re.search(r"assigned the value (\d+) in the text above", text)[1]
    known = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        if source in known:
            known.add(name)
    assert known - {value} == set(sample.answers) and len(sample.answers) == 5


def test_frequencies_decide(texts):
    sample, text = texts["cwe"]
    listed = Counter(re.findall(r"\d+\. (\w+)", text[text.rindex("Below is a numbered") :]))
    assert {w for w, _ in listed.most_common(10)} == set(sample.answers)
    assert [n for _, n in listed.most_common(11)] == [10] * 10 + [
        1
    ]  # RULER's thirty and three need a longer context
    sample, text = texts["fwe"]
    body = text.split("\n\n")[1]
    counts = Counter(w for w in body.split() if w != "...")
    first = counts.most_common(4)
    assert tuple(w for w, _ in first[:3]) == sample.answers and first[2][1] > first[3][1]


def test_questions_have_one_answer(texts):
    sample, text = texts["qa_1"]
    person = re.search(r"In which city does (.+) work\?", text)[1]
    assert re.findall(rf"{person} works as an? \w+ in (\w+)\.", text) == list(sample.answers)
    sample, text = texts["qa_2"]
    job, city = re.search(r"works as a (\w+) in (\w+) like best\?", text).groups()
    (person,) = re.findall(rf"(\w+ \w+) works as a {job} in {city}\.", text)
    assert re.findall(rf"{person} likes (\w+) best", text) == list(sample.answers)


def test_long_answers_are_what_the_text_says(texts):
    sample, text = texts["records"]
    found = re.findall(r"Order \d+: .*?, amount (\d+)\. Note", text)
    assert tuple(found) == sample.answers and len(set(found)) == 24
    sample, text = texts["state"]
    final = dict(re.findall(r"Step \d+: the (\w+) is painted (\w+)\.", text))
    assert sample.answers == tuple(f"final: the {r} is {c}" for r, c in final.items())


def test_needles_are_placed_in_order_at_sentence_ends():
    words = ["a", "b.", "c", "d.", "e", "f."] * 10
    text = place(words, ["N1.", "N2.", "N3."], [0.0, 0.5, 1.0])
    assert text.split().index("N1.") < text.split().index("N2.") < text.split().index("N3.")
    assert [w for w in text.split() if not w.startswith("N")] == words
    assert all(m == "." for m in re.findall(r"(\S) N[23]", text))


# --- data --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"data: \S+x.jsonl: the file is empty"),
        (b'{"prompt": "a"}\nnot json\n', r"x.jsonl:2: is not JSON"),
        (b'{"prompt": "a"}\n\n[1]\n', r"x.jsonl:3: must be an object"),
        (b'{"promt": "a"}', r"x.jsonl:1: unknown field 'promt'; the fields are prompt, messages, answer"),
        (b'{"answer": "a"}', r"x.jsonl:1: needs exactly one of prompt and messages"),
        (b'{"prompt": 3}', r"x.jsonl:1: prompt must be a non-empty text, got 3"),
        (b'{"messages": []}', r"x.jsonl:1: messages must be a non-empty list"),
        (b'{"prompt": "a", "answer": 3}', r"x.jsonl:1: answer must be a text or a list of texts"),
        (b"ok\n\xff", r"x.jsonl:2: is not UTF-8"),
    ],
)
def test_bad_data_is_named(tmp_path, content, words):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_data(tmp_path / "x.jsonl")


def test_data_becomes_samples(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"nowhere\.txt: No such file"):
        read_data(tmp_path / "nowhere.txt")
    lines = (
        '{"prompt": "hello world"}\n{"messages": [{"role": "user", "content": "hi"}], "answer": ["a", "b"]}\n'
    )
    (tmp_path / "p.jsonl").write_text(lines)
    prompts = read_data(tmp_path / "p.jsonl")
    one, two = data_samples(prompts, tokenizer, [900], 5, 4, 10, 4096)
    assert one.max_new == 10 and "hello world" in tokenizer.decode(one.ids) and not one.answers
    assert two.answers == ("a", "b") and two.context == 0
    with pytest.raises(DataError, match=r"p.jsonl:1: prompt has \d+ tokens, and 10 are kept .* at most 12"):
        data_samples(prompts, tokenizer, [900], 5, 4, 10, 12)
    folder = tmp_path / "code"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.py").write_text("alpha = 1\n" * 100)
    (folder / ".git/b").write_text("hidden")
    (folder / "c.bin").write_bytes(b"\0\1")
    text = read_data(folder)
    assert text.name == "code" and "a.py" in text.text and "hidden" not in text.text
    ids = tokenizer.encode(text.text)
    samples = data_samples(text, tokenizer, [100], 3, 20, 10, 4096)
    assert [(len(s.ids), len(s.teacher)) for s in samples] == [(100, 20)] * 3
    assert samples[0].ids == tuple(ids[:100]) and samples[0].teacher == tuple(ids[100:120])
    assert samples[2].ids + samples[2].teacher == tuple(ids[-120:])
    with pytest.raises(
        DataError, match=r"code: its \d+ tokens are fewer than --context 9000 plus --steps 20"
    ):
        data_samples(text, tokenizer, [9000], 3, 20, 10, 4096)


# --- settings, and the small parts of the figures ----------------------------------------------------------
def test_settings_are_the_product_and_refuse_by_name():
    settings = make_settings([64, "1/8"], ["fourbit", "mean"], ["previous"], ["wait"], [8, 32], [None])
    assert len(settings) == 8 and settings[0] == Setting("64") and settings[0].tokens(4000) == 64
    assert Setting().tokens(4000) == 500 and str(Setting()) == "fourbit 1/8"
    assert str(Setting("64", "mean", "previous", "repair", 32, 2)) == "mean 64 repair block 32 head groups 2"
    for bad in ("0", "-1", "1.5", "9/8", "1/0", "x", ""):
        with pytest.raises(ConfigError, match="budget: "):
            parse_budget(bad)
    with pytest.raises(ConfigError, match="selector: must be one of"):
        make_settings([64], ["fivebit"], ["previous"], ["repair"], [16], [1])


def test_drafts_copy_the_longest_newest_match():
    assert draft_next([1, 2, 3, 9, 1, 2, 3]) == 9
    assert draft_next([1, 2, 3, 4, 5, 3, 7, 2, 3]) == 4  # two tokens match before one does
    assert draft_next([3, 4, 3, 7, 3]) == 7  # the newest match
    assert draft_next([1, 2, 3]) == 3


def test_quantile_is_a_value_that_occurs():
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0 and quantile(list(range(1, 101)), 0.99) == 99
    assert quantile([5.0], 0.99) == 5.0 and quantile([], 0.5) is None
