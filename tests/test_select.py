"""The choice of blocks: the compiled version against its twin, and the twin against its contract.

Owns: these checks. Must not know: sketches, copies.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_oasis.kernels import select
from nano_oasis.kernels.select import EMPTY, FLYING, NO_SLOT, REPAIR, SKIP, WAIT, Pool


class World:
    """Seeded tables of n rows over up to `width` positions, some resident, some on their way."""

    def __init__(self, seed: int, n: int, width: int, policy: int | None = None, groups: int = 1) -> None:
        draw = np.random.default_rng(seed)
        self.blocks = draw.integers(1, width + 1, n)
        self.blocks[draw.integers(n)] = width
        seats = draw.permutation(n + 2)[:n]
        for i in range(1, n):  # some rows are the drafts of the one before
            if draw.random() < 0.4:
                seats[i], self.blocks[i] = seats[i - 1], min(self.blocks[i - 1] + draw.integers(2), width)
        if not (self.blocks == width).any():
            self.blocks[-1] = width
        self.mass = draw.choice(
            [0.0, 0.01, 0.2, 0.20001, 0.5], size=(groups, n, width)
        ).astype(np.float32) * draw.random((groups, n, width)).round(1).astype(np.float32)  # fmt: skip
        sink, recent = draw.integers(0, 3), draw.integers(1, 5)
        budget = np.maximum(draw.integers(1, width + 2, n), sink + recent + 1)
        policies = draw.integers(4, size=n) if policy is None else np.full(n, policy)
        columns = [
            seats, np.zeros(n), self.blocks, np.minimum(sink, self.blocks),
            np.maximum(self.blocks - recent, 0), np.minimum(budget, self.blocks),
            draw.integers(1, 17, n), policies,
        ]  # fmt: skip
        self.rows = np.stack(columns, 1).astype(np.int32)
        self.pool = Pool(groups * (n + 2) * width + 10)
        self.slot_of = np.full((groups, n + 2, width + 3), EMPTY, np.int32)
        for g, seat in itertools.product(range(groups), dict.fromkeys(seats.tolist())):
            ends = self.blocks[seats == seat]
            for m in range(ends.max()):
                kind = draw.choice(3, p=[0.6, 0.3, 0.1])
                if kind == 0 or m >= ends.min() - 1:
                    self.slot_of[g, seat, m] = self.take()
                elif kind == 2:
                    self.slot_of[g, seat, m] = FLYING
                    self.take()
        self.used_at = draw.integers(0, 9, self.slot_of.shape).astype(np.int32)
        self.caps = draw.integers(1, groups * width + 1, n).astype(np.int32)
        self.last = np.append(seats[1:] != seats[:-1], True)  # of its seat
        self.ahead = self.mass[:, :, ::-1].copy() if draw.random() < 0.5 else None
        self.reserve = int(draw.choice([0, self.pool.count[0], 10**6]))
        self.wanted, self.read = np.ones((2, groups, n, width), bool)
        self.table = np.full((groups, n, width), -9, np.int32)
        self.tokens = np.zeros((groups, n), np.int32)
        self.asks = np.zeros((4, groups * n * width), np.int32)
        self.counts = np.zeros(4, np.int64)

    def take(self) -> int:
        self.pool.count[0] -= 1
        return int(self.pool.free[self.pool.count[0]])

    def now(self, module) -> None:
        module.choose_now(
            self.mass, self.rows, self.slot_of, self.used_at, self.caps, self.pool.free, self.pool.count,
            self.reserve, np.float32(0.15), self.wanted, self.asks, self.counts,
        )  # fmt: skip

    def choose(self, module, most: int) -> None:
        module.choose_read(
            self.mass, self.rows, self.slot_of, self.used_at, self.caps, self.pool.free, self.pool.count,
            self.reserve, 77, (most * self.last).astype(np.int32), 16, self.ahead, self.wanted, self.read,
            self.table, self.tokens, self.asks, self.counts,
        )  # fmt: skip

    def state(self) -> list:
        asked = self.asks[:, : self.counts[select.ASKS]]
        arrays = [self.wanted, self.read, self.table, self.tokens, asked, self.counts, self.slot_of]
        return [a.tolist() for a in (*arrays, self.used_at, self.pool.count)]


SIZES = {
    "seed": st.integers(0, 10**6), "n": st.integers(1, 4), "width": st.integers(1, 40),
    "groups": st.integers(1, 3), "most": st.integers(0, 5),
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(**SIZES)
def test_the_compiled_version_is_its_twins_equal(
    seed: int, n: int, width: int, groups: int, most: int
) -> None:
    pytest.importorskip("numba")
    from nano_oasis.kernels import cpu_select

    one, two = World(seed, n, width, groups=groups), World(seed, n, width, groups=groups)
    one.now(select)
    two.now(cpu_select)
    assert one.state() == two.state()
    one.choose(select, most)
    two.choose(cpu_select, most)
    assert one.state() == two.state()


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_slots_are_kept_and_budgets_respected(seed: int, n: int, width: int, groups: int, most: int) -> None:
    w = World(seed, n, width, groups=groups)
    before, free = w.slot_of.copy(), set(w.pool.free[: w.pool.count[0]].tolist())
    w.now(select)
    for i, row in enumerate(w.rows):
        wanted = w.wanted[:, i]
        assert wanted.sum() == groups * row[select.BUDGET] and not wanted[:, row[select.BLOCKS] :].any()
        assert wanted[:, : row[select.SINK]].all()
        assert wanted[:, row[select.RECENT] : row[select.BLOCKS]].all()
    given_now = asked(w)
    wanted = w.wanted.copy()
    w.choose(select, most)
    given_later = asked(w)
    for seat in dict.fromkeys(w.rows[:, select.SEAT].tolist()):  # more only out of plenty
        held, had = ((x[:, seat] != EMPTY).sum() for x in (w.slot_of, before))
        caps = w.caps[w.rows[:, select.SEAT] == seat]
        assert held <= max(caps.max(), had) or w.reserve == 0
    read_slots = set(w.table[w.table != -9].tolist())
    assert not read_slots & {s for *_, s in given_later}, "what is read now is written over"
    slots = [s for *_, s in given_now + given_later if s != NO_SLOT]
    assert len(set(slots)) == len(slots)
    victims = set(before[before >= 0].tolist()) - set(w.slot_of[w.slot_of >= 0].tolist())
    assert set(slots) == victims | (free - set(w.pool.free[: w.pool.count[0]].tolist()))
    for g, i, m, slot in given_now + given_later:
        seat = w.rows[i, select.SEAT]
        assert w.slot_of[g, seat, m] == FLYING and (w.wanted[g, i, m] or wanted[g, i, m])
        claimed = any(
            s != NO_SLOT and (h, w.rows[j, select.SEAT], p) == (g, seat, m) for h, j, p, s in given_now
        )
        assert slot != NO_SLOT or before[g, seat, m] == FLYING or claimed  # by an earlier row of the seat
    for (i, row), g in itertools.product(enumerate(w.rows), range(groups)):
        held, was = w.slot_of[g, row[select.SEAT]], before[g, row[select.SEAT]][:width]
        picked = w.table[g, i][w.table[g, i] != -9]
        assert picked.tolist() == was[w.read[g, i]].tolist() and not (w.read[g, i] & (was < 0)).any()
        assert held[row[select.BLOCKS] - 1] == picked[-1]
        assert w.tokens[g, i] == (len(picked) - 1) * 16 + row[select.TAIL]


def asked(w: World) -> list[tuple[int, int, int, int]]:
    return [tuple(a) for a in w.asks[:, : w.counts[select.ASKS]].T.tolist()]


@pytest.mark.parametrize("policy", [SKIP, REPAIR, WAIT])
def test_what_a_policy_insists_on(policy: int) -> None:
    w = World(5, 2, 30, policy, groups=2)
    w.reserve = 0  # free slots for all
    before = w.slot_of.copy()
    w.now(select)
    missing = set(zip(*np.nonzero(w.wanted), strict=True))
    missing = {(g, i, m) for g, i, m in missing if before[g, w.rows[i, select.SEAT], m] < 0}
    heavy = {at for at in missing if w.mass[at] > np.float32(0.15)}
    want = {SKIP: set(), REPAIR: heavy, WAIT: missing}[policy]
    assert {(g, i, m) for g, i, m, _ in asked(w)} == want and (policy == SKIP or want)
    assert w.counts[select.MISSES] == len(missing)
    assert w.counts[select.SKIPPED] == len(missing) - len(want)


def test_groups_share_a_budget_and_slots() -> None:
    """A group whose mass is on few blocks leaves the others its places, and gives up slots for them."""
    w = World(4, 1, 20, WAIT, groups=2)
    row = w.rows[0]
    row[[select.SINK, select.RECENT, select.BUDGET, select.BLOCKS]] = 1, 19, 6, 20
    w.slot_of[:, row[select.SEAT], :20] = EMPTY
    for g in range(2):
        w.slot_of[g, row[select.SEAT], [0, 19, 2, 3, 4, 5]] = np.arange(6) + 10 * g
    w.mass[:] = 0
    w.mass[0, 0, 2] = 0.9  # of group 0 this one only
    w.mass[1, 0, 2:9] = 0.1
    w.pool.count[0], w.reserve, w.caps[:] = 0, 0, 12
    w.now(select)
    assert np.flatnonzero(w.wanted[0, 0]).tolist() == [0, 2, 19]
    assert np.flatnonzero(w.wanted[1, 0]).tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 19]
    assert {(g, m) for g, _, m, _ in asked(w)} == {(1, 6), (1, 7), (1, 8)}
    assert {s for *_, s in asked(w)} == {3, 4, 5}, "the slots that group 0 does not want"


def test_victims_are_the_least_recently_read_of_the_row() -> None:
    w = World(3, 1, 20, SKIP)
    row = w.rows[0]
    row[[select.SINK, select.RECENT, select.BUDGET, select.BLOCKS]] = 1, 18, 6, 20
    held = w.slot_of[0, row[select.SEAT]]
    held[:20] = np.arange(20)
    held[5] = EMPTY
    w.used_at[0, row[select.SEAT], :20] = [9, 4, 4, 1, 2, 0, *[7] * 14]
    w.mass[:] = 0
    w.mass[0, 0, [5, 3]] = 0.9, 0.8  # 3 is the oldest, but wanted
    w.mass[0, 0, 10] = 0.5
    w.pool.count[0], w.reserve, w.ahead = 0, 0, None
    w.now(select)
    w.choose(select, 1)
    assert asked(w) == [(0, 0, 5, 4)] and held[4] == EMPTY and held[5] == FLYING
