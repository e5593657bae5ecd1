"""Every draft on tiny real models: same tokens as without, in the dense, oasis and lossless modes."""

import random

import pytest
import torch
from draft_fakes import KnownDraft, RandomDraft, model_draft, row_of
from fakes import Caller, run, turn
from make_tokenizers import write_bpe_folder
from oasis_engines import (
    GREEDY,
    LIMIT,
    dense_engine,
    model_of,
    oasis_engine,
    outputs,
    prompts_of,
    slow_failing_link,
)

from nano_oasis import LLM
from nano_oasis.config import ConfigError
from nano_oasis.memory.lookahead import weights
from nano_oasis.request import Request, SamplingParams
from nano_oasis.spec.auto import AutoDraft
from nano_oasis.spec.head import DraftHead, HeadConfig
from nano_oasis.spec.head_draft import HeadDraft
from nano_oasis.spec.model_draft import ModelDraft
from nano_oasis.spec.ngram import NGramDraft
from nano_oasis.spec.self_draft import SelfDraft

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def untrained_head(model):
    config = HeadConfig(model.config.hidden_size, 16, 1, 32)
    draw = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(shape, generator=draw) * 0.1 for n, shape in config.shapes().items()}
    return DraftHead(config, weights, torch.arange(32), model)


def make_draft(name, model):
    size, layers = model.config.vocab_size, range(model.config.num_layers)
    return {
        "ngram": NGramDraft,
        "self": lambda: SelfDraft(model, [0], size),
        "whole": lambda: SelfDraft(model, layers, size),
        "model": lambda: model_draft(model),
        "small": lambda: model_draft(model, 26),  # its own KV does not hold all requests
        "random": lambda: RandomDraft(size),
        "auto": lambda: AutoDraft(SelfDraft(model, [0], size)),
        "head": lambda: HeadDraft(untrained_head(model)),
        "auto head": lambda: AutoDraft(HeadDraft(untrained_head(model))),
    }[name]()


MIXED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=9, seed=5, max_tokens=23, logprobs=2),
]


def answers(engine, prompts):
    callers = [Caller(engine, p, MIXED[i % 3]) for i, p in enumerate(prompts)]
    run(engine, *callers)
    return [(c.outputs[0].token_ids, c.outputs[0].finish_reason) for c in callers]


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize(
    "name", ["ngram", "self", "whole", "model", "small", "random", "auto", "head", "auto head"]
)
def test_dense_output_is_that_of_plain_decoding(folders, name, count):
    model = model_of(folders["llama"])
    # Repetition for the n-grams; 40 blocks make some requests wait or start again.
    prompts = [p[:20] + p[:20] + p for p in prompts_of([5, 60, 33, 47, 80, 9])]
    expected = answers(dense_engine(model), prompts)
    draft = make_draft(name, model)
    engine = dense_engine(model, num_blocks=40, draft=draft, drafts=count)
    assert answers(engine, prompts) == expected
    assert engine.scheduler.blocks.num_free == 40
    if isinstance(draft, ModelDraft):
        assert not draft._shadows and draft.blocks.num_free == draft.blocks.num_blocks


@pytest.mark.parametrize("name", ["whole", "model"])
def test_a_draft_that_is_the_model_itself_is_always_right(folders, name):
    """So its KV is kept in step: through the prompt, steps of others, and what was accepted."""
    model = model_of(folders["llama"])
    engine = dense_engine(model, draft=make_draft(name, model), drafts=4)
    drawn = []
    engine.metrics.decodes = drawn.extend
    outputs(engine, prompts_of([5, 60, 33]), GREEDY)
    # Only the last step of a request may verify drafts past its end, which count as accepted too.
    assert drawn and all(right == proposed for proposed, right in drawn)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["ngram", "self", "random"])
def test_oasis_with_room_or_budget_for_all_equals_dense(folders, family, name):
    model = model_of(folders[family])
    prompts = prompts_of([5, 100, 33, 64, 180, 9])
    expected = outputs(dense_engine(model), prompts, GREEDY)
    planes = model.config.num_layers
    roomy = oasis_engine(model, planes * 130, draft=make_draft(name, model), drafts=3)
    assert outputs(roomy, prompts, GREEDY) == expected
    tight = oasis_engine(
        model, planes * 80, kv_budget=LIMIT, predictor="current", draft=make_draft(name, model), drafts=3
    )
    assert outputs(tight, prompts, GREEDY) == expected


# Sliding windows (gemma3) wait for their blocks, and a copy that fails there fails the request.
@pytest.mark.parametrize(
    ("family", "faults"),
    [("llama", "none"), ("llama", "slow"), ("llama", "failing"), ("gemma3", "none"), ("gemma3", "slow")],
)
@pytest.mark.parametrize("seed", range(5))
def test_lossless_equals_dense_under_pressure(folders, family, seed, faults):
    """A working set of a few blocks, copies that are late or fail: the output does not depend on it."""
    rng = random.Random(seed)
    model = model_of(folders[family])
    link = None if faults == "none" else slow_failing_link(seed, 0.02 if faults == "failing" else 0.0)
    layers = range(model.config.num_layers)
    draft = rng.choice(
        [SelfDraft(model, layers, model.config.vocab_size), RandomDraft(model.config.vocab_size)]
    )
    groups, per_layer = rng.choice([1, 2]), rng.choice([50, 62])
    engine = oasis_engine(
        model, model.config.num_layers * per_layer, link=link, kv_mode="lossless", kv_budget=48,
        draft=draft, drafts=rng.choice([1, 3, 5]), selector=rng.choice(["exact", "mean"]),
        head_groups=groups, max_num_seqs=4,
    )  # fmt: skip
    prompts = prompts_of([200, 40, 150, 120, 8], seed)
    callers = [Caller(engine, p, GREEDY) for p in prompts]
    shrunk = 0
    while not all(c.done for c in callers):
        turn(engine)
        engine.runner.kv.check()
        shrunk += sum(not s.dense for s in engine.runner.kv.seats.values())
    assert shrunk > 0 or family == "gemma3"  # whose windows may keep all that fits
    expected = outputs(dense_engine(model), prompts, GREEDY)
    assert [c.outputs[0].token_ids for c in callers] == expected


def test_a_lossless_request_in_an_oasis_engine_is_exact_beside_approximate_ones(folders):
    model = model_of(folders["llama"])
    prompts = prompts_of([200, 190, 150])
    engine = oasis_engine(model, model.config.num_layers * 50, kv_budget=48, selector="mean")
    exact = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, kv_mode="lossless")
    callers = [Caller(engine, p, exact if i == 1 else GREEDY) for i, p in enumerate(prompts)]
    run(engine, *callers)
    assert callers[1].outputs[0].token_ids == outputs(dense_engine(model), [prompts[1]], GREEDY)[0]


@pytest.mark.parametrize(
    ("predictor", "policy"),
    [(p, m) for p in ("lookahead", "previous") for m in ("repair", "skip", "wait")]
    + [("current", "repair"), ("current", "wait")],  # EngineConfig refuses to skip with it
)
def test_sparse_rows_of_drafts_keep_the_invariants(folders, predictor, policy):
    model = model_of(folders["llama"])
    prompts = prompts_of([200, 180, 150])
    truth = outputs(dense_engine(model), prompts, GREEDY)
    expected = {(tuple(p), 0, GREEDY): list(t) for p, t in zip(prompts, truth, strict=True)}
    engine = oasis_engine(
        model, model.config.num_layers * 60, kv_budget=64, predictor=predictor, miss_policy=policy,
        draft=KnownDraft(expected, model.config.vocab_size, 0.6), drafts=3, audit_every=2,
    )  # fmt: skip
    callers = [Caller(engine, p, GREEDY) for p in prompts]
    kv = engine.runner.kv
    while not all(c.done for c in callers):
        turn(engine)
        kv.check()
    assert all(len(c.outputs[0].token_ids) == 20 for c in callers)
    agreement = kv.lookahead.agreement
    if predictor != "current":
        assert agreement["lookahead"].count > 0 and 0 < agreement["lookahead"].mean <= 1
    assert kv.stats.recall_count > 0
    assert "kv_agreement_lookahead" in engine.metrics.render().decode()


def test_lookahead_weighs_each_draft_by_where_the_next_step_may_begin():
    assert weights(0.5, 1).tolist() == [1.0]
    assert weights(0.5, 3).tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert weights(0.9, 4).sum() == pytest.approx(1) and weights(0.9, 4)[-1] > 0.7


# --- what a review found ---------------------------------------------------------------------------
def test_blocks_that_sparse_attention_has_touched_are_nobody_elses(folders):
    """A lossless request that continues an approximate one's text computes it again."""
    model = model_of(folders["llama"])
    engine = oasis_engine(model, model.config.num_layers * 50, kv_budget=48, selector="mean")
    prompts = prompts_of([200, 190, 150])
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    callers = [Caller(engine, p, long) for p in prompts]
    run(engine, *callers)
    follow = prompts[0] + list(callers[0].outputs[0].token_ids) + [7, 8, 9]
    exact = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, kv_mode="lossless")
    after = Caller(engine, follow, exact)
    run(engine, after)
    assert after.builder.result.num_cached_tokens >= 190  # the prompt's own blocks are shared
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert after.outputs[0].token_ids == outputs(dense_engine(model), [follow], plain)[0]


@pytest.mark.parametrize("mode", ["lossless", "oasis"])
def test_drafts_never_take_the_slot_of_a_block_that_is_not_sealed(folders, mode):
    model = model_of(folders["llama"])
    draft = SelfDraft(model, range(model.config.num_layers), model.config.vocab_size)
    engine = oasis_engine(
        model, model.config.num_layers * 50, kv_mode=mode, kv_budget=40, recent_blocks=1, draft=draft,
        drafts=5, max_num_seqs=4,
    )  # fmt: skip
    prompts = prompts_of([200, 150, 120, 90])
    got = outputs(engine, prompts, GREEDY)
    assert all(len(tokens) == 20 for tokens in got)
    if mode == "lossless":
        assert got == outputs(dense_engine(model), prompts, GREEDY)


def test_a_draft_that_cannot_be_made_leaves_nothing_behind(folders, tmp_path):
    write_bpe_folder(folders["llama"])
    options = {
        "max_model_len": 64, "num_device_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4,
        "kv_mode": "oasis", "host_kv_memory": "8MiB", "host_kv_path": str(tmp_path / "kv"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="draft_layers"):
        LLM(str(folders["llama"]), draft="self", draft_layers="0-99", **options)
    with LLM(str(folders["llama"]), **options) as llm:  # the file is not in use
        assert llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)[0].outputs[0].token_ids


def test_auto_gives_the_ngrams_another_chance(folders):
    model = model_of(folders["llama"])
    auto = AutoDraft(SelfDraft(model, [0], model.config.vocab_size))
    request = Request([1, 2, 3, 4, 5, 6, 1, 2], GREEDY, 10_000, 0, output_ids=[3])
    for _ in range(30):  # wrong for long
        auto.ngram.propose([row_of(request, 3)])
        auto.ngram.observe([row_of(request, 3).with_drafts((4, 5))], [0], torch.zeros(1, 1))
    tried = [auto.ngram.likely(row_of(request, 3), rival=0.5) for _ in range(40)]
    assert tried[0] == [] and [4] in tried
    for _ in range(30):
        auto.ngram.observe([row_of(request, 3).with_drafts((4, 5))], [2], torch.zeros(1, 1))
    assert auto.ngram.likely(row_of(request, 3), rival=0.5) == [4, 5, 6]
