"""Engines over tiny models in the oasis mode, for its tests.

Owns: how they are put together. Must not know: what is tested.
"""

import torch
from fakes import Caller, FakeTokenizer, run

from nano_oasis.config import EngineConfig, EngineInfo
from nano_oasis.engine import Engine
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.clock import VirtualClock
from nano_oasis.memory.coordinator import PrefetchCoordinator
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.host_tier import HostTier
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.memory.link import BlockMover, MemcpyLink, SimulatedLink
from nano_oasis.memory.oasis_kv import OasisKV
from nano_oasis.memory.sketch import make_selector
from nano_oasis.memory.sketch_slabs import SketchSlabs
from nano_oasis.memory.stream import Stage
from nano_oasis.metrics import Metrics
from nano_oasis.model import Model
from nano_oasis.request import SamplingParams
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.draft_policy import FixedDrafts
from nano_oasis.scheduler.scheduler import Scheduler
from nano_oasis.weights import load_checkpoint

B = 8
LIMIT = 256
COORDINATORS: list[PrefetchCoordinator] = []


def model_of(path) -> Model:
    checkpoint = load_checkpoint(path, torch.float32)
    return Model(checkpoint.config, checkpoint.tensors, 512)


def engine_of(
    model, kv, blocks, gate=None, max_num_seqs=6, max_num_batched_tokens=32, draft=None, drafts=None
) -> Engine:
    """drafts: how many tokens are drafted, always."""
    info = EngineInfo("tiny", "float32", "cpu", B, blocks.num_blocks, blocks.num_blocks * B, 0, LIMIT)
    policy = FixedDrafts(drafts) if draft is not None else None
    scheduler = Scheduler(blocks, max_num_seqs, max_num_batched_tokens, gate, policy)
    runner = Runner(model, kv, Sampler(model.config.vocab_size), draft=draft)
    return Engine(runner, scheduler, FakeTokenizer(), model.config, info, Metrics("tiny"), seed=0)


def dense_engine(model, num_blocks=400, **options) -> Engine:
    cache = KVCache.allocate(model.config, num_blocks, B, torch.float32, "cpu")
    return engine_of(model, DenseKV(cache, select_kernels("cpu")), BlockManager(num_blocks, B), **options)


def oasis_engine(model, slots, host_blocks=400, link=None, draft=None, drafts=None, **settings) -> Engine:
    """slots: blocks of one layer that the device holds, of all heads."""
    settings = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "selector": "exact",
    } | settings
    settings = {
        "kv_mode": "oasis",
        "draft": "self" if draft else "none",  # the one that may read chosen blocks in every mode
        "num_draft_tokens": drafts,
    } | settings
    c, options = model.config, EngineConfig(block_size=B, **settings)
    groups = options.groups_of(c.num_kv_heads)
    heads = c.num_kv_heads // groups
    keys, values = (torch.full((slots * groups, B, heads, c.head_dim), torch.nan) for _ in range(2))
    host = HostTier.create(c, host_blocks, B, torch.float32)
    mover = BlockMover(host, keys, values)
    coordinator = (
        PrefetchCoordinator(link(mover), clock=VirtualClock())
        if link
        else PrefetchCoordinator(MemcpyLink(mover))
    )
    coordinator.start()
    COORDINATORS.append(coordinator)
    sketches = SketchSlabs(make_selector(options.selector), host_blocks, c.num_layers)
    stage = Stage(3, B, c.num_kv_heads, c.head_dim, torch.float32, "cpu")
    kv = OasisKV(
        c, options, select_kernels("cpu"), host, keys, values, sketches, coordinator,
        stage, LIMIT,
    )  # fmt: skip
    blocks = BlockManager(host_blocks, B)
    sizes = options.max_num_seqs, options.max_num_batched_tokens
    return engine_of(model, kv, blocks, kv, *sizes, draft, drafts)


def outputs(engine, prompts, params):
    callers = [Caller(engine, p, params) for p in prompts]
    run(engine, *callers)
    return [c.outputs[0].token_ids for c in callers]


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def slow_failing_link(seed: int, failure_rate: float):
    """Copies take virtual time, overtake each other on three lanes, and some fail, leaving spoiled slots."""

    def make(mover):
        return SimulatedLink(
            mover, bandwidth=2e6, latency_s=0.001, lanes=3, delay_rate=0.5, delay_s=0.02,
            failure_rate=failure_rate, seed=seed,
        )  # fmt: skip

    return make
