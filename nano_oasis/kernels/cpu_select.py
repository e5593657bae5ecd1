"""Which blocks shrunk rows read, miss and ask for, compiled for the CPU.

Owns: the compiled version of select.py, which has the contract. Must not know: how mass is estimated.

The k best of M blocks come from a radix select over the bits of their mass (non-negative floats sort as
integers): four passes over a row, no sorting, and the result is in order of position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nano_oasis.kernels.select import (
    ASKS,
    BLOCKS,
    BUDGET,
    EMPTY,
    FIRST,
    FLYING,
    GROUP,
    HITS,
    MISSES,
    NO_SLOT,
    POLICY,
    POSITION,
    RECENT,
    REPAIR,
    ROW,
    SEAT,
    SINK,
    SKIPPED,
    SLOT,
    TAIL,
    WAIT,
)
from nano_oasis.kernels.simd import jit


def choose_now(mass: np.ndarray, *args: Any) -> None:
    """See select.choose_now."""
    _choose_now(mass, *args, *_scratch(mass))


def choose_read(mass: np.ndarray, *args: Any) -> None:
    """See select.choose_read."""
    *state, ahead, wanted, read, table, tokens, asks, counts = args
    has_ahead, order = ahead is not None, mass if ahead is None else ahead
    _choose_read(mass, *state, order, has_ahead, wanted, read, table, tokens, asks, counts, *_scratch(mass))


def _scratch(mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(256, np.int64), np.empty((mass.shape[0], mass.shape[2]), np.bool_)


@jit
def _choose_now(  # type: ignore[no-untyped-def]
    mass, rows, slot_of, used_at, caps, free, free_count, reserve, threshold,
    wanted, asks, counts, histogram, kept,
):  # fmt: skip
    counts[ASKS] = 0
    for i in range(len(rows)):
        _best(mass, i, rows[i], slot_of, False, wanted, histogram)
    for i in range(len(rows)):
        row = rows[i]
        on_device = -1  # not known yet: most rows miss nothing
        for g in range(len(mass)):
            held = slot_of[g, row[SEAT]]
            for m in range(row[FIRST], row[BLOCKS]):
                if not wanted[g, i, m]:
                    continue
                if held[m] >= 0:
                    counts[HITS] += 1
                    continue
                counts[MISSES] += 1
                insists = row[POLICY] == WAIT or (row[POLICY] == REPAIR and mass[g, i, m] > threshold)
                slot = NO_SLOT
                if insists and held[m] == EMPTY:
                    if on_device < 0:
                        on_device = _count(slot_of, row[SEAT])
                        _of_seat(rows, i, wanted, wanted, kept)
                    slot, on_device = _claim(
                        g, m, row, kept, slot_of, used_at, on_device, caps[i], free, free_count, reserve
                    )
                    insists = slot != NO_SLOT
                if insists:
                    _ask(asks, counts, g, i, m, slot)
                else:
                    counts[SKIPPED] += 1


@jit
def _choose_read(  # type: ignore[no-untyped-def]
    mass, rows, slot_of, used_at, caps, free, free_count, reserve, step, most, block_size,
    ahead, has_ahead, wanted, read, table, tokens, asks, counts, histogram, kept,
):  # fmt: skip
    counts[ASKS] = 0
    for i in range(len(rows)):
        row = rows[i]
        if _all_here(wanted, i, row, slot_of):
            for g in range(len(mass)):  # the best of all are the best of those that are here
                for m in range(read.shape[2]):
                    read[g, i, m] = wanted[g, i, m]
        else:
            _best(mass, i, row, slot_of, True, read, histogram)
        for g in range(len(mass)):
            count = 0
            for m in range(row[FIRST], row[BLOCKS]):
                if read[g, i, m]:
                    table[g, i, count] = slot_of[g, row[SEAT], m]
                    used_at[g, row[SEAT], m] = step
                    count += 1
            tokens[g, i] = (count - 1) * block_size + row[TAIL]
    for i in range(len(rows)):
        row = rows[i]
        if most[i] == 0 or (not has_ahead and _all_here(wanted, i, row, slot_of)):
            continue
        _of_seat(rows, i, wanted, read, kept)
        if has_ahead:
            _best(ahead, i, row, slot_of, False, wanted, histogram)
            for g in range(len(mass)):
                for m in range(kept.shape[1]):
                    kept[g, m] = kept[g, m] or wanted[g, i, m]
        on_device = _count(slot_of, row[SEAT])
        for _ in range(most[i]):
            group, heaviest = -1, -1
            for g in range(len(mass)):
                for m in range(row[FIRST], row[BLOCKS]):
                    if not wanted[g, i, m] or slot_of[g, row[SEAT], m] != EMPTY:
                        continue
                    if heaviest < 0 or ahead[g, i, m] > ahead[group, i, heaviest]:
                        group, heaviest = g, m
            if heaviest < 0:
                break
            slot, on_device = _claim(
                group, heaviest, row, kept, slot_of, used_at, on_device, caps[i], free, free_count, reserve
            )
            if slot == NO_SLOT:
                break
            _ask(asks, counts, group, i, heaviest, slot)


@jit
def _best(mass, i, row, slot_of, resident, best, histogram):  # type: ignore[no-untyped-def]
    """best [:, i]: the forced blocks of all groups, then the heaviest, up to the budget; only resident ones
    if `resident`."""
    seat, groups = row[SEAT], len(mass)
    room = row[BUDGET] * groups
    for g in range(groups):
        best[g, i, :] = False
        for m in range(row[FIRST], row[BLOCKS]):
            if (
                (m < row[SINK] or m >= row[RECENT])
                and not (resident and slot_of[g, seat, m] < 0)
                and room > 0
            ):
                best[g, i, m] = True
                room -= 1
    low, high = max(row[FIRST], row[SINK]), min(row[BLOCKS], row[RECENT])
    if room < 1 or low >= high:
        return
    bits = mass.view(np.uint32)
    prefix, mask, left = np.uint32(0), np.uint32(0), room  # of the smallest mass that is in
    for shift in (24, 16, 8, 0):
        histogram[:] = 0
        for g in range(groups):
            for m in range(low, high):
                if bits[g, i, m] & mask == prefix and not (resident and slot_of[g, seat, m] < 0):
                    histogram[(bits[g, i, m] >> np.uint32(shift)) & np.uint32(255)] += 1
        digit = 255
        while digit > 0 and histogram[digit] < left:
            left -= histogram[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= np.uint32(255) << np.uint32(shift)
    for g in range(groups):
        for m in range(low, high):
            if resident and slot_of[g, seat, m] < 0:
                continue
            if bits[g, i, m] > prefix:
                best[g, i, m] = True
            elif bits[g, i, m] == prefix and left > 0:
                best[g, i, m] = True
                left -= 1


@jit
def _all_here(wanted, i, row, slot_of):  # type: ignore[no-untyped-def]
    """Whether no wanted block of row i is missing."""
    for g in range(len(wanted)):
        for m in range(row[FIRST], row[BLOCKS]):
            if wanted[g, i, m] and slot_of[g, row[SEAT], m] < 0:
                return False
    return True


@jit
def _count(slot_of, seat):  # type: ignore[no-untyped-def]
    """Slots a seat has or waits for, in all groups."""
    count = 0
    for g in range(len(slot_of)):
        for m in range(slot_of.shape[2]):
            count += slot_of[g, seat, m] != EMPTY
    return count


@jit
def _of_seat(rows, i, wanted, read, kept):  # type: ignore[no-untyped-def]
    """kept [G, M]: what rows of the seat of row i, which follow each other, want or read, up to row i."""
    kept[:] = False
    r = i
    while r >= 0 and rows[r, SEAT] == rows[i, SEAT]:
        for g in range(len(kept)):
            for m in range(kept.shape[1]):
                kept[g, m] = kept[g, m] or wanted[g, r, m] or read[g, r, m]
        r -= 1


@jit
def _claim(  # type: ignore[no-untyped-def]
    g, m, row, kept, slot_of, used_at, on_device, cap, free, free_count, reserve
):
    """See select._claim; also how many blocks the row has on the device then."""
    seat = row[SEAT]
    if free_count[0] > reserve or (on_device < cap and free_count[0] > 0):
        free_count[0] -= 1
        slot_of[g, seat, m] = FLYING
        return free[free_count[0]], on_device + 1
    group, victim = -1, -1
    for h in range(len(slot_of)):
        for v in range(row[SINK], row[RECENT]):
            if slot_of[h, seat, v] < 0 or kept[h, v]:
                continue
            if victim < 0 or used_at[h, seat, v] < used_at[group, seat, victim]:
                group, victim = h, v
    if victim < 0:
        return np.int32(NO_SLOT), on_device
    slot = slot_of[group, seat, victim]
    slot_of[group, seat, victim] = EMPTY
    slot_of[g, seat, m] = FLYING
    return slot, on_device


@jit
def _ask(asks, counts, g, i, m, slot):  # type: ignore[no-untyped-def]
    at = counts[ASKS]
    asks[GROUP, at], asks[ROW, at], asks[POSITION, at], asks[SLOT, at] = g, i, m, slot
    counts[ASKS] = at + 1
