"""Speculation: what fails, what is short of room, and what a draft is told, on the fake model.

Owns: these checks. Must not know: real models, the policy.
"""

from dataclasses import replace

import pytest
import torch
from draft_fakes import FakeDraft, KnownDraft, RandomDraft
from fakes import VOCAB, Caller, FakeModel, make_engine, run, same, solo, turn

from nano_oasis.request import SamplingParams
from nano_oasis.scheduler.draft_policy import FixedDrafts
from nano_oasis.spec.auto import AutoDraft
from nano_oasis.spec.head_draft import HeadDraft

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("what", ["observe", "forget", "count"])
def test_whatever_fails_in_a_draft_costs_only_drafts(what, caplog):
    draft = RandomDraft(VOCAB)

    def fail(*args):
        raise RuntimeError("injected draft failure")

    if what == "count":
        draft.propose = lambda rows, kv: [[]] * (len(rows) + 1)
    else:
        setattr(draft, what, fail)
    engine = make_engine(draft=draft, policy=FixedDrafts(3))
    callers = [Caller(engine, [4, i], GREEDY) for i in range(3)]
    turn(engine)
    engine.abort(callers[2].submission)
    run(engine, *callers[:2])
    for i in range(2):
        same(callers[i].outputs, solo([4, i], GREEDY))
    assert engine.num_live == 0
    assert len([r for r in caplog.records if "not logged again" in r.message]) == 1


def test_a_waiting_request_gets_its_blocks_before_drafts_do():
    engine = make_engine(num_blocks=24, block_size=1, draft=RandomDraft(VOCAB, 3), policy=FixedDrafts(5))
    first = Caller(engine, [1, 2], SamplingParams(max_tokens=18, temperature=0, ignore_eos=True))
    for _ in range(2):
        turn(engine)
    late = Caller(engine, list(range(9)), SamplingParams(max_tokens=1, temperature=0))
    run(engine, late, limit=4)
    run(engine, first)


class FakeHead:
    """A draft head that knows FakeModel: right whenever it is given the state its newest token came from."""

    def step(self, states, tokens):
        states = (states.double() * 31 + tokens[:, None] + 11) % 1_000_003
        return states.float(), FakeModel().logits(states).argmax(1), torch.ones(len(tokens))


@pytest.mark.parametrize("draft", ["head", "auto"])
def test_the_head_is_given_the_states_its_newest_tokens_came_from(draft):
    """After chunked prefill, rejections, preemption and a prefix found in the cache."""
    head = HeadDraft(FakeHead())
    engine = make_engine(
        num_blocks=40, block_size=2, max_num_batched_tokens=16, policy=FixedDrafts(3),
        draft=head if draft == "head" else AutoDraft(head),
    )  # fmt: skip
    told = []
    observe = engine.runner.draft.observe

    def watch(rows, right, hidden):
        told.extend((len(row.drafts), count) for row, count in zip(rows, right, strict=True))
        observe(rows, right, hidden)

    engine.runner.draft.observe = watch
    prompts = [[5, 6, 7, i] for i in range(5)] + [[5, 6, 7, 0]]
    params = [replace(GREEDY, temperature=0.9 * (i == 2), seed=1) for i in range(6)]
    callers = [Caller(engine, p, s) for p, s in zip(prompts, params, strict=True)]
    run(engine, *callers)
    for caller, prompt, one in zip(callers, prompts, params, strict=True):
        same(caller.outputs, solo(prompt, one))
    proposed, right = (sum(x) for x in zip(*told, strict=True))
    assert proposed > 60 and right > 0.75 * proposed  # wrong for the one that samples, and after n-grams
    assert sum(r.num_preemptions for c in callers for r in c.submission.requests) > 0


def test_a_guess_that_breaks_the_step_does_not_fail_its_request():
    """A token nobody asked for, at which the model fails: the rows are tried again without guesses."""
    want = solo([4, 5], GREEDY)
    bad = next(t for t in range(VOCAB) if t not in want[0].token_ids)
    model, draft = FakeModel(), FakeDraft()
    draft.guess = lambda request, count: [bad]
    model.fail_on = bad
    engine = make_engine(draft=draft, policy=FixedDrafts(2), model=model)
    caller = Caller(engine, [4, 5], GREEDY)
    run(engine, caller)
    same(caller.outputs, want)
    assert draft.proposed > 0 and engine.scheduler.blocks.num_used == 0


def test_without_a_block_to_spare_drafts_fill_the_newest_one():
    """Somebody waits: a row has as many drafts as fit, not none."""
    engine = make_engine(num_blocks=4, block_size=8, draft=RandomDraft(VOCAB), policy=FixedDrafts(5))
    first = Caller(engine, [1, 2], SamplingParams(max_tokens=25, temperature=0, ignore_eos=True))
    turn(engine)
    late = Caller(engine, list(range(25)), SamplingParams(max_tokens=1, temperature=0))
    seen = []
    plan = engine.scheduler.plan

    def watch():
        step = plan()
        seen.extend((row.request.num_tokens, row.max_drafts) for row in step.rows if row.is_decode)
        return step

    engine.scheduler.plan = watch
    run(engine, first, late)
    counts = {tokens % 8: count for tokens, count in seen if tokens < 20}  # far from max_tokens
    assert counts.get(6, 2) == 2 and counts.get(5, 3) == 3 and counts.get(2, 5) == 5 and len(counts) > 3
    assert any(0 < count < 5 for count in counts.values())


def test_an_accepted_draft_after_the_end_is_not_counted_as_given():
    """A step of six tokens of which a stop token is the third gave three."""
    tokens = solo([1, 2], GREEDY)[0].token_ids
    at = next(i for i in range(8, len(tokens)) if tokens[i] not in tokens[:i] and (i - 1) % 6 < 5)
    params = replace(GREEDY, stop_token_ids=(tokens[at],))
    draft = KnownDraft({((1, 2), 0, params): list(tokens)}, VOCAB, 1.0)
    engine = make_engine(draft=draft, policy=FixedDrafts(5))
    caller = Caller(engine, [1, 2], params)
    run(engine, caller)
    given = len(caller.outputs[0].token_ids)
    assert given == at + 1
    text = engine.metrics.render().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    found = {k.split("{")[0].removeprefix("nano_oasis:"): float(v) for k, v in values.items()}
    steps = found["request_tokens_per_step_count"]
    assert found["request_tokens_per_step_sum"] == given - 1  # the first came with the prompt
    assert found["spec_decode_num_accepted_tokens_total"] == given - 1 - steps
