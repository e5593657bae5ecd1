"""The miss policy `estimate`: means that stand in for blocks that are not here.

Owns: the arithmetic, and that the engine uses it and counts it. Must not know: other policies.
"""

from __future__ import annotations

import pytest
import torch
from fakes import Caller, turn
from make_checkpoints import make_hf
from oasis_engines import COORDINATORS, GREEDY, model_of, oasis_engine, prompts_of, slow_failing_link

from nano_oasis.memory.centroids import Centroids
from nano_oasis.memory.stream import merge
from nano_oasis.request import RequestError, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_hf("llama", folder)
    return model_of(folder)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    while COORDINATORS:
        COORDINATORS.pop().stop()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [Hq, D] over k, v [m, H, D], float64."""
    group = len(q) // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = (torch.einsum("hd,mhd->hm", q.double(), keys) * scale).softmax(-1)
    return torch.einsum("hm,mhd->hd", weights, values)


@pytest.mark.parametrize("heads", [slice(0, 2), slice(1, 2)])
def test_blocks_of_equal_tokens_are_represented_exactly(heads: slice) -> None:
    """Half of the blocks read as they are, the others by their means, which are all their tokens."""
    torch.manual_seed(0)
    blocks, size, scale = 6, 8, 0.3
    keys, values = (
        torch.randn(blocks, 1, 2, 16).half().float().expand(-1, size, -1, -1).contiguous() for _ in range(2)
    )
    centroids = Centroids(blocks, 1, 2, 16)
    centroids.put(0, torch.arange(blocks), keys, values)
    keys, values = keys[:, :, heads], values[:, :, heads]
    q = torch.randn(2, 3 * keys.shape[2], 16)
    table = torch.tensor([[1, 4, 0], [5, 2, 3]])
    valid = torch.tensor([[True, True, False], [True, True, True]])
    out, lse = centroids.attend(0, q, table, valid, size, scale, heads)
    for i, used in enumerate(([1, 4], [5, 2, 3])):
        rest = [b for b in range(blocks) if b not in used]
        near(out[i], dense(q[i], keys[used].flatten(0, 1), values[used].flatten(0, 1), scale))
        k, v = keys[rest].flatten(0, 1), values[rest].flatten(0, 1)
        group = q.shape[1] // k.shape[1]
        logits = torch.einsum("hd,mhd->hm", q[i], k.repeat_interleave(group, 1)) * scale
        both = merge(
            dense(q[i], k, v, scale)[None].float(), logits.logsumexp(-1)[None], out[i : i + 1], lse[i : i + 1]
        )
        near(both[0][0], dense(q[i], keys.flatten(0, 1), values.flatten(0, 1), scale))
    nothing = centroids.attend(0, q, table, torch.zeros_like(valid), size, scale, heads)
    assert not nothing[0].any() and (nothing[1] == -torch.inf).all()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_engine_estimates_what_is_missing_and_never_waits_for_it(model, groups: int) -> None:
    slots = model.config.num_layers * 40
    engine = oasis_engine(
        model, slots, kv_budget=64, miss_policy="estimate", head_groups=groups, link=slow_failing_link(3, 0.3)
    )
    kv = engine.runner.kv
    used = []
    attend = kv.centroids.attend
    kv.centroids.attend = lambda *args: used.append(int(args[3].sum())) or attend(*args)
    callers = [Caller(engine, p, GREEDY) for p in prompts_of([200, 180])]
    while not all(c.done for c in callers):
        turn(engine)
        kv.check()
        kv.coordinator._clock.elapse(0.05)
    assert all(c.error is None and len(c.outputs[0].token_ids) == 20 for c in callers)
    assert kv.stats.estimated == sum(used) > 0
    assert kv.stats.misses == kv.stats.fetched_now + kv.stats.skipped + kv.stats.estimated
    assert "kv_block_estimated" in engine.metrics.render().decode()


def test_it_is_refused_where_no_means_are_kept(model) -> None:
    engine = oasis_engine(model, model.config.num_layers * 40, kv_budget=64)
    with pytest.raises(RequestError, match="miss_policy=estimate: needs an engine") as caught:
        engine.submit([3] * 20, SamplingParams(miss_policy="estimate"), print)
    assert caught.value.param == "miss_policy"
