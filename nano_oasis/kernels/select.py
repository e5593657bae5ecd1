"""Which blocks the shrunk rows of a step read, which they miss, and whose slots the missing ones get.

Owns: the rule, in numpy, on the host: the twin of cpu_select.py. Must not know: how mass is estimated, how
blocks are brought, requests. Letters in shapes: n rows, M positions (blocks of the longest row), P seats.

Per row a budget of blocks is *wanted*: the forced ones (sink, recent), then those of the largest mass. What
is wanted and not resident is a miss. choose_now says which misses the step must not go without; when those
have arrived choose_read picks the best resident blocks, and what the next step should find.

Several rows may have one seat: a request's newest token and its drafts, one after another. Each chooses with
its own mass; a slot that an earlier row of the seat wants, or that any reads, is not taken for a later one.
"""

from __future__ import annotations

import numpy as np

# Columns of `rows`, int32 [n, 8]: the row's seat, first visible block, blocks in all (the newest may be
# partial), end of the sink, first of the recent blocks, budget in blocks, tokens in the newest block, what to
# do on a miss.
SEAT, FIRST, BLOCKS, SINK, RECENT, BUDGET, TAIL, POLICY = range(8)
SKIP, REPAIR, WAIT, ESTIMATE = range(4)  # values of POLICY; for the choice the last is as the first
EMPTY, FLYING = -1, -2  # values of slot_of: not on the device; on its way
HITS, MISSES, SKIPPED, ASKS = range(4)  # of `counts`
ROW, POSITION, SLOT = range(3)  # rows of `asks`, int32 [3, most]
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

    mass fp32 [n, M]; slot_of, used_at int32 [P, positions]: a block's slot, and the step that last read it;
    caps int32 [n]: slots a row may hold; free int32, free_count int64 [1]: the pool's stack, of which
    `reserve` slots are for new tokens; threshold: mass above which a REPAIR row does not go without.
    Written: wanted bool [n, M]; asks int32 [3, most] (row, position, its new slot, or NO_SLOT where the block
    is FLYING already); counts int64 [4]: HITS, MISSES, SKIPPED added to, ASKS set. slot_of is FLYING for new
    asks, EMPTY for the victims whose slots they get.
    """
    counts[ASKS] = 0
    for i, row in enumerate(rows):
        wanted[i] = best_blocks(mass[i], row, np.ones(len(mass[i]), bool))
    for i, row in enumerate(rows):
        held = slot_of[row[SEAT]]
        missing = np.flatnonzero(wanted[i] & (held[: len(wanted[i])] < 0))
        counts[HITS] += wanted[i].sum() - len(missing)
        counts[MISSES] += len(missing)
        for m in missing:
            insists = row[POLICY] == WAIT or (row[POLICY] == REPAIR and mass[i, m] > threshold)
            slot = NO_SLOT
            if insists and held[m] == EMPTY:
                kept = _of_seat(rows, i, wanted)
                slot = _claim(i, m, row, kept, slot_of, used_at, caps, free, free_count, reserve)
                insists = slot != NO_SLOT
            if insists:
                asks[:, counts[ASKS]] = i, m, slot
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

    most int32 [n]: claims per row, 0 but for the last row of a seat. ahead fp32 [n, M]: the mass that the
    next step is expected to see; None: each row's own.

    As choose_now, and: read bool [n, M]: what is picked; table int32 [n, K]: its slots in order of position,
    so that the newest block, which may be partial and is always resident, is last; tokens int32 [n]: how many
    tokens they hold; used_at becomes `step` for them; wanted: of rows with `ahead` that claim, what is wanted
    by it; asks: the heaviest of what is wanted and EMPTY.
    """
    counts[ASKS] = 0
    for i, row in enumerate(rows):
        held = slot_of[row[SEAT]]
        read[i] = best_blocks(mass[i], row, held[: len(mass[i])] >= 0)
        picked = np.flatnonzero(read[i])
        table[i, : len(picked)] = held[picked]
        used_at[row[SEAT], picked] = step
        tokens[i] = (len(picked) - 1) * block_size + row[TAIL]
    for i, row in enumerate(rows):
        if most[i] == 0:
            continue
        held, order = slot_of[row[SEAT]], mass[i] if ahead is None else ahead[i]
        kept = _of_seat(rows, i, wanted | read)
        if ahead is not None:
            wanted[i] = best_blocks(order, row, np.ones(len(order), bool))
            kept |= wanted[i]
        missing = np.flatnonzero(wanted[i] & (held[: len(wanted[i])] == EMPTY))
        for m in missing[np.argsort(-order[missing], kind="stable")][: most[i]]:
            slot = _claim(i, m, row, kept, slot_of, used_at, caps, free, free_count, reserve)
            if slot != NO_SLOT:
                asks[:, counts[ASKS]] = i, m, slot
                counts[ASKS] += 1


def best_blocks(mass: np.ndarray, row: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """bool [M]: the row's forced blocks, then the heaviest, up to its budget; the earlier of equals."""
    at = np.arange(len(mass))
    visible = (at >= row[FIRST]) & (at < row[BLOCKS]) & allowed
    forced = (at < row[SINK]) | (at >= row[RECENT])
    rank = np.where(forced, np.inf, mass)
    best = np.zeros(len(mass), bool)
    places = np.flatnonzero(visible)
    best[places[np.argsort(-rank[places], kind="stable")][: row[BUDGET]]] = True
    return best


def _of_seat(rows: np.ndarray, i: int, marks: np.ndarray) -> np.ndarray:
    """bool [M]: what rows of the seat of row i have marked, up to row i."""
    marked: np.ndarray = marks[: i + 1][rows[: i + 1, SEAT] == rows[i, SEAT]].any(axis=0)
    return marked


def _claim(
    i: int, m: np.integer, row: np.ndarray, kept: np.ndarray, slot_of: np.ndarray, used_at: np.ndarray,
    caps: np.ndarray, free: np.ndarray, free_count: np.ndarray, reserve: int,
) -> int:  # fmt: skip
    """A slot for block m of row i: a free one if there are many or the row is below its cap, else that of
    the row's least recently read block that is neither kept nor forced; NO_SLOT if there is none."""
    held = slot_of[row[SEAT]]
    on_device = int((held != EMPTY).sum())
    if free_count[0] > reserve or (on_device < caps[i] and free_count[0] > 0):
        free_count[0] -= 1
        slot = int(free[free_count[0]])
    else:
        at = np.arange(row[SINK], max(row[RECENT], row[SINK]))
        victims = at[(held[at] >= 0) & ~kept[at]]
        if not len(victims):
            return NO_SLOT
        victim = victims[np.argmin(used_at[row[SEAT], victims])]
        slot = int(held[victim])
        held[victim] = EMPTY
    held[m] = FLYING
    return slot
