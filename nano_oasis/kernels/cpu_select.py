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
    _choose_now(mass, *args, np.empty(256, np.int64), np.empty(mass.shape[1], np.bool_))


def choose_read(mass: np.ndarray, *args: Any) -> None:
    """See select.choose_read."""
    *state, ahead, wanted, read, table, tokens, asks, counts = args
    has_ahead, order = ahead is not None, mass if ahead is None else ahead
    scratch = np.empty(256, np.int64), np.empty(mass.shape[1], np.bool_)
    _choose_read(mass, *state, order, has_ahead, wanted, read, table, tokens, asks, counts, *scratch)


@jit
def _choose_now(  # type: ignore[no-untyped-def]
    mass, rows, slot_of, used_at, caps, free, free_count, reserve, threshold,
    wanted, asks, counts, histogram, kept,
):  # fmt: skip
    counts[ASKS] = 0
    for i in range(len(rows)):
        wanted[i, :] = False
        _best(mass[i], rows[i], slot_of[rows[i, SEAT]], False, wanted[i], histogram)
    for i in range(len(rows)):
        row = rows[i]
        held = slot_of[row[SEAT]]
        on_device = _count(held)
        _of_seat(rows, i, wanted, wanted, kept)
        for m in range(row[FIRST], row[BLOCKS]):
            if not wanted[i, m]:
                continue
            if held[m] >= 0:
                counts[HITS] += 1
                continue
            counts[MISSES] += 1
            insists = row[POLICY] == WAIT or (row[POLICY] == REPAIR and mass[i, m] > threshold)
            slot = NO_SLOT
            if insists and held[m] == EMPTY:
                slot, on_device = _claim(
                    row, m, kept, held, used_at[row[SEAT]], on_device, caps[i], free, free_count, reserve
                )
                insists = slot != NO_SLOT
            if insists:
                _ask(asks, counts, i, m, slot)
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
        held, used = slot_of[row[SEAT]], used_at[row[SEAT]]
        read[i, :] = False
        _best(mass[i], row, held, True, read[i], histogram)
        count = 0
        for m in range(row[FIRST], row[BLOCKS]):
            if read[i, m]:
                table[i, count] = held[m]
                used[m] = step
                count += 1
        tokens[i] = (count - 1) * block_size + row[TAIL]
    for i in range(len(rows)):
        if most[i] == 0:
            continue
        row = rows[i]
        held = slot_of[row[SEAT]]
        _of_seat(rows, i, wanted, read, kept)
        if has_ahead:
            wanted[i, :] = False
            _best(ahead[i], row, held, False, wanted[i], histogram)
            for m in range(len(kept)):
                kept[m] = kept[m] or wanted[i, m]
        on_device = _count(held)
        for _ in range(most[i]):
            heaviest = -1
            for m in range(row[FIRST], row[BLOCKS]):
                if wanted[i, m] and held[m] == EMPTY and (heaviest < 0 or ahead[i, m] > ahead[i, heaviest]):
                    heaviest = m
            if heaviest < 0:
                break
            slot, on_device = _claim(
                row, heaviest, kept, held, used_at[row[SEAT]], on_device, caps[i], free, free_count, reserve
            )
            if slot == NO_SLOT:
                break
            _ask(asks, counts, i, heaviest, slot)


@jit
def _best(mass, row, held, resident, best, histogram):  # type: ignore[no-untyped-def]
    """Mark the forced blocks, then the heaviest, up to the budget; only resident ones if `resident`."""
    room = row[BUDGET]
    for m in range(row[FIRST], row[BLOCKS]):
        if (m < row[SINK] or m >= row[RECENT]) and not (resident and held[m] < 0) and room > 0:
            best[m] = True
            room -= 1
    low, high = max(row[FIRST], row[SINK]), min(row[BLOCKS], row[RECENT])
    if room < 1 or low >= high:
        return
    bits = mass.view(np.uint32)
    prefix, mask, left = np.uint32(0), np.uint32(0), room  # of the smallest mass that is in
    for shift in (24, 16, 8, 0):
        histogram[:] = 0
        for m in range(low, high):
            if bits[m] & mask == prefix and not (resident and held[m] < 0):
                histogram[(bits[m] >> np.uint32(shift)) & np.uint32(255)] += 1
        digit = 255
        while digit > 0 and histogram[digit] < left:
            left -= histogram[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= np.uint32(255) << np.uint32(shift)
    for m in range(low, high):
        if resident and held[m] < 0:
            continue
        if bits[m] > prefix:
            best[m] = True
        elif bits[m] == prefix and left > 0:
            best[m] = True
            left -= 1


@jit
def _count(held):  # type: ignore[no-untyped-def]
    """Slots a row has or waits for."""
    count = 0
    for m in range(len(held)):
        count += held[m] != EMPTY
    return count


@jit
def _of_seat(rows, i, wanted, read, kept):  # type: ignore[no-untyped-def]
    """kept [M]: what rows of the seat of row i, which follow each other, want or read, up to row i."""
    kept[:] = False
    r = i
    while r >= 0 and rows[r, SEAT] == rows[i, SEAT]:
        for m in range(len(kept)):
            kept[m] = kept[m] or wanted[r, m] or read[r, m]
        r -= 1


@jit
def _claim(row, m, kept, held, used, on_device, cap, free, free_count, reserve):  # type: ignore[no-untyped-def]
    """See select._claim; also how many blocks the row has on the device then."""
    if free_count[0] > reserve or (on_device < cap and free_count[0] > 0):
        free_count[0] -= 1
        held[m] = FLYING
        return free[free_count[0]], on_device + 1
    victim = -1
    for v in range(row[SINK], row[RECENT]):
        if held[v] >= 0 and not kept[v] and (victim < 0 or used[v] < used[victim]):
            victim = v
    if victim < 0:
        return np.int32(NO_SLOT), on_device
    slot = held[victim]
    held[victim] = EMPTY
    held[m] = FLYING
    return slot, on_device


@jit
def _ask(asks, counts, i, m, slot):  # type: ignore[no-untyped-def]
    at = counts[ASKS]
    asks[ROW, at], asks[POSITION, at], asks[SLOT, at] = i, m, slot
    counts[ASKS] = at + 1
