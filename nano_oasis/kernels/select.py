"""Which blocks the shrunk rows of a step read, which they miss, and whose slots the missing ones get.

Owns: the rule, in numpy, on the host: the twin of cpu_select.py. Must not know: how mass is estimated, how
blocks are brought, requests. Letters in shapes: n rows, M positions (blocks of the longest row), P seats,
G head groups of the layer.

Per row a budget of blocks is *wanted*: the forced ones (sink, recent), then those of the largest mass. Where
the KV heads of a layer choose in groups, each group has a mass and blocks of its own, and all of them share
the row's budget: a head that looks at few blocks leaves the rest to the others (as in Ada-KV, arXiv
2407.11550, where heads share what they keep). What is wanted and not resident is a miss. choose_now says
which misses the step must not go without; when those have arrived choose_read picks the best resident blocks,
and what the next step should find.

Several rows may have one seat: a request's newest token and its drafts, one after another. Each chooses with
its own mass; a slot that an earlier row of the seat wants, or that any reads, is not taken for a later one.
The groups of a seat draw on one cap, so one may get the slot of another.
"""

from __future__ import annotations

import numpy as np

# Columns of `rows`, int32 [n, 8]: the row's seat, first visible block, blocks in all (the newest may be
# partial), end of the sink, first of the recent blocks, budget in blocks of a group (of which there are G
# times as many to share), tokens in the newest block, what to do on a miss.
SEAT, FIRST, BLOCKS, SINK, RECENT, BUDGET, TAIL, POLICY = range(8)
SKIP, REPAIR, WAIT, ESTIMATE = range(4)  # values of POLICY; for the choice the last is as the first
EMPTY, FLYING = -1, -2  # values of slot_of: not on the device; on its way
HITS, MISSES, SKIPPED, ASKS = range(4)  # of `counts`
GROUP, ROW, POSITION, SLOT = range(4)  # rows of `asks`, int32 [4, most]
NO_SLOT = -1  # of asks: on its way already, to be waited for


class Pool:
    """The free slots, a stack: low ids on top, so that a lightly used pool stays compact."""

    def __init__(self, size: int) -> None:
        self.free = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.count = np.array([size])


def choose_now(
    mass: np.ndarray, rows: np.ndarray, slot_of: np.ndarray, used_at: np.ndarray, caps: np.ndarray,
    free: np.ndarray, free_count: np.ndarray, reserve: int, threshold: float,
    wanted: np.ndarray, asks: np.ndarray, counts: np.ndarray,
) -> None:  # fmt: skip
    """Mark what each row wants, and claim slots for the misses it cannot go without.

    mass fp32 [G, n, M]; rows int32 [n, 8]; slot_of, used_at int32 [G, P, positions]: a block's slot, and the
    step that last read it; caps int32 [n]: slots a row may hold in all groups; free int32, free_count int64
    [1]: the pool's stack, of which `reserve` slots are for new tokens; threshold: mass above which a REPAIR
    row does not go without. Written: wanted bool [G, n, M]; asks int32 [4, most] (group, row, position, its
    new slot, or NO_SLOT where the block is FLYING already); counts int64 [4]: HITS, MISSES, SKIPPED added to,
    ASKS set. slot_of is FLYING for new asks, EMPTY for the victims whose slots they get.
    """
    counts[ASKS] = 0
    for i, row in enumerate(rows):
        wanted[:, i] = best_blocks(mass[:, i], row)
    for i, row in enumerate(rows):
        held = slot_of[:, row[SEAT]]
        missing = wanted[:, i] & (held[:, : mass.shape[2]] < 0)
        counts[HITS] += wanted[:, i].sum() - missing.sum()
        counts[MISSES] += missing.sum()
        for g, m in np.argwhere(missing):
            insists = row[POLICY] == WAIT or (row[POLICY] == REPAIR and mass[g, i, m] > threshold)
            slot = NO_SLOT
            if insists and held[g, m] == EMPTY:
                kept = _of_seat(rows, i, wanted)
                slot = _claim(g, m, row, kept, slot_of, used_at, caps[i], free, free_count, reserve)
                insists = slot != NO_SLOT
            if insists:
                asks[:, counts[ASKS]] = g, i, m, slot
                counts[ASKS] += 1
            else:
                counts[SKIPPED] += 1


def choose_read(
    mass: np.ndarray, rows: np.ndarray, slot_of: np.ndarray, used_at: np.ndarray, caps: np.ndarray,
    free: np.ndarray, free_count: np.ndarray, reserve: int, step: int, most: np.ndarray, block_size: int,
    ahead: np.ndarray | None, wanted: np.ndarray, read: np.ndarray, table: np.ndarray, tokens: np.ndarray,
    asks: np.ndarray, counts: np.ndarray,
) -> None:  # fmt: skip
    """Pick the best resident blocks of each row's budget, and claim slots for what the next step should find.

    most int32 [n]: claims per row, 0 but for the last row of a seat. ahead fp32 [G, n, M]: the mass that the
    next step is expected to see; None: each row's own.

    As choose_now, and: read bool [G, n, M]: what is picked; table int32 [G, n, K]: its slots in order of
    position, so that the newest block, which may be partial and is always resident, is last; tokens int32
    [G, n]: how many tokens they hold; used_at becomes `step` for them; wanted: of rows with `ahead` that
    claim, what is wanted by it; asks: the heaviest of what is wanted and EMPTY.
    """
    counts[ASKS] = 0
    width = mass.shape[2]
    for i, row in enumerate(rows):
        held = slot_of[:, row[SEAT]]
        read[:, i] = best_blocks(mass[:, i], row, held[:, :width] >= 0)
        for g in range(len(mass)):
            picked = np.flatnonzero(read[g, i])
            table[g, i, : len(picked)] = held[g, picked]
            used_at[g, row[SEAT], picked] = step
            tokens[g, i] = (len(picked) - 1) * block_size + row[TAIL]
    for i, row in enumerate(rows):
        if most[i] == 0:
            continue
        order = mass[:, i] if ahead is None else ahead[:, i]
        kept = _of_seat(rows, i, wanted | read)
        if ahead is not None:
            wanted[:, i] = best_blocks(order, row)
            kept |= wanted[:, i]
        missing = np.argwhere(wanted[:, i] & (slot_of[:, row[SEAT], :width] == EMPTY))
        for g, m in missing[np.argsort(-order[*missing.T], kind="stable")][: most[i]]:
            slot = _claim(g, m, row, kept, slot_of, used_at, caps[i], free, free_count, reserve)
            if slot != NO_SLOT:
                asks[:, counts[ASKS]] = g, i, m, slot
                counts[ASKS] += 1


def best_blocks(mass: np.ndarray, row: np.ndarray, allowed: np.ndarray | bool = True) -> np.ndarray:
    """mass [G, M] -> bool [G, M]: a row's forced blocks in every group, then the heaviest of all groups, up
    to the budget; the earlier of equals."""
    at = np.arange(mass.shape[1])
    visible: np.ndarray = (at >= row[FIRST]) & (at < row[BLOCKS]) & allowed & np.ones(mass.shape, bool)
    forced = (at < row[SINK]) | (at >= row[RECENT])
    rank = np.where(forced, np.inf, mass).ravel()
    best = np.zeros(mass.size, bool)
    places = np.flatnonzero(visible)
    best[places[np.argsort(-rank[places], kind="stable")][: row[BUDGET] * len(mass)]] = True
    by_group: np.ndarray = best.reshape(mass.shape)
    return by_group


def _of_seat(rows: np.ndarray, i: int, marks: np.ndarray) -> np.ndarray:
    """bool [G, M]: what rows of the seat of row i have marked, up to row i."""
    mine = np.flatnonzero(rows[: i + 1, SEAT] == rows[i, SEAT])
    marked: np.ndarray = marks[:, mine].max(axis=1)
    return marked


def _claim(
    g: int, m: int, row: np.ndarray, kept: np.ndarray, slot_of: np.ndarray, used_at: np.ndarray,
    cap: int, free: np.ndarray, free_count: np.ndarray, reserve: int,
) -> int:  # fmt: skip
    """A slot for block m of group g: a free one if there are many or the row is below its cap, else that of
    the row's least recently read block that is neither kept nor forced, in any group; NO_SLOT if there is
    none."""
    held = slot_of[:, row[SEAT]]
    on_device = int((held != EMPTY).sum())
    if free_count[0] > reserve or (on_device < cap and free_count[0] > 0):
        free_count[0] -= 1
        slot = int(free[free_count[0]])
    else:
        low, high = row[SINK], max(row[RECENT], row[SINK])
        victims = np.argwhere((held[:, low:high] >= 0) & ~kept[:, low:high]) + [0, low]
        if not len(victims):
            return NO_SLOT
        victim = victims[np.argmin(used_at[victims[:, 0], row[SEAT], victims[:, 1]])]
        slot = int(held[*victim])
        held[*victim] = EMPTY
    held[g, m] = FLYING
    return slot
