"""Speculation: the same output as plain decoding, whatever the draft says, on the fake model."""

import math
import random
from dataclasses import replace

import pytest
import torch
from draft_fakes import BrokenDraft, KnownDraft, RandomDraft, request_of
from fakes import EOS, VOCAB, Caller, make_engine, run, same, solo, turn
from test_engine import random_params

from nano_oasis.request import Request, SampledToken, SamplingParams, ScheduledRow
from nano_oasis.sampler import Sampler, probabilities
from nano_oasis.scheduler.draft_policy import FixedDrafts
from nano_oasis.spec.draft import accepted
from nano_oasis.spec.ngram import NGramDraft

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def draft_named(name, expected, seed):
    if name == "ngram":
        return NGramDraft()
    if name == "random":
        return RandomDraft(VOCAB, seed)
    if name == "broken":
        return BrokenDraft()
    return KnownDraft(expected, VOCAB, {"right": 1.0, "wrong": 0.0, "mixed": 0.6}[name], seed)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["right", "wrong", "random", "mixed", "ngram", "broken"])
def test_random_schedules_equal_solo_whatever_the_draft_says(name, seed):
    """Prefix cache, chunked prefill, preemption, aborts, sampling and stops, with 1 to 5 draft tokens."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([1, 2, 4]), rng.randrange(40, 72)
    num_blocks //= block_size
    limit = num_blocks * block_size
    heads = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
    jobs = []
    for _ in range(16):
        prompt = (rng.choice(heads) + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 6))])[: limit - 1]
        jobs.append((prompt, random_params(rng)))
    wanted = [solo(p, params, block_size=block_size, max_model_len=limit) for p, params in jobs]
    expected = {
        (tuple(p), i, params): list(out.token_ids)
        for (p, params), outs in zip(jobs, wanted, strict=True)
        for i, out in enumerate(outs)
    }
    draft = draft_named(name, expected, seed)
    engine = make_engine(
        num_blocks, block_size, rng.choice([1, 3, 6]), rng.choice([6, 9, 40]), seed=seed, prefix=seed % 4 > 0,
        draft=draft, policy=FixedDrafts(1 + seed % 5),
    )  # fmt: skip
    callers, aborted = [], set[int]()
    while len(callers) < len(jobs) or not all(c.done for c in callers):
        for _ in range(rng.choice([0, 0, 1, 3])):
            if len(callers) < len(jobs):
                callers.append(Caller(engine, *jobs[len(callers)]))
        turn(engine)
        if rng.random() < 0.05 and len(aborted) < 3 and callers:
            aborted.add(rng.randrange(len(callers)))
            for i in aborted:
                engine.abort(callers[i].submission)
    assert engine.num_live == 0 and engine.scheduler.blocks.num_free == num_blocks
    for i, (caller, want) in enumerate(zip(callers, wanted, strict=True)):
        if i not in aborted:
            same(caller.outputs, want)
    if name == "right":
        assert draft.proposed == 0 or draft.right > 0
    if name == "wrong":
        assert draft.right == 0


def test_a_right_draft_gives_k_plus_one_tokens_a_step():
    prompt, expected = [1, 2, 3], solo([1, 2, 3], GREEDY)
    draft = KnownDraft({(tuple(prompt), 0, GREEDY): list(expected[0].token_ids)}, VOCAB, 1.0)
    engine = make_engine(draft=draft, policy=FixedDrafts(5))
    caller = Caller(engine, prompt, GREEDY)
    steps = 0
    while not caller.done:
        turn(engine)
        steps += 1
    same(caller.outputs, expected)
    assert steps == 1 + math.ceil(23 / 6)  # the prompt's step gives one token, then six at a time
    text = engine.metrics.render().decode()
    assert "spec_decode_num_accepted_tokens_total" in text and 'position="4"' in text
    assert 'request_tokens_per_step_sum{model_name="fake"} 23.0' in text
    assert 'request_tokens_per_step_count{model_name="fake"} 4.0' in text


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(temperature=0, max_tokens=7, ignore_eos=True), "length"),
        (SamplingParams(temperature=0, max_tokens=40), None),
        (SamplingParams(temperature=0, max_tokens=40, min_tokens=9, seed=3), None),
        (SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3), None),
    ],
)
def test_an_end_inside_an_accepted_run_cuts_where_plain_decoding_would(params, reason):
    for first in range(12):
        prompt = [first, 5, 9]
        plain = solo(prompt, params)
        stops = [t for t in plain[0].token_ids[2:6] if t != EOS]
        text = "".join(chr(48 + t) for t in stops[1:3])
        for extra in ({}, {"stop_token_ids": stops[:1]}, {"stop": text}):
            if not all(extra.values()):
                continue
            p = replace(params, **extra)
            want = solo(prompt, p)
            # The draft goes on where the request must stop.
            whole = list(plain[0].token_ids)
            engine = make_engine(
                draft=KnownDraft({(tuple(prompt), 0, p): whole}, VOCAB, 1.0), policy=FixedDrafts(5)
            )
            caller = Caller(engine, prompt, p)
            run(engine, caller)
            same(caller.outputs, want)
            assert reason is None or extra or caller.outputs[0].finish_reason == reason
            assert engine.scheduler.blocks.num_used == 0


def test_drafts_never_pass_the_context_limit_nor_preempt():
    engine = make_engine(num_blocks=4, block_size=4, draft=RandomDraft(VOCAB), policy=FixedDrafts(5))
    callers = [
        Caller(engine, [i, 1, 2, 3, 4], SamplingParams(temperature=0, ignore_eos=True)) for i in (7, 8)
    ]
    seen = []
    plan = engine.scheduler.plan

    def watch():
        step = plan()
        for row in step.rows:
            request = row.request
            reach = row.start + row.num_tokens + row.max_drafts
            assert reach < request.max_len or not row.max_drafts
            assert len(request.block_table) * 4 >= reach
            seen.append(row.max_drafts)
        return step

    engine.scheduler.plan = watch
    run(engine, *callers)
    assert max(seen) > 0
    for i, c in zip((7, 8), callers, strict=True):
        same(
            c.outputs, solo([i, 1, 2, 3, 4], SamplingParams(temperature=0, ignore_eos=True), max_model_len=16)
        )


def test_prompts_go_on_while_drafts_would_take_the_whole_step():
    engine = make_engine(
        num_blocks=400, max_num_batched_tokens=16, draft=RandomDraft(VOCAB), policy=FixedDrafts(5)
    )
    running = [
        Caller(engine, [i], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)) for i in range(7)
    ]
    for _ in range(3):
        turn(engine)
    late = Caller(engine, [9] * 50, SamplingParams(max_tokens=1, temperature=0))
    run(engine, late, limit=12)
    for c in running:
        engine.abort(c.submission)
    run(engine, *running)


def test_a_broken_draft_costs_only_itself():
    engine = make_engine(draft=BrokenDraft(), policy=FixedDrafts(3))
    caller = Caller(engine, [4, 5], GREEDY)
    run(engine, caller)
    same(caller.outputs, solo([4, 5], GREEDY))


def test_ended_requests_are_forgotten():
    draft = NGramDraft()
    engine = make_engine(draft=draft, policy=FixedDrafts(3))
    callers = [Caller(engine, [i, 2, i, 2, i], GREEDY) for i in range(3)]
    for _ in range(3):
        turn(engine)
    assert draft._of
    engine.abort(callers[0].submission)
    run(engine, *callers)
    assert not draft._of


# --- the n-gram draft ------------------------------------------------------------------------------
def proposals(draft, request, count=4, price=0.0):
    row = ScheduledRow(request, request.num_tokens - 1, 1, True, max_drafts=count, price=price)
    return draft.propose([row])[0]


def test_ngram_copies_what_followed_the_longest_and_latest_match():
    draft = NGramDraft()
    tokens = [1, 2, 3, 4, 50, 51, 9, 3, 4, 60, 61, 8, 1, 2, 3, 4]
    assert proposals(draft, request_of(tokens)) == [
        50,
        51,
        9,
        3,
    ]  # four tokens agree, not only the latest two
    assert proposals(draft, request_of([3, 4, 50, 7, 3, 4, 60, 9, 3, 4])) == [60, 9, 3, 4]
    assert proposals(draft, request_of([5, 6, 7, 8])) == []
    assert proposals(draft, request_of([5])) == []
    assert proposals(draft, request_of([1, 2, 1, 2, 1])) == [2, 1, 2, 1]  # a loop goes on


def test_ngram_index_equals_a_search_and_grows_with_the_output():
    rng = random.Random(3)
    tokens = [rng.randrange(5) for _ in range(300)]
    draft, request = NGramDraft(), request_of(tokens, 40)
    grown = request_of(tokens[:40], 40)
    grown.id = request.id
    for end in range(40, 300):
        grown.output_ids = tokens[40:end]
        found = proposals(draft, grown, 3)
        want = []
        for n in (4, 3, 2):
            at = [i for i in range(n, end) if tokens[i - n : i] == tokens[end - n : end]]
            if at:
                want = tokens[at[-1] : min(at[-1] + 3, end)]
                break
        assert found[: len(want)] == want and bool(found) == bool(want)


def test_ngram_learns_when_not_to_guess_and_tries_again():
    draft, request = NGramDraft(), request_of([1, 2, 3, 4, 5, 1, 2])
    assert proposals(draft, request, 4, price=0.9) == [3, 4, 5, 1]
    for _ in range(20):
        draft.observe([ScheduledRow(request, 6, 3, True, drafts=(3, 4))], [0], torch.zeros(1, 1))
    later = [proposals(draft, request, 4, price=0.3) for _ in range(40)]
    assert later[0] == [] and [3] in later and max(map(len, later)) == 1


# --- verification ----------------------------------------------------------------------------------
def test_accepted_keeps_the_right_drafts_and_the_token_after_them():
    drawn = [SampledToken(t) for t in (5, 6, 7, 8)]
    for drafts, count in (((5, 6, 7), 4), ((5, 6, 9), 3), ((5, 9, 7), 2), ((9, 6, 7), 1)):
        assert [t.token_id for t in accepted(drafts, drawn)] == [5, 6, 7, 8][:count]
    assert accepted((), drawn[:1]) == drawn[:1]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1, "top_p": 0.95},
    ],
)  # fmt: skip
@pytest.mark.parametrize("draft", ["none", "likely", "unlikely"])
def test_tokens_are_drawn_from_the_target_whatever_is_drafted(settings, draft):
    """Chi-square over 20,000 draws of two tokens in a row, the second given the first: 12 ids, exact p."""
    torch.manual_seed(1)
    vocab, draws = 12, 20_000
    first, second = (
        torch.randn(vocab) * 1.5,
        torch.randn(vocab, vocab) * 1.5,
    )  # logits; after each first token
    params = SamplingParams(**settings, max_tokens=2)
    p1 = probabilities(first[None].clone(), [params])[0].double()
    p2 = probabilities(second.clone(), [params] * vocab).double()
    guess = {"none": (), "likely": (int(p1.argmax()),), "unlikely": (int(p1.argmin()),)}[draft]
    sampler, counts = Sampler(vocab), torch.zeros(vocab, vocab)
    seeds = range(draws)
    requests = [Request([0], params, 10, seed) for seed in seeds]
    drawn1 = sampler(first.repeat(draws, 1), requests, [0] * draws)
    if guess:
        drawn2 = sampler(second[guess[0]].repeat(draws, 1), requests, [1] * draws)
    for i, request in enumerate(requests):
        kept = accepted(guess, [drawn1[i], drawn2[i]] if guess else [drawn1[i]])
        if len(kept) == 1:  # the next step computes the second
            request.output_ids = [kept[0].token_id]
    late = [i for i, r in enumerate(requests) if r.output_ids]
    tokens = torch.tensor([requests[i].output_ids[0] for i in late])
    for i, token in zip(late, sampler(second[tokens], [requests[i] for i in late]), strict=True):
        counts[requests[i].output_ids[0], token.token_id] += 1
    for i in set(range(draws)) - set(late):
        counts[guess[0], drawn2[i].token_id] += 1
    expected = draws * p1[:, None] * p2
    assert counts.sum() == draws and not counts[expected == 0].any()
    often = expected >= 5
    chi2 = (((counts - expected) ** 2 / expected.clamp(min=1e-12))[often]).sum().item()
    degrees = int(often.sum()) - 1
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees), (chi2, degrees)  # four standard deviations
