"""The choice of blocks: the compiled version against its twin, and the twin against its contract.

Owns: these checks. Must not know: sketches, copies.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_oasis.kernels import select
from nano_oasis.kernels.select import EMPTY, FLYING, NO_SLOT, REPAIR, SKIP, WAIT, Pool


class World:
    """Seeded tables of n rows over up to `width` positions, some resident, some on their way."""

    def __init__(self, seed: int, n: int, width: int, policy: int | None = None) -> None:
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
            [0.0, 0.01, 0.2, 0.20001, 0.5], size=(n, width)
        ).astype(np.float32) * draw.random((n, width)).round(1).astype(np.float32)  # fmt: skip
        sink, recent = draw.integers(0, 3), draw.integers(1, 5)
        budget = np.maximum(draw.integers(1, width + 2, n), sink + recent + 1)
        policies = draw.integers(4, size=n) if policy is None else np.full(n, policy)
        columns = [
            seats, np.zeros(n), self.blocks, np.minimum(sink, self.blocks),
            np.maximum(self.blocks - recent, 0), np.minimum(budget, self.blocks),
            draw.integers(1, 17, n), policies,
        ]  # fmt: skip
        self.rows = np.stack(columns, 1).astype(np.int32)
        self.pool = Pool((n + 2) * width + 10)
        self.slot_of = np.full((n + 2, width + 3), EMPTY, np.int32)
        for seat in dict.fromkeys(seats.tolist()):
            ends = self.blocks[seats == seat]
            for m in range(ends.max()):
                kind = draw.choice(3, p=[0.6, 0.3, 0.1])
                if kind == 0 or m >= ends.min() - 1:
                    self.slot_of[seat, m] = self.take()
                elif kind == 2:
                    self.slot_of[seat, m] = FLYING
                    self.take()
        self.used_at = draw.integers(0, 9, self.slot_of.shape).astype(np.int32)
        self.caps = draw.integers(1, width + 1, n).astype(np.int32)
        self.last = np.append(seats[1:] != seats[:-1], True)  # of its seat
        self.ahead = self.mass[:, ::-1].copy() if draw.random() < 0.5 else None
        self.reserve = int(draw.choice([0, self.pool.count[0], 10**6]))
        self.wanted, self.read = np.ones((2, n, width), bool)
        self.table = np.full((n, width), -9, np.int32)
        self.tokens = np.zeros(n, np.int32)
        self.asks = np.zeros((3, n * width), np.int32)
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


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 4), width=st.integers(1, 40), most=st.integers(0, 5))
def test_the_compiled_version_is_its_twins_equal(seed: int, n: int, width: int, most: int) -> None:
    pytest.importorskip("numba")
    from nano_oasis.kernels import cpu_select

    one, two = World(seed, n, width), World(seed, n, width)
    one.now(select)
    two.now(cpu_select)
    assert one.state() == two.state()
    one.choose(select, most)
    two.choose(cpu_select, most)
    assert one.state() == two.state()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 4), width=st.integers(1, 40), most=st.integers(0, 5))
def test_slots_are_kept_and_budgets_respected(seed: int, n: int, width: int, most: int) -> None:
    w = World(seed, n, width)
    before, free = w.slot_of.copy(), set(w.pool.free[: w.pool.count[0]].tolist())
    w.now(select)
    for row, wanted in zip(w.rows, w.wanted, strict=True):
        assert wanted.sum() == row[select.BUDGET] and not wanted[row[select.BLOCKS] :].any()
        assert wanted[: row[select.SINK]].all() and wanted[row[select.RECENT] : row[select.BLOCKS]].all()
    given_now = asked(w)
    wanted = w.wanted.copy()
    w.choose(select, most)
    given_later = asked(w)
    read_slots = {int(s) for row, picked in zip(w.table, w.read, strict=True) for s in row[: picked.sum()]}
    assert not read_slots & {s for _, _, s in given_later}, "what is read now is written over"
    slots = [s for _, _, s in given_now + given_later if s != NO_SLOT]
    assert len(set(slots)) == len(slots)
    victims = set(before[before >= 0].tolist()) - set(w.slot_of[w.slot_of >= 0].tolist())
    assert set(slots) == victims | (free - set(w.pool.free[: w.pool.count[0]].tolist()))
    for i, m, slot in given_now + given_later:
        assert w.slot_of[w.rows[i, select.SEAT], m] == FLYING and (w.wanted[i, m] or wanted[i, m])
        seat = w.rows[i, select.SEAT]
        claimed = any(s != NO_SLOT and (w.rows[j, select.SEAT], p) == (seat, m) for j, p, s in given_now)
        assert slot != NO_SLOT or before[seat, m] == FLYING or claimed  # by an earlier row of the seat
    for i, row in enumerate(w.rows):
        held = w.slot_of[row[select.SEAT]]
        picked = w.table[i][w.table[i] != -9]
        assert picked.tolist() == before[row[select.SEAT]][:width][w.read[i]].tolist()
        assert not (w.read[i] & (before[row[select.SEAT]][:width] < 0)).any()
        assert held[row[select.BLOCKS] - 1] == picked[-1]


def asked(w: World) -> list[tuple[int, int, int]]:
    return [tuple(a) for a in w.asks[:, : w.counts[select.ASKS]].T.tolist()]


@pytest.mark.parametrize("policy", [SKIP, REPAIR, WAIT])
def test_what_a_policy_insists_on(policy: int) -> None:
    w = World(5, 2, 30, policy)
    w.reserve = 0  # free slots for all
    w.now(select)
    missing = set(zip(*np.nonzero(w.wanted), strict=True))
    missing = {(i, m) for i, m in missing if World(5, 2, 30, policy).slot_of[w.rows[i, select.SEAT], m] < 0}
    heavy = {(i, m) for i, m in missing if w.mass[i, m] > np.float32(0.15)}
    want = {SKIP: set(), REPAIR: heavy, WAIT: missing}[policy]
    assert {(i, m) for i, m, _ in asked(w)} == want and (policy == SKIP or want)
    assert w.counts[select.MISSES] == len(missing)
    assert w.counts[select.SKIPPED] == len(missing) - len(want)


def test_victims_are_the_least_recently_read_of_the_row() -> None:
    w = World(3, 1, 20, SKIP)
    row = w.rows[0]
    row[[select.SINK, select.RECENT, select.BUDGET, select.BLOCKS]] = 1, 18, 6, 20
    held = w.slot_of[row[select.SEAT]]
    held[:20] = np.arange(20)
    held[5] = EMPTY
    w.used_at[row[select.SEAT], :20] = [9, 4, 4, 1, 2, 0, *[7] * 14]
    w.mass[0] = 0
    w.mass[0, [5, 3]] = 0.9, 0.8  # 3 is the oldest, but wanted
    w.mass[0, 10] = 0.5
    w.pool.count[0], w.reserve, w.ahead = 0, 0, None
    w.now(select)
    w.choose(select, 1)
    assert asked(w) == [(0, 5, 4)] and held[4] == EMPTY and held[5] == FLYING
