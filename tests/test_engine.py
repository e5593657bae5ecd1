"""engine.py with a fake model: equality with solo runs, invariants, prefix cache, ends of requests."""

import random

import pytest
from fakes import EOS, VOCAB, Caller, FakeModel, make_engine, run, same, solo, turn

from nano_oasis.request import SamplingParams


def random_params(rng: random.Random) -> SamplingParams:
    greedy = rng.random() < 0.4
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 5]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(100),
        max_tokens=rng.randrange(0, 16),
        min_tokens=0,
        stop=rng.choice([None, ["A"], ["12", "Q"], "éx"]),
        stop_token_ids=rng.choice([None, [rng.randrange(VOCAB)]]),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules_keep_the_invariants_and_equal_solo(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    num_blocks = rng.randrange(40, 72) // block_size
    engine = make_engine(
        num_blocks, block_size, rng.choice([1, 3, 6]), rng.choice([6, 9, 40]), seed=seed, prefix=seed % 5 > 0
    )
    limit = engine.info.max_model_len
    heads = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
    jobs, aborted = [], set()
    while len(jobs) < 30 or not all(c.done for _, _, c in jobs):
        for _ in range(rng.choice([0, 0, 1, 3])):
            if len(jobs) < 30:
                prompt = rng.choice(heads) + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 6))]
                prompt = prompt[: limit - 1]
                params = random_params(rng)
                jobs.append((prompt, params, Caller(engine, prompt, params)))
        if jobs and rng.random() < 0.1:
            victim = rng.randrange(len(jobs))
            if not jobs[victim][2].done:
                engine.abort(jobs[victim][2].submission)
                aborted.add(victim)
        turn(engine)
    assert engine.num_live == 0 and not engine.scheduler.has_work
    assert engine.scheduler.blocks.num_free == num_blocks
    for i, (prompt, params, caller) in enumerate(jobs):
        expected = solo(prompt, params, block_size=block_size, max_model_len=limit)
        for got, want in zip(caller.outputs, expected, strict=True):
            if i in aborted and got.finish_reason == "abort":
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
                continue
            same([got], [want])


def test_preemption_happens_and_changes_nothing():
    engine = make_engine(num_blocks=8, block_size=2, max_num_seqs=4)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    callers = [Caller(engine, [i, i + 1, i + 2], params) for i in range(4)]
    run(engine, *callers)
    assert sum(r.num_preemptions for c in callers for r in c.submission.requests) > 0
    for i, c in enumerate(callers):
        same(c.outputs, solo([i, i + 1, i + 2], params))


def test_B027_the_only_sequence_fills_the_pool():
    engine = make_engine(num_blocks=2, block_size=4)
    caller = Caller(engine, list(range(7)), SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    run(engine, caller, limit=20)
    assert caller.outputs[0].finish_reason == "length" and len(caller.outputs[0].token_ids) == 1
    both = [Caller(engine, [i, 2, 3], SamplingParams(max_tokens=5, temperature=0)) for i in (5, 6)]
    run(engine, *both, limit=60)
    for i, c in zip((5, 6), both, strict=True):
        same(c.outputs, solo([i, 2, 3], SamplingParams(max_tokens=5, temperature=0)))


def test_B029_running_streams_get_a_token_every_step_while_prompts_keep_arriving():
    engine = make_engine(num_blocks=400, max_num_batched_tokens=16, max_num_seqs=8)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    a = Caller(engine, [1, 2, 3], params)
    turn(engine)
    others = []
    while not a.done:
        others.append(Caller(engine, [len(others) % VOCAB] * 100, SamplingParams(max_tokens=1)))
        before = len(a.events)
        turn(engine)
        assert len(a.events) == before + 1
    for c in others:
        engine.abort(c.submission)
    run(engine, *others)


def test_B029_a_new_prompt_starts_under_full_decode_load():
    engine = make_engine(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    running = [Caller(engine, [i], params) for i in range(7)]
    for _ in range(3):
        turn(engine)
    late = Caller(engine, [9] * 20, SamplingParams(max_tokens=1, temperature=0))
    run(engine, late, limit=22)
    for c in running:
        engine.abort(c.submission)
    run(engine, *running)


def test_B033_a_large_request_is_not_overtaken():
    engine = make_engine(num_blocks=10, block_size=4, max_num_seqs=8)
    small = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    callers = [Caller(engine, [i] * 8, small) for i in range(3)]
    turn(engine)
    big = Caller(engine, [7] * 36, SamplingParams(max_tokens=2, temperature=0))
    flood = []
    for i in range(200):
        if big.done:
            break
        flood.append(Caller(engine, [i % 50] * 4, small))
        turn(engine)
    assert big.done and not any(c.done for c in flood)
    run(engine, *callers, *flood)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("chunk", [2, 4, 64])
def test_B035_same_prompt_twice(length, chunk):
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=chunk)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    first, second = [], []
    for out in (first, second):
        c = Caller(engine, list(range(1, length + 1)), params)
        run(engine, c)
        out.append(c)
    assert second[0].builder.result.num_cached_tokens == (length - 1) // 4 * 4 < length
    same(first[0].outputs, second[0].outputs)


def test_B038_shared_prefix_arriving_in_one_step():
    engine = make_engine(num_blocks=300, max_num_seqs=20, max_num_batched_tokens=21)
    shared = [random.Random(3).randrange(VOCAB) for _ in range(32)]
    params = SamplingParams(max_tokens=6, temperature=0)
    prompts = [[*shared, i] for i in range(12)] + [[*shared, 50]] * 4
    callers = [Caller(engine, p, params) for p in prompts]
    turn(engine)
    engine.abort(callers[0].submission)
    run(engine, *callers)
    for p, c in list(zip(prompts, callers, strict=True))[1:]:
        same(c.outputs, solo(p, params))


@pytest.mark.parametrize("chunk", range(1, 9))
def test_B039_chunked_prefill_publishes_whole_blocks_only(chunk):
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=chunk)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(23)]
    params = SamplingParams(max_tokens=3, temperature=0)
    for expected_hit in (0, 20):
        c = Caller(engine, prompt, params)
        run(engine, c)
        assert c.builder.result.num_cached_tokens == expected_hit
        same(c.outputs, solo(prompt, params))
    assert engine.scheduler.blocks.num_used == 0


def test_B041_prompt_logprobs_do_not_come_from_the_cache():
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    prompt = [random.Random(2).randrange(VOCAB) for _ in range(21)]
    cold = make_engine(prefix=False)
    c = Caller(cold, prompt, params)
    run(cold, c)
    warm = make_engine(max_num_batched_tokens=8)
    run(warm, Caller(warm, prompt + [1, 2], SamplingParams(max_tokens=1, temperature=0)))
    w = Caller(warm, prompt, params)
    run(warm, w)
    a, b = c.builder.result.prompt_logprobs, w.builder.result.prompt_logprobs
    assert a is not None and b is not None and len(a) == len(prompt) and a[0] is None
    for x, y in zip(a[1:], b[1:], strict=True):
        assert list(x) == list(y)
        assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


def test_n_choices_share_one_prefill():
    model = FakeModel()
    engine = make_engine(model=model, max_num_batched_tokens=64)
    params = SamplingParams(n=4, seed=0, temperature=1.2, max_tokens=4, ignore_eos=True)
    c = Caller(engine, list(range(41)), params)
    run(engine, c)
    assert sum(model.steps) < 41 + 4 * 4 + 4
    assert len({tuple(o.token_ids) for o in c.outputs}) == 4  # B057: choices differ
    same(c.outputs, solo(list(range(41)), params))  # and repeat under the same seed


def test_B057_unseeded_requests_vary_and_an_engine_seed_repeats_them():
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    engine = make_engine()
    callers = [Caller(engine, [1, 2, 3], params) for _ in range(8)]
    run(engine, *callers)
    assert len({tuple(c.outputs[0].token_ids) for c in callers}) > 1
    pair = []
    for _ in range(2):
        engine = make_engine(seed=5)
        c = Caller(engine, [1, 2, 3], params)
        run(engine, c)
        pair.append(c.outputs)
    same(*pair)


@pytest.mark.parametrize("prompt", [[1, 2], [3, 1], [9]])
def test_min_tokens_holds_back_every_end(prompt):
    free = solo(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
    ends = {"stop_token_ids": free.token_ids[1:3], "stop": [free.text[0]]}
    params = SamplingParams(max_tokens=8, min_tokens=5, temperature=0, **ends)
    out = solo(prompt, params)[0]
    assert len(out.token_ids) >= 5 and not set(out.token_ids[:5]) & {EOS, *free.token_ids[1:3]}
    early = solo(prompt, SamplingParams(max_tokens=8, temperature=0, **ends))[0]
    assert len(early.token_ids) <= 3


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("skip", [True, False])
def test_B015_stop_token_costs_no_text(k, skip):
    base = dict(temperature=0, ignore_eos=True, skip_special_tokens=skip)
    full = solo([3, 1], SamplingParams(max_tokens=8, **base))[0]
    stop = full.token_ids[k - 1]
    k = full.token_ids.index(stop) + 1
    out = solo([3, 1], SamplingParams(max_tokens=8, stop_token_ids=[stop], **base))[0]
    assert out.token_ids == full.token_ids[:k]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    engine = make_engine()
    assert out.text == engine.tokenizer.decode(full.token_ids[: k - 1], skip_special_tokens=skip)


def test_stop_string_is_found_across_tokens_and_cut_off():
    full = solo([3, 1], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
    stop = full.text[3:6]
    at = full.text.find(stop)
    out = solo([3, 1], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=[stop, "zzzz"]))[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (full.text[:at], "stop", stop)


def test_max_tokens_zero_computes_the_prompt_only():
    out = solo([1, 2, 3], SamplingParams(max_tokens=0))[0]
    assert (out.token_ids, out.text, out.finish_reason) == ([], "", "length")
