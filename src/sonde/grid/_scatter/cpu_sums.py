"""Long sums on CPUs: float32 in blocks, the blocks in float64.

A float32 sum of n equal terms, added one by one, loses up to n · 1.5e-8 of itself: at 128 terms that reaches the 2e-6 that we
promise. So no more than a block is added up in the dtype of the operands, and blocks in float64, which is good for 1e9 of them.
Where a sum is no longer than a block nothing is done.

A scattered gradient does not know how many terms a pixel will get, so it counts them, by cell: the pixels that one sample adds to.
When a cell's block is full, its pixels' sums are moved to rows of float64. A crowd is ``(hits, slots, pixels, places, rows)``:
additions to each cell since its last block; which row each pixel has; whose each row is, its number and its place in memory, the
last number being how many rows are in use; and the rows. They are reserved for the worst case, but what is not written to costs
nothing.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import array_part, part
from ...op.simd import LANES, cast, load, spread, store, store_some

BLOCK = 64  # terms
LENGTH = BLOCK * LANES  # channels of a dot product, each lane of which has a sum of its own
HITS = 128  # samples of a cell of four pixels in a block
COUNTED = 16  # one of so many samples is counted, whichever chance has it, where to count all of them would take too long
FULL = HITS // COUNTED


@part
def move(x, at, end, rows, j):
    """rows[j] += x[0, at:end], which becomes zero; rows are whole numbers of lanes."""
    n = rows.shape[1]
    for k in range(0, end - at, LANES):
        store(load(rows, j, k, n) + cast(load(x, 0, at + k, end), np.float64), rows, j, k)
        store_some(spread(x.dtype.type(0)), x, 0, at + k, end)


@part
def hits_of(corners):
    """Samples of a cell in a block: a pixel belongs to as many cells as a cell has pixels."""
    return min(HITS, 4 * HITS // corners)


@part
def chance(x):
    """A number below COUNTED, always the same for this x."""
    return np.int64(np.uint64(x) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(60))


@array_part
def crowd_of(pixels, samples, corners, width):
    """For so many samples, each of which adds to `corners` pixels of `width` channels."""
    most, width = (
        min(pixels, 2 * samples // hits_of(corners) * corners),
        -(-width // LANES) * LANES,
    )  # chance counts a little faster
    numbers, places = np.empty(most + 1, np.int64), np.empty(most, np.int64)
    return np.empty(pixels, np.uint8), np.empty(pixels, np.int32), numbers, places, np.empty((most, width), np.float64)


def crowd_bytes(pixels: int) -> int:
    """What a crowd has in use: the counts. All else is written to where a block is full alone."""
    return pixels * np.dtype(np.uint8).itemsize


@part
def clear(crowd):
    """For the next image."""
    hits, _, numbers, _, _ = crowd
    hits[:] = 0
    numbers[-1] = 0


@part
def met(cell, most, crowd):
    """Count one sample of a cell; whether its block of `most` is full now."""
    hits = crowd[0]
    hits[cell] += 1
    if hits[cell] < most:
        return False
    hits[cell] = 0
    return True


@part
def crowded(m, keys, most, crowd):
    """Count the samples whose cells are keys[:m], the last cell standing for none.

    If that fills a block, do not, and say so: they go one by one.

    `most` is a power of two. A count, which has eight bits, may come round to zero, but not without that bit on its way.
    """
    hits, seen = crowd[0], np.uint8(0)
    last = len(hits) - 1
    for i in range(m):
        count = np.uint8(hits[np.uint64(keys[i])] + np.uint8(keys[i] < last))
        hits[np.uint64(keys[i])] = count
        seen |= count
    full = seen & np.uint8(most) > 0
    for i in range(m if full else 0):
        hits[np.uint64(keys[i])] -= np.uint8(keys[i] < last)
    return full


@part
def slot_of(p, at, crowd):
    """The row of pixel p, which has its place there; of zeros, if it is new."""
    _, slots, numbers, places, rows = crowd
    used = numbers[-1]
    j = np.int64(slots[p])
    if j < 0 or j >= used or numbers[j] != p:  # what was there before means nothing
        j = used
        slots[p], numbers[j], places[j] = j, p, at
        numbers[-1] += 1
        for k in range(rows.shape[1]):
            rows[j, k] = 0
    return j


@part
def flush(p, x, at, end, crowd):
    """End the block of pixel p, whose sums are x[0, at:end]."""
    move(x, at, end, crowd[4], slot_of(p, at, crowd))


@part
def settle(x, width, crowd):
    """Add its rows to the sums of each pixel that has one."""
    _, _, numbers, places, rows = crowd
    n = rows.shape[1]
    for j in range(numbers[-1]):
        at = places[j]
        end = at + width
        for k in range(0, width, LANES):
            found = load(rows, j, k, n) + cast(load(x, 0, at + k, end), np.float64)
            store_some(cast(found, x), x, 0, at + k, end)


@part
def flush_planes(p, x, at, step, width, crowd):
    """The same of ``x[at], x[at + step], …``, a number for each channel."""
    j, rows = slot_of(p, at, crowd), crowd[4]
    for k in range(width):
        rows[j, k] += x[at + k * step]
        x[at + k * step] = 0


@part
def settle_planes(x, step, width, crowd):
    _, _, numbers, places, rows = crowd
    for j in range(numbers[-1]):
        for k in range(width):
            x[places[j] + k * step] += rows[j, k]
