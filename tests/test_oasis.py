"""The oasis mode through the whole engine, on tiny checkpoints: exactness, invariants, faults."""

import random

import pytest
import torch
from fakes import Caller, run, turn
from make_checkpoints import make_hf
from make_tokenizers import write_bpe_folder
from oasis_engines import (
    GREEDY,
    LIMIT,
    B,
    dense_engine,
    model_of,
    oasis_engine,
    outputs,
    prompts_of,
    slow_failing_link,
)

from nano_oasis import LLM
from nano_oasis.config import ConfigError, EngineConfig
from nano_oasis.kv_build import make_memory
from nano_oasis.request import RequestError, SamplingParams

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("groups", [1, 2])
def test_with_room_or_budget_for_all_outputs_equal_dense(folders, family, groups):
    model = model_of(folders[family])
    prompts = prompts_of([5, 100, 33, 64, 180, 9])
    expected = outputs(dense_engine(model), prompts, GREEDY)
    layers = model.config.num_layers
    roomy = oasis_engine(model, layers * 120, head_groups=groups)
    assert outputs(roomy, prompts, GREEDY) == expected
    # Now nothing fits whole, but the budget covers every context: all that is wanted is fetched.
    tight = oasis_engine(model, layers * 60, head_groups=groups, kv_budget=LIMIT, miss_policy="wait")
    assert outputs(tight, prompts, GREEDY) == expected


def test_prefill_longer_than_the_device_is_exact(folders):
    model = model_of(folders["llama"])
    prompts = prompts_of([200, 230])
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=3, ignore_eos=True)
    dense, small = dense_engine(model), oasis_engine(model, model.config.num_layers * 22, kv_budget=64)
    for p in prompts:
        a, b = Caller(dense, p, one), Caller(small, p, one)
        run(dense, a)
        run(small, b)
        x, y = a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]
        assert list(x) == list(y)
        assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)
    assert small.runner.kv.pool.num_slots < small.runner.kv.planes * 200 // B


@pytest.mark.parametrize(
    ("predictor", "policy"),
    [
        ("previous", "wait"),
        ("previous", "repair"),
        ("previous", "skip"),
        ("current", "wait"),
        ("current", "repair"),
    ],
)
@pytest.mark.parametrize("selector", ["exact", "twobit", "mean"])
def test_sparse_decode_runs_within_its_budget(folders, predictor, policy, selector):
    model = model_of(folders["llama"])
    engine = oasis_engine(
        model,
        model.config.num_layers * 40,
        kv_budget=64,
        predictor=predictor,
        miss_policy=policy,
        selector=selector,
    )
    callers = [Caller(engine, p, GREEDY) for p in prompts_of([200, 180, 150])]
    kv = engine.runner.kv
    rows = 0
    while not all(c.done for c in callers):
        turn(engine)
        kv.check()
        rows += sum(not s.dense and s.request.output_ids != [] for s in kv.seats.values())
    # Each shrunk row wants at most its budget of 8 blocks in each of the planes.
    assert 0 < kv.stats.hits + kv.stats.misses <= (rows + len(callers)) * kv.planes * 8
    assert all(len(c.outputs[0].token_ids) == 20 for c in callers)
    assert kv.stats.hits > 0
    if policy == "wait" or predictor == "current":
        assert kv.stats.skipped == 0 and kv.stats.fetched_now == kv.stats.misses
    elif policy == "skip":
        assert kv.stats.skipped > 0


@pytest.mark.parametrize("faults", ["none", "slow", "failing"])
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_keep_the_invariants_and_equal_dense(folders, seed, faults):
    rng = random.Random(seed)
    model = model_of(folders["llama"])
    link = None if faults == "none" else slow_failing_link(seed, 0.02 if faults == "failing" else 0.0)
    sizes = {"max_num_seqs": rng.choice([2, 4]), "host_blocks": rng.choice([60, 120])}
    slots = model.config.num_layers * rng.choice([50, 60, 90])
    engine = oasis_engine(model, slots, link=link, kv_budget=LIMIT, miss_policy="wait", **sizes)
    kv = engine.runner.kv
    reference = dense_engine(model)
    heads = prompts_of([40, 70, 100], seed)
    jobs = []
    while len(jobs) < 14 or not all(c.done for _, _, c in jobs):
        if len(jobs) < 14 and rng.random() < 0.4:
            prompt = rng.choice(heads) + prompts_of([rng.randrange(1, 60)], rng.randrange(1000))[0]
            sampling = {"temperature": rng.choice([0, 1.0]), "n": rng.choice([1, 2])}
            params = SamplingParams(seed=seed, max_tokens=rng.randrange(1, 30), **sampling)
            jobs.append((prompt, params, Caller(engine, prompt, params)))
        if jobs and rng.random() < 0.05:
            engine.abort(rng.choice(jobs)[2].submission)
        turn(engine)
        kv.check()
    for _ in range(50):  # choices of a failed request may still run
        turn(engine)
    assert not kv.seats and engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    kv.flights.wait_for_all()
    assert kv.pool.num_free == kv.pool.num_slots
    errors = [c.error for _, _, c in jobs if c.error]
    assert all("could not be fetched" in e for e in errors) and (not errors or faults == "failing")
    assert kv.coordinator.stats.failed == 0 or faults == "failing"
    for prompt, params, caller in jobs:
        solo = Caller(reference, prompt, params)
        run(reference, solo)
        for got, want in zip(caller.outputs, solo.outputs, strict=True):
            if got.finish_reason in ("abort", None):  # None: it or its sibling failed
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
            else:
                assert got.token_ids == want.token_ids


@pytest.mark.parametrize("policy", ["repair", "skip"])
def test_a_failed_copy_is_a_miss_where_the_policy_allows_it(folders, policy):
    model = model_of(folders["llama"])
    engine = oasis_engine(
        model, model.config.num_layers * 40, kv_budget=64, miss_policy=policy, link=slow_failing_link(3, 0.3)
    )
    callers = [Caller(engine, p, GREEDY) for p in prompts_of([200, 180])]
    kv = engine.runner.kv
    while not all(c.done for c in callers):
        turn(engine)
        kv.coordinator._clock.elapse(0.05)  # the wire's time; the step thread itself never waits under skip
    assert kv.coordinator.stats.failed > 0 and kv.coordinator.stats.completed > 0
    assert all(c.error is None and len(c.outputs[0].token_ids) == 20 for c in callers)
    kv.check()


def test_working_sets_grow_into_spare_memory_and_give_it_back(folders):
    model = model_of(folders["llama"])
    engine = oasis_engine(model, model.config.num_layers * 60, kv_budget=48, miss_policy="wait")
    kv = engine.runner.kv
    caller = Caller(
        engine, prompts_of([200])[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )
    while len(caller.events) < 2:
        turn(engine)
    (seat,) = kv.seats.values()
    kv.shrink(seat)
    assert kv._excess(seat) == 0
    while len(caller.events) < 30:
        turn(engine)
    assert kv._excess(seat) > 0  # nobody else needs the memory
    kv.make_room(kv.pool.num_slots - seat.floor)
    assert kv._excess(seat) == 0 and kv.pool.num_free >= kv.pool.num_slots - seat.floor
    kv.check()
    run(engine, caller)


def test_audit_measures_recall_and_raises_the_budget(folders):
    model = model_of(folders["llama"])

    def recall(**options) -> float:
        options = {"audit_every": 1, "miss_policy": "wait", **options}
        engine = oasis_engine(model, model.config.num_layers * 90, **options)
        kv = engine.runner.kv
        callers = [Caller(engine, p, GREEDY) for p in prompts_of([200, 180, 170])]
        while not all(c.done for c in callers):
            turn(engine)
            for seat in kv.seats.values():
                if seat.dense and seat.sealed * B > 150:
                    kv.shrink(seat)
        return kv.stats.recall

    assert recall(kv_budget=LIMIT) == pytest.approx(1.0, abs=1e-5)
    assert 0 < recall(kv_budget=48) < recall(kv_budget=48, audit_recall=0.999) < 0.999


def test_per_request_mode_and_budget(folders):
    model = model_of(folders["llama"])
    engine = oasis_engine(model, model.config.num_layers * 60, kv_budget=48)
    prompts = prompts_of([200, 180, 170])
    exact = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, kv_mode="dense")
    callers = [Caller(engine, p, exact if i == 0 else GREEDY) for i, p in enumerate(prompts)]
    run(engine, *callers)
    assert callers[0].outputs[0].token_ids == outputs(dense_engine(model), prompts[:1], GREEDY)[0]
    small = oasis_engine(model, model.config.num_layers * 30, kv_budget=48)
    with pytest.raises(RequestError, match="device KV memory") as caught:
        small.submit(prompts[0], exact, print)
    assert caught.value.param == "kv_mode"
    with pytest.raises(RequestError, match="needs kv_mode=oasis"):
        dense_engine(model).submit(prompts[0], SamplingParams(kv_budget=64), print)


@pytest.mark.parametrize("seed", [1, 3, 5, 7, 9, 12])
def test_a_dense_request_reads_all_while_prompts_fill_the_device(folders, seed):
    """Its prefix is in the host tier, two long prompts hold the pool, and its length is no multiple of B."""
    model, rng = model_of(folders["llama"]), random.Random(seed)
    prompt = prompts_of([rng.randint(80, 150)], seed)[0]
    exact = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, kv_mode="dense")
    slots = model.config.num_layers * rng.choice([36, 40, 44, 50])
    engine = oasis_engine(model, slots, kv_budget=32, max_num_batched_tokens=rng.choice([8, 16, 32]))
    want = outputs(dense_engine(model), [prompt], GREEDY)[0]
    assert outputs(engine, [prompt], exact)[0] == want
    others = [
        Caller(engine, p, GREEDY) for p in prompts_of([rng.randint(180, 230) for _ in range(2)], seed + 99)
    ]
    for _ in range(rng.randint(1, 25)):
        turn(engine)
    caller = Caller(engine, prompt, exact)
    run(engine, caller, *others)
    assert caller.error is None and caller.outputs[0].token_ids == want
    kv = engine.runner.kv
    assert kv.coordinator.bytes_in_flight == 0 and kv.pool.num_free == kv.pool.num_slots


@pytest.mark.parametrize("context", [81, 100, 119])
def test_a_budget_of_the_context_reads_all_of_it(folders, context):
    model = model_of(folders["llama"])
    engine = oasis_engine(model, model.config.num_layers * 60, kv_budget=context + 20, miss_policy="wait")
    prompt = prompts_of([context])[0]
    caller = Caller(engine, prompt, GREEDY)
    while not caller.events:
        turn(engine)
    engine.runner.kv.shrink(next(iter(engine.runner.kv.seats.values())))
    run(engine, caller)
    assert caller.outputs[0].token_ids == outputs(dense_engine(model), [prompt], GREEDY)[0]


def test_device_bytes_add_up(folders):
    model = model_of(folders["llama"])
    engine = oasis_engine(model, model.config.num_layers * 40, kv_budget=64, selector="twobit")
    callers = [Caller(engine, p, GREEDY) for p in prompts_of([200, 180])]
    kv = engine.runner.kv
    for _ in range(12):
        turn(engine)
        resident = int((kv.residency.slot_of >= 0).sum()) + len(kv.flights)
        sketch = kv.sketches.selector.bytes_per_block(B, model.config.num_kv_heads, model.config.head_dim)
        sealed = sum(s.sealed for s in kv.seats.values())
        expected = resident * kv.slot_bytes + model.config.num_layers * sealed * sketch
        assert sum(kv.device_bytes(s.request) for s in kv.seats.values()) == expected
        assert f'kv_device_bytes{{model_name="tiny"}} {float(expected)}' in engine.metrics.render().decode()
    run(engine, *callers)


def test_int8_host_tier_and_file_behind_the_engine(folders, tmp_path):
    make_hf("llama", tmp_path / "m", vocab_size=640)
    write_bpe_folder(tmp_path / "m")
    options = {"max_model_len": 512, "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_device_blocks": 24}
    oasis = {"kv_mode": "oasis", "kv_budget": 64, "host_kv_memory": "8MiB"}
    prompts = [{"prompt_token_ids": p} for p in prompts_of([300, 250, 200])]
    for extra in ({}, {"host_kv_format": "int8"}, {"host_kv_path": str(tmp_path / "kv")}):
        with LLM(str(tmp_path / "m"), **options, **oasis, **extra) as llm:
            outs = llm.generate(prompts, GREEDY)
            assert [len(o.outputs[0].token_ids) for o in outs] == [20, 20, 20]
            assert llm.engine.runner.kv.pool.num_slots == 24 * 3 * 2  # layers, KV heads
            again = llm.generate(prompts[0], GREEDY)[0]
            assert again.num_cached_tokens == 296  # found in the host tier
            device, host = again.kv_bytes  # 20 new tokens: 19 are computed
            assert host == 319 // 8 * llm.engine.runner.kv.host.bytes_per_block and device > 0
    assert not list(tmp_path.glob("kv*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_budget": 64}, "kv_budget: needs kv_mode=oasis"),
        ({"host_kv_memory": "1GiB"}, "host_kv_memory: needs kv_mode=oasis"),
        ({"kv_mode": "oasis", "head_groups": 3}, "head_groups: 3 does not divide the model's 2 KV heads"),
        ({"kv_mode": "oasis", "device_kv_memory": "64KiB"}, "do not hold one step's"),
        ({"kv_mode": "oasis", "host_kv_memory": "1KiB"}, "host_kv_memory: "),
        ({"kv_mode": "oasis", "host_kv_memory": "1MiB", "max_model_len": 4096}, "do not fit the host tier"),
        (
            {"kv_mode": "oasis", "predictor": "current", "miss_policy": "skip"},
            "miss_policy: skip means nothing",
        ),
        ({"kv_mode": "oasis", "audit_recall": 0.9}, "audit_recall: needs audit_every"),
        ({"kv_mode": "oasis", "host_kv_path": "/nowhere/at/all"}, "host tier: "),
        ({"kv_mode": "sparse"}, "kv_mode: must be one of dense, oasis"),
    ],
)
def test_bad_combinations_are_refused_by_name(folders, options, words):
    config_options = {"num_device_blocks": 100, **options}
    if "device_kv_memory" in options:
        del config_options["num_device_blocks"]
    model = model_of(folders["llama"])
    with pytest.raises(ConfigError, match=words):
        config = EngineConfig.make(max_num_seqs=8, **config_options)
        make_memory(config, model.config, config.max_model_len or 512, torch.float32, "cpu")
