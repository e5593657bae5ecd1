"""Which blocks shrunk rows read, miss and ask for, compiled for the CPU.

Owns: the compiled version of select.py, which has the contract. Must not know: how mass is estimated.

The k best of M blocks come from a radix select over the bits of their mass (non-negative floats sort as
integers): no sorting, and the result is in order of position. Letters as in select.py; a *place* is a block
of a group, g * M + m.
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

DIGIT = 11  # bits that the select looks at in one pass
BINS = 1 << DIGIT


def choose_now(mass: np.ndarray, *args: Any) -> None:
    """See select.choose_now."""
    _choose_now(mass, *args, *_scratch(mass))


def choose_read(mass: np.ndarray, *args: Any) -> None:
    """See select.choose_read."""
    *state, ahead, wanted, read, table, tokens, asks, counts = args
    has_ahead, order = ahead is not None, mass if ahead is None else ahead
    _choose_read(mass, *state, order, has_ahead, wanted, read, table, tokens, asks, counts, *_scratch(mass))


def _scratch(mass: np.ndarray) -> tuple[np.ndarray, ...]:
    """A histogram, marks [G, M], and three lists of places: candidates, victims, what is missing."""
    places = mass.shape[0] * mass.shape[2]
    kept = np.empty((mass.shape[0], mass.shape[2]), np.bool_)
    return np.empty(BINS, np.int32), kept, np.empty((3, places), np.int32)


@jit
def _choose_now(  # type: ignore[no-untyped-def]
    mass, rows, slot_of, used_at, caps, free, free_count, reserve, threshold,
    wanted, asks, counts, histogram, kept, lists,
):  # fmt: skip
    counts[ASKS] = 0
    for i in range(len(rows)):
        _best(mass, i, rows[i], slot_of, False, wanted, histogram, lists)
    for i in range(len(rows)):
        row = rows[i]
        on_device, victims = -1, -1  # not known yet: most rows miss nothing
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
                    slot, on_device, victims = _claim(
                        g, m, row, kept, slot_of, used_at, on_device, caps[i], free, free_count, reserve,
                        lists, victims,
                    )  # fmt: skip
                    insists = slot != NO_SLOT
                if insists:
                    _ask(asks, counts, g, i, m, slot)
                else:
                    counts[SKIPPED] += 1


@jit
def _choose_read(  # type: ignore[no-untyped-def]
    mass, rows, slot_of, used_at, caps, free, free_count, reserve, step, most, block_size,
    ahead, has_ahead, wanted, read, table, tokens, asks, counts, histogram, kept, lists,
):  # fmt: skip
    counts[ASKS] = 0
    for i in range(len(rows)):
        row = rows[i]
        if _all_here(wanted, i, row, slot_of):
            for g in range(len(mass)):  # the best of all are the best of those that are here
                for m in range(read.shape[2]):
                    read[g, i, m] = wanted[g, i, m]
        else:
            _best(mass, i, row, slot_of, True, read, histogram, lists)
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
            _best(ahead, i, row, slot_of, False, wanted, histogram, lists)
            for g in range(len(mass)):
                for m in range(kept.shape[1]):
                    kept[g, m] = kept[g, m] or wanted[g, i, m]
        missing, count = lists[2], 0
        for g in range(len(mass)):
            for m in range(row[FIRST], row[BLOCKS]):
                if wanted[g, i, m] and slot_of[g, row[SEAT], m] == EMPTY:
                    missing[count] = g * mass.shape[2] + m
                    count += 1
        on_device, victims = _count(slot_of, row[SEAT]), -1
        for _ in range(min(most[i], count)):
            heaviest, found, at = np.float32(-1), 0, 0
            for j in range(count):
                if missing[j] >= 0:
                    weight = ahead[missing[j] // mass.shape[2], i, missing[j] % mass.shape[2]]
                    if weight > heaviest:
                        heaviest, found, at = weight, missing[j], j
            missing[at] = -1
            g, m = found // mass.shape[2], found % mass.shape[2]
            slot, on_device, victims = _claim(
                g, m, row, kept, slot_of, used_at, on_device, caps[i], free, free_count, reserve,
                lists, victims,
            )  # fmt: skip
            if slot == NO_SLOT:
                break
            _ask(asks, counts, g, i, m, slot)


@jit
def _best(mass, i, row, slot_of, resident, best, histogram, lists):  # type: ignore[no-untyped-def]
    """best [:, i]: the forced blocks of all groups, then the heaviest, up to the budget; only resident ones
    if `resident`."""
    groups, first, blocks = len(mass), row[FIRST], row[BLOCKS]
    low, high = max(first, row[SINK]), max(row[FIRST], row[SINK], row[RECENT])
    room, count = row[BUDGET] * groups, 0
    bits, keys = mass.view(np.uint32), lists[0].view(np.uint32)
    for g in range(groups):
        best[g, i, :] = False
        held = slot_of[g, row[SEAT]]
        for m in range(first, blocks):
            if (m < low or m >= high) and room > 0 and not (resident and held[m] < 0):
                best[g, i, m] = True
                room -= 1
        for m in range(low, high):
            keys[count] = bits[g, i, m]
            count += 0 if resident and held[m] < 0 else 1
    if room < 1:
        return
    least, left = np.uint32(0), room  # the smallest mass that is in, and how many of it
    if count > room:
        least, left = _select(keys, count, room, histogram, lists[1].view(np.uint32))
    for g in range(groups):
        held = slot_of[g, row[SEAT]]
        for m in range(low, high):
            if resident and held[m] < 0:
                continue
            if bits[g, i, m] > least:
                best[g, i, m] = True
            elif bits[g, i, m] == least and left > 0:
                best[g, i, m] = True
                left -= 1


@jit
def _select(keys, count, k, histogram, kept):  # type: ignore[no-untyped-def]
    """The k-th largest of `count` keys, and how many of its equals are among the k largest. `kept`: scratch.

    From the highest digit down: count the keys by digit, find the digit of the k-th, keep the keys that have
    it. After the first digit few are left."""
    found, shift = np.uint32(0), 32
    while shift > 0 and count > 0:
        bits = min(shift, DIGIT)
        shift -= bits
        mask = np.uint32((1 << bits) - 1)
        histogram[:] = 0
        for j in range(count):
            histogram[(keys[j] >> np.uint32(shift)) & mask] += 1
        digit = BINS - 1
        while digit > 0 and histogram[digit] < k:
            k -= histogram[digit]
            digit -= 1
        found |= np.uint32(digit) << np.uint32(shift)
        left = 0
        for j in range(count):
            kept[left] = keys[j]
            left += (keys[j] >> np.uint32(shift)) & mask == np.uint32(digit)
        count, keys = left, kept
    return found, k


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
    g, m, row, kept, slot_of, used_at, on_device, cap, free, free_count, reserve, lists, victims
):
    """See select._claim; also how many blocks the row has on the device then, and the length of the list of
    victims, which is made at the row's first need (`victims` < 0): nothing is added to it later."""
    seat, places, width = row[SEAT], lists[0], kept.shape[1]
    if free_count[0] > reserve or (on_device < cap and free_count[0] > 0):
        free_count[0] -= 1
        slot_of[g, seat, m] = FLYING
        return free[free_count[0]], on_device + 1, victims
    if victims < 0:
        victims = 0
        for h in range(len(slot_of)):
            held = slot_of[h, seat]
            for v in range(row[SINK], row[RECENT]):
                if held[v] >= 0 and not kept[h, v]:
                    places[victims] = h * width + v
                    victims += 1
    oldest, at = 0, -1
    for j in range(victims):
        if places[j] >= 0:
            age = used_at[places[j] // width, seat, places[j] % width]
            if at < 0 or age < oldest:
                oldest, at = age, j
    if at < 0:
        return np.int32(NO_SLOT), on_device, victims
    h, v = places[at] // width, places[at] % width
    places[at] = -1
    slot = slot_of[h, seat, v]
    slot_of[h, seat, v] = EMPTY
    slot_of[g, seat, m] = FLYING
    return slot, on_device, victims


@jit
def _ask(asks, counts, g, i, m, slot):  # type: ignore[no-untyped-def]
    at = counts[ASKS]
    asks[GROUP, at], asks[ROW, at], asks[POSITION, at], asks[SLOT, at] = g, i, m, slot
    counts[ASKS] = at + 1
