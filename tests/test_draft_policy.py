"""Whether drafts pay, as the policy sees it: simulated steps of known cost and acceptance.

Owns: these checks. Must not know: models, drafts, time.
"""

import random

import pytest
from draft_fakes import request_of

from nano_oasis.scheduler.draft_policy import CHECK, FIRST, SILENT, PricedDrafts


def steps(policy, cost, plain, count, chance=1.0, requests=1, overhead=0.0):
    """Simulates so many steps; returns the draft counts used. overhead: of drafting at all, in seconds."""
    used = []
    fake = [request_of([1, 2])] * requests
    for _ in range(count):
        k = policy.counts(fake)[0]
        asked = k > 0
        k = next((j for j in range(k) if chance ** (j + 1) < policy.price), k)  # as a draft would
        right = sum(chance ** (j + 1) for j in range(k))
        policy.record(
            requests,
            k * requests,
            requests * (1 + right),
            plain + cost * k * requests + overhead * asked,
            (overhead or 0.001) * asked,
        )
        used.append(k)
    return used


def test_cheap_drafts_are_used_and_dear_ones_are_not():
    cheap = steps(PricedDrafts(6), cost=0.01, plain=1.0, count=400, chance=0.7)
    assert cheap[:FIRST] == [0] * FIRST and sum(k == 6 for k in cheap) > 350
    assert cheap.count(0) >= 400 // (CHECK + 2)  # a plain step now and then
    dear = steps(PricedDrafts(6), cost=2.0, plain=1.0, count=2000, chance=0.9)
    assert sum(dear) < 60 and max(dear[50:]) == 1  # a look now and then


def test_a_draft_that_takes_time_and_proposes_nothing_is_not_asked_for_long():
    policy = PricedDrafts(6)
    asked = 0
    for _ in range(1000):
        k = policy.counts([request_of([1, 2])])[0]
        asked += k > 0
        policy.record(1, 0, 1, 1.0 + 0.3 * (k > 0), 0.3 * (k > 0))
    assert 0 < asked < 150
    # And it is used again when it is right again.
    again = steps(policy, cost=0.01, plain=1.0, count=600, chance=0.8)
    assert sum(again[-100:]) > 500


def test_a_draft_token_is_proposed_while_it_is_likelier_than_its_price():
    used = steps(PricedDrafts(6), cost=0.25, plain=1.0, count=200, chance=0.6)
    # With two: 0.25 * (1 + .6 + .36) / 1.5 = 0.33 < 0.36, the second's chance; the third's is 0.216.
    assert sorted(used[20:])[len(used[20:]) // 2] == 2


def test_what_drafting_costs_at_all_does_not_make_drafts_fewer_and_fewer():
    """Half a step to draft anything, little for each token: all, or nothing; after a bad phase all again."""
    policy = PricedDrafts(6)
    steps(policy, cost=0.05, plain=1.0, count=150, chance=0.01, overhead=0.5)
    used = steps(policy, cost=0.05, plain=1.0, count=3000, chance=0.85, overhead=0.5)
    assert sum(k == 6 for k in used[1000:]) > 1800
    # Bold steps are few: most propose what is worth its price.
    used = steps(PricedDrafts(6), cost=0.25, plain=1.0, count=2000, chance=0.6)
    assert 5 < sum(k == 6 for k in used) < 80


def test_the_price_is_of_the_batch_size():
    policy = PricedDrafts(6)
    steps(policy, cost=2.0, plain=1.0, count=60, requests=8)
    assert policy.counts([request_of([1])] * 8) == [0] * 8
    steps(policy, cost=0.01, plain=1.0, count=20, requests=1)
    assert policy.counts([request_of([1])]) == [6]


def against_plain(fixed: float, cost: float, chance: float, noise: float, count: int = 3000) -> float:
    """Tokens a second against plain decoding, of a step that takes 1, `fixed` more with any draft tokens and
    `cost` for each, disturbed by `noise`. Drafts are found for nothing, as n-grams are."""
    draw, policy = random.Random(f"{fixed} {cost} {chance} {noise}"), PricedDrafts(6)
    seconds, plain, tokens = 0.0, 0.0, 0
    for _ in range(count):
        k = policy.counts([request_of([1, 2])])[0]
        asked = k > 0
        k = next((j for j in range(k) if chance ** (j + 1) < policy.price), k)
        right = next((j for j in range(k) if draw.random() >= chance), k)
        slow = 1 + abs(draw.gauss(0, noise))
        took = slow * (1 + (fixed + cost * k) * (k > 0))
        policy.record(1, k, 1 + right, took, 1e-4 * asked)
        seconds, plain, tokens = seconds + took, plain + slow, tokens + 1 + right
    return tokens / seconds * plain / count


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("chance", [0.02, 0.1, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize(
    ("fixed", "cost"), [(0.1, 0.02), (0.2, 0.02), (0.3, 0.02), (1.4, 0.005), (0, 0.5), (0, 3)]
)
def test_it_pays_or_it_is_off(fixed: float, cost: float, chance: float, noise: float) -> None:
    """F = 1.4: two rows cost more than twice as much as one, as without the compiled product."""
    assert against_plain(fixed, cost, chance, noise) > 0.97


def test_it_is_on_where_it_pays() -> None:
    assert against_plain(0.1, 0.02, 0.6, 0.1) > 1.7 and against_plain(1.4, 0.005, 0.95, 0.1) > 2.0


def test_a_wrong_first_impression_does_not_last() -> None:
    """The first steps with drafts were disturbed: a token seemed to cost half a step."""
    policy, used = PricedDrafts(6), []
    steps(policy, cost=0.5, plain=1.0, count=2 * FIRST, chance=0.4)
    used = steps(policy, cost=0.03, plain=1.0, count=2000, chance=0.4)
    assert sum(k >= 2 for k in used[1000:]) > 800


def test_while_nothing_can_be_learned_drafts_are_used_at_a_known_price_or_not_at_all() -> None:
    """Prompts are computed in every step: counts() is asked, record() is not called."""
    one = [request_of([1, 2])]
    unknown = PricedDrafts(6)
    steps(unknown, cost=0.02, plain=1.0, count=FIRST)
    assert [unknown.counts(one) for _ in range(SILENT + 50)][SILENT:] == [[0]] * 50
    assert sum(steps(unknown, cost=0.02, plain=1.0, count=100, chance=0.8)) > 300  # and then they are
    known = PricedDrafts(6)
    steps(known, cost=0.1, plain=1.0, count=300, chance=0.7)
    seen = [(known.counts(one), known.price) for _ in range(SILENT + 500)][SILENT:]
    assert {k for (k,), _ in seen} <= {0, 6} and all(price > 0.05 for (k,), price in seen if k)
