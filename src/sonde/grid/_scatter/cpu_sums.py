"""Long sums on CPUs: blocks of terms are summed in the operands' dtype, and the blocks in float64.

A float32 sum of n equal terms, added one by one, has a relative error of up to n · 1.5e-8: at 128 terms that reaches the promised
2e-6. A float64 sum of blocks is good for 1e9 of them. A sum that fits one block needs nothing.

A scattered gradient does not know how many terms a pixel will get, so samples are counted by cell (the pixels one sample adds to).
When a cell's block is full, the sums of its pixels are flushed to float64 rows. This state is a *spill*, the tuple
``(hits, slots, owners, places, rows)``: samples of each cell since its last flush; each pixel's row; each row's pixel and that
pixel's offset in memory (``owners[-1]`` counts the rows in use); and the rows. It is allocated for the worst case, but memory that
is never touched costs nothing.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import array_part, part
from ...op.simd import LANES, cast, load, spread, store, store_some

BLOCK = 64  # terms of a block
LENGTH = BLOCK * LANES  # channels of a dot product in a block: each lane has its own sum
HITS = 128  # samples in a block of a cell of four pixels
COUNTED = 16  # where counting every sample would take too long, one in 16 is counted, chosen by a hash
FULL = HITS // COUNTED


@part
def move(x, at, end, rows, j):
    """rows[j] += x[0, at:end], which becomes zero; rows are a multiple of LANES long."""
    n = rows.shape[1]
    for k in range(0, end - at, LANES):
        store(load(rows, j, k, n) + cast(load(x, 0, at + k, end), np.float64), rows, j, k)
        store_some(spread(x.dtype.type(0)), x, 0, at + k, end)


@part
def block_hits(corners):
    """Samples in a cell's block: fewer for cells of more than four pixels, since a pixel then belongs to more cells."""
    return min(HITS, 4 * HITS // corners)


@part
def hash16(x):
    """A hash of x below COUNTED."""
    return np.int64(np.uint64(x) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(60))


@array_part
def new_spill(pixels, samples, corners, width):
    """A spill for this many samples, each of which adds to `corners` pixels of `width` channels."""
    most = min(pixels, 2 * samples // block_hits(corners) * corners)  # twice, as hashed counts may fill a block early
    owners, places = np.empty(most + 1, np.int64), np.empty(most, np.int64)
    rows = np.empty((most, -(-width // LANES) * LANES), np.float64)
    return np.empty(pixels, np.uint8), np.empty(pixels, np.int32), owners, places, rows


def spill_bytes(pixels: int) -> int:
    """Bytes that a spill always uses: the counts. The rest is touched only when a block is full."""
    return pixels * np.dtype(np.uint8).itemsize


@part
def clear(spill):
    """Reset for the next image."""
    hits, _, owners, _, _ = spill
    hits[:] = 0
    owners[-1] = 0


@part
def block_full(cell, most, spill):
    """Count one sample of a cell; True if its block of `most` is full now."""
    hits = spill[0]
    hits[cell] += 1
    if hits[cell] < most:
        return False
    hits[cell] = 0
    return True


@part
def any_block_full(m, keys, most, spill):
    """Count samples by their cells keys[:m]; the last cell stands for none.

    If that would fill a block, undo it and return True: the caller then counts them one by one. `most` is a power of two: an
    8-bit count may wrap around to zero, but only after its bit `most` was set.
    """
    hits, seen = spill[0], np.uint8(0)
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
def spill_row(p, at, spill):
    """The row of pixel p, whose sums start at offset `at`; a new one is zeroed."""
    _, slots, owners, places, rows = spill
    used = owners[-1]
    j = np.int64(slots[p])
    if j < 0 or j >= used or owners[j] != p:  # slots are uninitialized, or left from another image
        j = used
        slots[p], owners[j], places[j] = j, p, at
        owners[-1] += 1
        for k in range(rows.shape[1]):
            rows[j, k] = 0
    return j


@part
def flush(p, x, at, end, spill):
    """Move the sums x[0, at:end] of pixel p to its row."""
    move(x, at, end, spill[4], spill_row(p, at, spill))


@part
def add_spilled(x, width, spill):
    """Add all rows back to the sums of their pixels."""
    _, _, owners, places, rows = spill
    n = rows.shape[1]
    for j in range(owners[-1]):
        at = places[j]
        end = at + width
        for k in range(0, width, LANES):
            found = load(rows, j, k, n) + cast(load(x, 0, at + k, end), np.float64)
            store_some(cast(found, x), x, 0, at + k, end)


@part
def flush_planes(p, x, at, step, width, spill):
    """``flush`` for channels that are `step` apart: ``x[at], x[at + step], …``."""
    j, rows = spill_row(p, at, spill), spill[4]
    for k in range(width):
        rows[j, k] += x[at + k * step]
        x[at + k * step] = 0


@part
def add_spilled_planes(x, step, width, spill):
    _, _, owners, places, rows = spill
    for j in range(owners[-1]):
        for k in range(width):
            x[places[j] + k * step] += rows[j, k]
