"""The lookahead predictor: what it orders by, and when a request leaves it, by hand-made masses.

Owns: these checks. Must not know: engines, models.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nano_oasis.kernels import select
from nano_oasis.memory.lookahead import Lookahead, weights

BLOCKS, SINK, RECENT, BUDGET = 10, 1, 8, 4  # of every row; three are forced, so one is chosen


def seat(chance: float = 0.5) -> SimpleNamespace:
    return SimpleNamespace(draft_chance=chance, looks_ahead=True, agreement={}, foretold={})


def rows_of(*seats: tuple[SimpleNamespace, int]) -> SimpleNamespace:
    """(seat, how many drafts)"""
    drafts = np.array([j for _, count in seats for j in range(count + 1)])
    return SimpleNamespace(
        drafts=drafts, last=np.append(drafts[1:] == 0, True), has_drafts=bool(drafts.any()),
        seats=[s for s, count in seats for _ in range(count + 1)],
    )  # fmt: skip


def mass_on(*places: int) -> np.ndarray:
    """[1, n, BLOCKS]: each row's mass is nearly all on one block."""
    mass = np.full((1, len(places), BLOCKS), 0.01, np.float32)
    for i, place in enumerate(places):
        mass[0, i, place] = 0.9
    return mass


def layout(n: int) -> SimpleNamespace:
    row = [0, 0, BLOCKS, SINK, RECENT, BUDGET, 8, select.WAIT]
    return SimpleNamespace(rows=np.array([row] * n, np.int32))


def wanted(mass: np.ndarray) -> np.ndarray:
    rows = layout(mass.shape[1]).rows
    return np.stack([select.best_blocks(mass[:, i], rows[i]) for i in range(mass.shape[1])], 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_orders_by_the_drafts_weighted_by_where_the_next_step_begins(enabled: bool) -> None:
    with_drafts, plain = seat(0.5), seat()
    rows, mass = rows_of((with_drafts, 2), (plain, 0)), mass_on(2, 3, 4, 5)
    out = Lookahead(enabled, range(8)).ahead(rows, mass)
    assert out is not None
    if enabled:  # draft 1 is followed with chance 1/2, draft 2 with what is left
        first, second = weights(0.5, 2)
        np.testing.assert_allclose(out[:, 2], first * mass[:, 1] + second * mass[:, 2], rtol=1e-6)
    else:
        np.testing.assert_array_equal(out[:, 2], mass[:, 0])
    np.testing.assert_array_equal(out[:, 3], mass[:, 3])
    assert Lookahead(enabled, range(8)).ahead(rows_of((plain, 0)), mass_on(1)) is None


def step(ahead: Lookahead, who: SimpleNamespace, own: int, *drafts: int) -> None:
    mass = mass_on(own, *drafts)
    ahead.measure(0, rows_of((who, len(drafts))), layout(1 + len(drafts)), wanted(mass), mass)


def test_a_request_leaves_lookahead_where_previous_agrees_better_and_comes_back() -> None:
    ahead, who = Lookahead(True, range(8)), seat()
    for _ in range(3):  # the text stays at block 2, the drafts look elsewhere
        step(ahead, who, 2, 5)
    assert not who.looks_ahead
    assert ahead.agreement["previous"].mean > ahead.agreement["lookahead"].mean
    rows, mass = rows_of((who, 1)), mass_on(2, 5)
    out = ahead.ahead(rows, mass)
    np.testing.assert_array_equal(out[:, 1], mass[:, 0])  # type: ignore[index]
    for place in (
        3,
        4,
        5,
        6,
        2,
        3,
        4,
        5,
        6,
        2,
        3,
        4,
        5,
        6,
        2,
        3,
        4,
        5,
        6,
        2,
        3,
        4,
    ):  # each draft knows the next
        step(ahead, who, place, {2: 3, 3: 4, 4: 5, 5: 6, 6: 2}[place])
    assert who.looks_ahead


def test_a_rejected_draft_s_prediction_is_judged_and_used() -> None:
    """What is compared is what the draft's query named, whether or not the draft was right."""
    ahead, who = Lookahead(True, range(8)), seat()
    step(ahead, who, 2, 6)
    step(ahead, who, 6, 3)
    assert ahead.agreement["lookahead"].mean > ahead.agreement["previous"].mean


def test_a_step_without_drafts_ends_what_was_foretold() -> None:
    ahead, who = Lookahead(True, range(8)), seat()
    step(ahead, who, 2, 5)
    step(ahead, who, 3)
    step(ahead, who, 5, 5)
    assert ahead.agreement["lookahead"].count == 0 and who.looks_ahead
    step(ahead, who, 5, 5)
    assert ahead.agreement["lookahead"].count == 1
