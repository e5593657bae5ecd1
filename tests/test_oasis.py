"""The oasis mode through the whole engine, on tiny checkpoints: exactness, invariants, faults."""

import random

import pytest
import torch
from fakes import Caller, FakeTokenizer, run, turn
from make_checkpoints import make_hf

from nano_oasis.config import EngineConfig, EngineInfo
from nano_oasis.engine import Engine
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.host_tier import HostTier
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.memory.link import BlockMover, MemcpyLink
from nano_oasis.memory.oasis_kv import OasisKV
from nano_oasis.memory.sketch import make_selector
from nano_oasis.memory.stream import Stage
from nano_oasis.metrics import Metrics
from nano_oasis.model import Model
from nano_oasis.request import SamplingParams
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.scheduler import Scheduler
from nano_oasis.weights import load_checkpoint

B = 8
LIMIT = 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {}
    for family in ("llama", "gemma3"):
        paths[family] = tmp_path_factory.mktemp(family)
        make_hf(family, paths[family])
    return paths


def model_of(path) -> Model:
    checkpoint = load_checkpoint(path, torch.float32)
    return Model(checkpoint.config, checkpoint.tensors, 512)


def engine_of(model, kv, blocks, device=None, max_num_seqs=6, max_num_batched_tokens=32) -> Engine:
    info = EngineInfo("tiny", "float32", "cpu", B, blocks.num_blocks, blocks.num_blocks * B, 0, LIMIT)
    scheduler = Scheduler(blocks, max_num_seqs, max_num_batched_tokens, device)
    runner = Runner(model, kv, Sampler(model.config.vocab_size))
    return Engine(runner, scheduler, FakeTokenizer(), model.config, info, Metrics("tiny"), seed=0)


def dense_engine(model, num_blocks=400, **options) -> Engine:
    cache = KVCache.allocate(model.config, num_blocks, B, torch.float32, "cpu")
    return engine_of(model, DenseKV(cache, select_kernels("cpu")), BlockManager(num_blocks, B), **options)


def oasis_engine(model, num_slots, host_blocks=400, link=None, **settings) -> Engine:
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "selector": "exact", **settings}
    c, options = model.config, EngineConfig(kv_mode="oasis", block_size=B, **settings)
    heads = c.num_kv_heads // options.head_groups
    keys, values = (torch.full((num_slots, B, heads, c.head_dim), torch.nan) for _ in range(2))
    host = HostTier.create(c, host_blocks, B, torch.float32)
    mover = BlockMover(host, keys, values, options.head_groups)
    coordinator = PrefetchCoordinator(link(mover) if link else MemcpyLink(mover))
    coordinator.start()
    stage = Stage(3, B, heads, c.head_dim, torch.float32, "cpu")
    kv = OasisKV(
        c, options, select_kernels("cpu"), host, keys, values, make_selector(options.selector), coordinator,
        stage, LIMIT,
    )  # fmt: skip
    blocks = BlockManager(host_blocks, B)
    return engine_of(model, kv, blocks, kv, options.max_num_seqs, options.max_num_batched_tokens)


def outputs(engine, prompts, params):
    callers = [Caller(engine, p, params) for p in prompts]
    run(engine, *callers)
    return [c.outputs[0].token_ids for c in callers]


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("groups", [1, 2])
def test_with_room_or_budget_for_all_outputs_equal_dense(folders, family, groups):
    model = model_of(folders[family])
    prompts = prompts_of([5, 100, 33, 64, 180, 9])
    expected = outputs(dense_engine(model), prompts, GREEDY)
    planes = model.config.num_layers * groups
    roomy = oasis_engine(model, planes * 120, head_groups=groups)
    assert outputs(roomy, prompts, GREEDY) == expected
    # Now nothing fits whole, but the budget covers every context: all that is wanted is fetched.
    tight = oasis_engine(model, planes * 60, head_groups=groups, kv_budget=LIMIT, miss_policy="wait")
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
    assert small.runner.kv.pool.num_slots < model.config.num_layers * 200 // B


@pytest.mark.parametrize("predictor", ["previous", "current"])
@pytest.mark.parametrize("policy", ["wait", "repair", "skip"])
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
    held = []
    while not all(c.done for c in callers):
        turn(engine)
        kv.check()
        held += [
            kv.residency.resident(s.index) <= s.floor + kv.planes for s in kv.seats.values() if not s.dense
        ]
    assert held and all(held)
    assert all(len(c.outputs[0].token_ids) == 20 for c in callers)
    assert kv.stats.hits > 0
    if policy == "wait" or predictor == "current":
        assert kv.stats.skipped == 0 and kv.stats.fetched_now == kv.stats.misses
    elif policy == "skip":
        assert kv.stats.skipped > 0


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_keep_the_invariants_and_equal_dense(folders, seed):
    rng = random.Random(seed)
    model = model_of(folders["llama"])
    engine = oasis_engine(
        model, model.config.num_layers * rng.choice([50, 60, 90]), host_blocks=rng.choice([60, 120]),
        kv_budget=LIMIT, miss_policy="wait", max_num_seqs=rng.choice([2, 4]),
    )  # fmt: skip
    reference = dense_engine(model)
    heads = prompts_of([40, 70, 100], seed)
    jobs = []
    while len(jobs) < 14 or not all(c.done for _, _, c in jobs):
        if len(jobs) < 14 and rng.random() < 0.4:
            prompt = rng.choice(heads) + prompts_of([rng.randrange(1, 60)], rng.randrange(1000))[0]
            params = SamplingParams(
                temperature=rng.choice([0, 1.0]),
                seed=seed,
                max_tokens=rng.randrange(1, 30),
                n=rng.choice([1, 2]),
            )
            jobs.append((prompt, params, Caller(engine, prompt, params)))
        if jobs and rng.random() < 0.05:
            engine.abort(rng.choice(jobs)[2].submission)
        turn(engine)
        engine.runner.kv.check()
    kv = engine.runner.kv
    assert not kv.seats and engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    kv.coordinator.wait(list(kv._flying.values()), 5)
    kv.arrivals()
    assert kv.pool.num_free == kv.pool.num_slots
    for prompt, params, caller in jobs:
        solo = Caller(reference, prompt, params)
        run(reference, solo)
        for got, want in zip(caller.outputs, solo.outputs, strict=True):
            if got.finish_reason == "abort":
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
            else:
                assert got.token_ids == want.token_ids
