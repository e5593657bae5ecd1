"""Whether drafts pay, as the policy sees it: simulated steps of known cost and acceptance.

Owns: these checks. Must not know: models, drafts, time.
"""

from draft_fakes import request_of

from nano_oasis.scheduler.draft_policy import CHECK, FIRST, PricedDrafts


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
    assert 20 < sum(k == 6 for k in used) < 80


def test_the_price_is_of_the_batch_size():
    policy = PricedDrafts(6)
    steps(policy, cost=2.0, plain=1.0, count=100, requests=8)
    assert policy.counts([request_of([1])] * 8) == [0] * 8
    steps(policy, cost=0.01, plain=1.0, count=20, requests=1)
    assert policy.counts([request_of([1])]) == [6]
