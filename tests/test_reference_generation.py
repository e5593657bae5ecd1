"""Greedy tokens against transformers through the whole engine, on tiny checkpoints of every family.

A batch of 8, chunked prefill, preemption and the prefix cache are all on: exactness must survive them.
The same on real models takes minutes: benchmarks/against_transformers.py. docs/14-figures.md has the result.
"""

import pytest
import torch
from fakes import Caller, FakeTokenizer, run
from make_checkpoints import FAMILIES, hf_to_gguf, make_hf

from nano_oasis.config import EngineInfo
from nano_oasis.engine import Engine
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.blocks import BlockManager
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.metrics import Metrics
from nano_oasis.model import Model
from nano_oasis.request import SamplingParams
from nano_oasis.runner import Runner
from nano_oasis.sampler import Sampler
from nano_oasis.scheduler.scheduler import Scheduler
from nano_oasis.weights import load_checkpoint

LENGTHS = [1, 2, 7, 16, 40, 90, 33, 17, 150, 8]
NEW = 64


def engine_of(path, num_blocks: int) -> Engine:
    checkpoint = load_checkpoint(path, torch.float32)
    config = checkpoint.config
    model = Model(config, checkpoint.tensors, 512)
    cache = KVCache.allocate(config, num_blocks, 16, torch.float32, "cpu")
    info = EngineInfo("tiny", "float32", "cpu", 16, num_blocks, num_blocks * 16, cache.nbytes, 512)
    scheduler = Scheduler(BlockManager(num_blocks, 16), max_num_seqs=8, max_num_batched_tokens=32)
    runner = Runner(model, DenseKV(cache, select_kernels("cpu")), Sampler(config.vocab_size))
    return Engine(runner, scheduler, FakeTokenizer(), config, info, Metrics("tiny"))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family, kind, tmp_path):
    hf = make_hf(family, tmp_path / "hf")
    path = tmp_path / "hf" if kind == "safetensors" else hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts += [prompts[8][:100] + [5, 6], prompts[5]]  # shared prefixes
    engine = engine_of(path, num_blocks=24)  # too few for all at once
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    for _ in range(2):  # the second time around the prefix cache is warm
        callers = [Caller(engine, p, params) for p in prompts]
        run(engine, *callers)
        for prompt, caller in zip(prompts, callers, strict=True):
            got = caller.outputs[0].token_ids
            assert len(got) == NEW
            assert_greedy(hf, prompt, got, caller.outputs[0].logprobs)
    assert sum(r.num_preemptions for c in callers for r in c.submission.requests) > 0
    assert any(c.builder.result.num_cached_tokens for c in callers)


def assert_greedy(hf, prompt, got, logprobs) -> None:
    """Every token is the reference's argmax given what came before, with the same log-probability.

    One forward pass of the reference over prompt + output checks all steps. A near tie in fp32 (1e-3)
    may go either way.
    """
    with torch.inference_mode():
        logits = hf(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    expected = logits.log_softmax(-1)
    for i, token in enumerate(got):
        assert best[i] - logits[i, token] < 1e-3, f"token {i}"
        assert logprobs[i][token].logprob == pytest.approx(expected[i, token].item(), abs=1e-3)
