"""sampler.py: distributions, filters, isolation of rows (B057-B060, B062, B070)."""

import math

import pytest
import torch

from nano_oasis.request import Request, RequestError, SamplingParams
from nano_oasis.sampler import Sampler, draw, probabilities, token_logprobs, uniform

VOCAB = 50


def request(index=0, tokens=3, seed=1, ends=frozenset(), **params) -> Request:
    return Request(list(range(tokens)), SamplingParams(**params), 1000, seed, ends, index)


def rows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def brute_force(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """The same filters in float64, one row, by sorting."""
    probs = (logits.double() / p.temperature).softmax(0)
    probs[probs < p.min_p * probs.max()] = 0
    order = probs.argsort(descending=True)
    if p.top_k > 0:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    total = 0.0
    for i in order.tolist():
        if total >= p.top_p:
            probs[i] = 0
        total += probs[i].item()
    return probs / probs.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 0.95, "temperature": 1.7},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 10, "top_p": 0.7, "min_p": 0.02},
        {"top_p": 1e-6},
        {"top_p": 1e-300},
    ],
)
def test_filters_equal_brute_force(options):
    p = SamplingParams(**options)
    logits = rows(5)
    got = probabilities(logits.clone(), [p] * 5)
    for i in range(5):
        torch.testing.assert_close(got[i].double(), brute_force(logits[i], p), atol=1e-6, rtol=1e-4)


def test_top_p_falls_back_to_the_whole_vocabulary():
    flat = torch.zeros(1, 5000)
    flat[0, :10] = 0.01
    kept = probabilities(flat, [SamplingParams(top_p=0.9)]) > 0
    assert 4400 < kept.sum() <= 5000


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 5}])
def test_draws_follow_the_distribution(options):
    p = SamplingParams(**options)
    logits = rows(1, seed=4)[:, :12]
    probs = probabilities(logits, [p])
    n = 20_000
    ids = draw(probs.expand(n, -1), [uniform(9, 0, i) for i in range(n)])
    counts = torch.bincount(ids, minlength=12).double()
    expected = probs[0].double() * n
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    chi2 = ((counts - expected)[live] ** 2 / expected[live]).sum().item()
    freedom = int(live.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_draw_never_lands_on_an_impossible_id():
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(probs, [u]).item() in (1, 2)
    assert draw(probs, [0.0]).item() == 1


def test_uniforms_are_uniform_and_differ_by_every_part_of_the_key():
    values = [uniform(s, i, p) for s in range(10) for i in range(10) for p in range(100)]
    assert len(set(values)) == len(values)
    assert abs(sum(values) / len(values) - 0.5) < 0.01 and min(values) >= 0 and max(values) < 1
    assert uniform(1, 23, 4) != uniform(12, 3, 4)


def test_B059_rows_do_not_affect_each_other():
    requests = [
        request(temperature=0, min_tokens=3, max_tokens=9, ends=frozenset({0, 1, 2})),
        request(top_p=0.7, seed=5),
        request(min_p=0.2, seed=6),
        request(temperature=0, stop_token_ids=[4], min_tokens=1),
        request(temperature=1.3, top_k=4, seed=7, logprobs=3),
        request(temperature=0, logprobs=2),
    ]
    logits = rows(len(requests))
    logits[0, :3] = 100.0
    together = Sampler(VOCAB)(logits.clone(), requests)
    for i, r in enumerate(requests):
        alone = Sampler(VOCAB)(logits[i : i + 1].clone(), [r])[0]
        assert alone.token_id == together[i].token_id
        assert (alone.logprob is None) == (together[i].logprob is None)
        if alone.logprob:
            assert alone.logprob.rank == together[i].logprob.rank
            assert alone.logprob.logprob == pytest.approx(together[i].logprob.logprob, abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-12, 0.0])
def test_B058_tiny_temperatures_are_greedy(temperature):
    logits = rows(4)
    got = Sampler(VOCAB)(logits.clone(), [request(temperature=temperature, seed=i) for i in range(4)])
    assert [t.token_id for t in got] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (math.nan, math.inf, -1, -0.1, "hot", True, None)],
        *[("top_p", v) for v in (0, -0.1, 1.1, math.nan)],
        *[("top_k", v) for v in (-2, 1.5, "5", True)],
        *[("min_p", v) for v in (-0.1, 1.1)],
        *[("seed", v) for v in (-1, 2**63, "x", 1.5)],
        *[("n", v) for v in (0, -1, 129, 1.0)],
        *[("max_tokens", v) for v in (-1, 1.5, "10")],
        *[("stop", v) for v in ("", [""], ["a", ""], [3], ["x"] * 17, 5, {"a": 1})],
        *[("stop_token_ids", v) for v in ([-1], ["a"], [True], 5, [10**30])],
        *[("logprobs", v) for v in (-1, 21, True)],
        ("ignore_eos", 1),
        ("min_tokens", 17),
    ],
)
def test_B058_bad_values_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off(top_k):
    p = probabilities(rows(1), [SamplingParams(top_k=top_k)])
    assert (p > 0).all()


def test_B070_padded_ids_are_never_drawn_nor_listed():
    logits = rows(2)
    logits[:, 40:] = 50.0
    got = Sampler(40)(logits, [request(temperature=0, logprobs=20), request(seed=3, logprobs=20)])
    for t in got:
        assert t.token_id < 40 and all(i < 40 for i, _ in t.logprob.top)


def test_B060_logprobs_are_finite_or_minus_infinity_never_nan():
    logits = rows(1)
    logits[0, 5:] = -torch.inf
    lp = token_logprobs(logits, [7], 20)[0]
    assert lp.logprob == -math.inf and lp.rank == 6
    assert not any(math.isnan(v) for _, v in lp.top)
    assert sum(math.exp(v) for _, v in lp.top) == pytest.approx(1, abs=1e-5)


def test_B062_min_tokens_bans_every_end_until_it_is_reached():
    r = request(temperature=0, min_tokens=2, stop_token_ids=[3, 9999], ends=frozenset({1, 2}))
    logits = rows(1)
    logits[0, 1], logits[0, 2], logits[0, 3] = 100, 99, 98
    assert Sampler(VOCAB)(logits.clone(), [r])[0].token_id not in (1, 2, 3)
    r.output_ids = [5, 5]
    assert Sampler(VOCAB)(logits.clone(), [r])[0].token_id == 1


def test_logprobs_are_before_temperature_and_filters():
    logits = rows(1)
    hot = Sampler(VOCAB)(logits.clone(), [request(temperature=5.0, top_k=1, logprobs=1)])[0]
    expected = logits.log_softmax(-1)[0]
    assert hot.logprob.logprob == pytest.approx(expected[hot.token_id].item(), abs=1e-5)
    assert hot.logprob.rank == 1 and len(hot.logprob.top) == 1


def test_B060_logits_that_are_no_numbers_fail_instead_of_drawing():
    logits = rows(1)
    logits[0, 3] = torch.nan
    with pytest.raises(FloatingPointError, match="not numbers"):
        Sampler(VOCAB)(logits, [request(temperature=0)])
