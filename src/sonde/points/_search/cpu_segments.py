"""Gradients of points and features on CPUs: neighbour lists are inverted, and each point sums the entries that contain it.

The order of summation does not depend on the number of threads. A point with many entries is summed in pieces, so that its work
is shared by several threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...op.allocator import zeros
from ...op.cpu import array, jit, part, run
from ...op.simd import LANES, fma, load, spread, store_some
from .cpu_rows import BLOCK, added, together

PIECE = 4096  # most entries of a piece


class Lists(NamedTuple):
    """Inverted lists: the entries that contain each point, ascending, cut into pieces."""

    where: np.ndarray  # [entries] the entry
    rows: np.ndarray  # [entries] the row of its list
    pieces: np.ndarray  # [pieces, 3] point, and its range in `where` and `rows`
    firsts: np.ndarray  # [B*N + 1] the first piece of each point


def inverted(indices: np.ndarray, entries: np.ndarray, B: int, M: int, N: int) -> Lists:
    starts, where, rows = np.zeros(B * N + 1, np.int64), np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
    firsts = np.empty(B * N + 1, np.int64)
    invert(0, B * M, M, N, indices, entries, starts, where, rows, firsts)
    pieces = np.empty((firsts[-1], 3), np.int64)
    cut(0, B * N, starts, firsts, pieces)
    return Lists(where, rows, pieces, firsts)


def sums(of: Lists, slopes: Tensor, queries: Tensor, points: Tensor, weights: Tensor | None, grad: Tensor, coordinates: bool):
    """∂p_j = −Σ slope·(q_i − p_j) ``[B·N, 3]`` and ∂f_j = Σ weight·grad_i ``[B·N, F]``, over the entries that contain j."""
    F, pieces, rows = grad.shape[1], len(of.pieces), len(of.firsts) - 1
    wide = slopes.dtype if weights is None else weights.dtype
    parts = slopes.new_zeros(pieces if coordinates else 0, 3)
    features = zeros((pieces if weights is not None else 0, F), wide)
    by = slopes.new_empty(0, dtype=wide) if weights is None else weights
    given = [array(x) for x in (slopes, queries, points, by, grad, parts, features)]
    run(gather, pieces, *of[:3], *given, grain=256)
    if pieces == rows:
        return parts, features
    found = [zeros((rows if len(x) else 0, x.shape[1]), x.dtype) for x in (parts, features)]
    for x, total in zip((parts, features), found):
        run(add, len(total), of.firsts, array(x), array(total), grain=1024)
    return tuple(found)


@jit
def invert(start, stop, M, N, indices, entries, starts, where, rows, firsts):
    """Counting sort of the entries by point, on one thread: two cheap passes over integers. Afterwards, `starts` are ends."""
    for i in range(start, stop):
        for e in range(entries[i], entries[i + 1]):
            if indices[e] >= 0:
                starts[i // M * N + indices[e] + 1] += 1
    count = 0
    for j in range(starts.shape[0] - 1):
        firsts[j] = count
        count += max(1, -(-starts[j + 1] // PIECE))
        starts[j + 1] += starts[j]
    firsts[starts.shape[0] - 1] = count
    for i in range(start, stop):
        for e in range(entries[i], entries[i + 1]):
            if indices[e] >= 0:
                j = i // M * N + indices[e]
                where[starts[j]], rows[starts[j]] = e, i
                starts[j] += 1


@jit
def cut(start, stop, ends, firsts, pieces):
    """Cut the entries of every point, which end at `ends`, into one or more pieces."""
    for j in range(start, stop):
        low = ends[j - 1] if j else 0
        for n in range(firsts[j], firsts[j + 1]):
            pieces[n, 0], pieces[n, 1], pieces[n, 2] = j, low, min(low + PIECE, ends[j])
            low += PIECE


@jit
def gather(
    start,
    stop,
    where,  # [entries]
    rows,  # [entries]
    pieces,  # [pieces, 3]
    slopes,  # [entries]
    queries,  # [B*M, 3]
    points,  # [B*N, 3]
    weights,  # [entries]
    grad,  # [B*M, F]
    parts,  # [pieces, 3]; empty if not needed
    features,  # [pieces, F]; empty if not needed
):
    """Sum pieces `start` to `stop`."""
    F = grad.shape[1]
    for n in range(start, stop):
        j, low, high = pieces[n, 0], pieces[n, 1], pieces[n, 2]
        if parts.size:
            a, b, c = 0.0, 0.0, 0.0
            for at in range(low, high):
                i, slope = rows[at], slopes[where[at]]
                if slope != 0:
                    a -= slope * (queries[i, 0] - points[j, 0])
                    b -= slope * (queries[i, 1] - points[j, 1])
                    c -= slope * (queries[i, 2] - points[j, 2])
            parts[n, 0], parts[n, 1], parts[n, 2] = a, b, c
        if features.size:
            add_rows(n, low, high, F, where, rows, weights, grad, features)


@part
def add_rows(n, low, high, F, places, rows, weights, grad, features):
    zero = spread(features.dtype.type(0))
    for c in range(0, F, LANES):
        whole, lost = zero, zero
        for at in range(low, min(low + BLOCK, high)):
            whole = fma(weights[places[at]], load(grad, rows[at], c, F), whole)
        if high > low + BLOCK:
            for first in range(low + BLOCK, high, BLOCK):
                v = zero
                for at in range(first, min(first + BLOCK, high)):
                    v = fma(weights[places[at]], load(grad, rows[at], c, F), v)
                whole, lost = added(v, whole, lost)
            whole = together(whole, lost)
        store_some(whole, features, n, c, F)


@jit
def add(start, stop, firsts, parts, found):
    """Add up the pieces of points `start` to `stop`."""
    for j in range(start, stop):
        for c in range(parts.shape[1]):
            total = 0.0
            for n in range(firsts[j], firsts[j + 1]):
                total += parts[n, c]
            found[j, c] = total
