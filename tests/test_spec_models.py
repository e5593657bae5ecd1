"""Every draft on tiny real models: same tokens as without, in the dense, oasis and lossless modes."""

import json
import random

import pytest
import torch
from draft_fakes import KnownDraft, RandomDraft
from fakes import Caller, run, turn
from make_checkpoints import make_hf
from make_tokenizers import write_bpe_folder
from oasis_engines import (
    COORDINATORS,
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
from nano_oasis.kernels.dispatch import select_kernels
from nano_oasis.memory.dense_kv import DenseKV
from nano_oasis.memory.kv_cache import KVCache
from nano_oasis.memory.lookahead import weights
from nano_oasis.request import Request, RequestError, SamplingParams, ScheduledRow
from nano_oasis.spec.auto import AutoDraft
from nano_oasis.spec.calibrate import calibrate, read_layers, save_layers
from nano_oasis.spec.chain import Calibration, Chains
from nano_oasis.spec.draft import Chance
from nano_oasis.spec.model_draft import ModelDraft
from nano_oasis.spec.ngram import NGramDraft
from nano_oasis.spec.self_draft import SelfDraft, format_layers, parse_layers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {}
    for family in ("llama", "gemma3"):
        paths[family] = tmp_path_factory.mktemp(family)
        make_hf(family, paths[family])
    return paths


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    while COORDINATORS:
        COORDINATORS.pop().stop()


def model_draft(model, blocks=120):
    """The same model as its own draft, on a KV cache of its own: nearly always right."""
    cache = KVCache.allocate(model.config, blocks, B, torch.float32, "cpu")
    return ModelDraft(model, DenseKV(cache, select_kernels("cpu")), LIMIT, model.config.vocab_size)


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


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["ngram", "self", "whole", "model", "small", "random", "auto"])
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
    engine.metrics.drafts = drawn.extend
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


@pytest.mark.parametrize("faults", ["none", "slow", "failing"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_lossless_equals_dense_under_pressure(folders, family, seed, faults):
    """A working set of a few blocks, copies that are late or fail: the output does not depend on it."""
    rng = random.Random(seed)
    model = model_of(folders[family])
    link = None if faults == "none" else slow_failing_link(seed, 0.02 if faults == "failing" else 0.0)
    layers = range(model.config.num_layers)
    draft = rng.choice(
        [SelfDraft(model, layers, model.config.vocab_size), RandomDraft(model.config.vocab_size)]
    )
    # Sliding windows wait for their blocks, and a copy that fails there fails the request.
    if faults == "failing" and family == "gemma3":
        pytest.skip("a window's missing block is an error of the request, as in the oasis mode")
    groups, per_layer = rng.choice([1, 2]), rng.choice([50, 62])
    engine = oasis_engine(
        model, model.config.num_layers * groups * per_layer, link=link, kv_mode="lossless", kv_budget=48,
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


@pytest.mark.parametrize("predictor", ["lookahead", "previous", "current"])
@pytest.mark.parametrize("policy", ["repair", "skip", "wait"])
def test_sparse_rows_of_drafts_keep_the_invariants(folders, predictor, policy):
    if predictor == "current" and policy == "skip":
        pytest.skip("refused by EngineConfig")
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


# --- parts -----------------------------------------------------------------------------------------
def row_of(request, count, price=0.0):
    return ScheduledRow(request, request.num_tokens - 1, 1, True, max_drafts=count, price=price)


def test_chains_stop_where_a_token_is_not_likely_enough():
    request = Request([1, 2, 3], GREEDY, 100, 0, output_ids=[4])
    sure = [0.9, 0.8, 0.5, 0.9]

    def step(going, tokens, done):
        return tokens + 1, torch.tensor([sure[done]] * len(going))

    chains = Chains()
    assert chains.draft([row_of(request, 4)], step) == [[5, 6, 7, 8]]
    assert chains.draft([row_of(request, 4, price=0.5)], step) == [[5, 6]]  # 0.94 * 0.81 * 0.56 is less
    assert chains.draft([row_of(request, 4, price=0.95)], step) == [[]]
    assert chains.draft([row_of(request, 2)], step) == [[5, 6]]


def test_calibration_learns_the_chance_of_each_confidence():
    calibration = Calibration()
    assert calibration.chance(0.9) > 0.8 > 0.3 > calibration.chance(0.1)
    for _ in range(300):
        calibration.learn([0.9, 0.9], 0)  # the second is unknown
        calibration.learn([0.3, 0.35, 0.32], 3)
    assert calibration.chance(0.9) < 0.05 and calibration.chance(0.33) > 0.95
    assert calibration.chance(0.6) == pytest.approx(9 / 16)
    chance = Chance()
    for _ in range(50):
        chance.learn(1, 3)  # one right, one wrong, one unknown
    assert chance.value == pytest.approx(0.5, abs=1e-3) and chance.worth(4, 0.3) == 1


def test_layers_are_parsed_calibrated_and_kept(folders, tmp_path):
    assert parse_layers("0-2,5, 7-7", 8) == [0, 1, 2, 5, 7] and format_layers([0, 1, 2, 5, 7]) == "0-2,5,7"
    for bad in ("", "3-1", "2,2", "0-8", "x", "1--2", "5,3"):
        with pytest.raises(ValueError, match="layer"):
            parse_layers(bad, 8)
    model = model_of(folders["llama"])
    found = calibrate(model, model.config.vocab_size)
    assert 0 < len(found.layers) < model.config.num_layers and 0 <= found.right <= 1
    path = tmp_path / "layers.json"
    save_layers(path, found, model)
    assert read_layers(path, model) == found.layers
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weight_bytes": 1}))
    with pytest.raises(ConfigError, match="another model"):
        read_layers(path, model)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="not a file of calibration"):
        read_layers(path, model)


def test_the_draft_model_catches_up_with_long_prompts_in_pieces(folders, monkeypatch):
    monkeypatch.setattr("nano_oasis.spec.model_draft.CATCH_UP", 16)
    model = model_of(folders["llama"])
    draft = model_draft(model)
    request = Request(prompts_of([50])[0], GREEDY, LIMIT, 0, output_ids=[7])
    found = [draft.propose([row_of(request, 3)])[0] for _ in range(5)]
    assert [len(f) for f in found] == [0, 0, 0, 3, 3]
    request.output_ids = [7, found[3][0], (found[3][1] + 1) % 60]  # the second draft was wrong
    draft.propose([row_of(request, 3)])
    fresh = model_draft(model)
    monkeypatch.setattr("nano_oasis.spec.model_draft.CATCH_UP", 512)
    assert fresh.propose([row_of(request, 3)]) == draft.propose([row_of(request, 3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "best"}, "draft: must be one of"),
        ({"num_draft_tokens": 3}, "num_draft_tokens: needs a draft"),
        ({"draft": "ngram", "num_draft_tokens": 17}, "between 1 and 16"),
        ({"draft": "model"}, "draft_model"),
        ({"draft": "ngram", "draft_head": "x"}, "draft_head: needs draft=head"),
        ({"draft": "head", "draft_layers": "0-3"}, "draft_layers: needs draft=self"),
        ({"kv_mode": "lossless", "host_kv_format": "int8"}, "lossless needs auto"),
        ({"selector": "mean"}, "needs kv_mode=oasis or lossless"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_drafts_of_another_vocabulary_and_layers_that_are_not_there_are_refused(folders, tmp_path):
    write_bpe_folder(folders["llama"])
    write_bpe_folder(folders["gemma3"])
    small = {"max_model_len": 64, "num_device_blocks": 16}
    with pytest.raises(ConfigError, match="layers must rise"):
        LLM(str(folders["llama"]), draft="self", draft_layers="0-99", **small)
    with pytest.raises(ConfigError, match="no built-in head"):
        LLM(str(folders["llama"]), draft="head", **small)
    with LLM(str(folders["llama"]), draft="self", draft_layers=str(tmp_path / "found.json"), **small) as llm:
        plain = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert (tmp_path / "found.json").exists()
    with LLM(str(folders["llama"]), draft="model", draft_model=str(folders["llama"]), **small) as llm:
        again = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
        assert again[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="kv_mode=lossless needs an engine"):
            llm.generate("a", SamplingParams(kv_mode="lossless"))
