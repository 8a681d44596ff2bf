"""Samples along one axis, on CPUs: which pixels they read, with which weights, and the derivatives of the weights."""

from __future__ import annotations

import numpy as np

from ...op.cpu import exact_part, part
from ...op.simd import LANES, cast, floor, intrinsic, load, magnitude, store, where

BLOCK = 1024  # samples at a time: enough that a plane is read once, few enough for the cache
FAR = 2.0**30


@exact_part
def axis(points, b, p, m, d, size, taps, pad, align, at, part_of, rate, cell):
    """Fill rows d·taps on of `at` (pixels), `part_of` (weights) and `rate` (their derivatives) for samples p to p + m, and row d
    of `cell` unless it is empty. Every loop is simple enough to be vectorised; operations are rounded as in the reference."""
    real = points.dtype.type
    first = d * taps
    positions(points, b, p, m, d, size, taps, pad, align, part_of[first], rate[first])
    x, slope = part_of[first], rate[first]
    one, half, number = real(1), real(0.5), at.dtype.type
    if cell.shape[0] > 0:
        for i in range(m):
            cell[d, i] = number(np.floor(x[i]))
    if taps == 1:
        for i in range(m):
            x0 = np.floor(x[i])
            t = x[i] - x0
            up = t > half or (t == half and x0 - real(2) * np.floor(x0 * half) == one)
            j = number(x0) + number(up)
            at[first, i] = j if j >= 0 and j < size else -1
            x[i], slope[i] = one, real(0)
    elif taps == 2:
        for i in range(m):
            x0 = np.floor(x[i])
            t, j, s = x[i] - x0, number(x0), slope[i]
            at[first, i] = j if j >= 0 and j < size else -1
            at[first + 1, i] = j + 1 if j >= -1 and j + 1 < size else -1
            part_of[first, i], part_of[first + 1, i] = one - t, t
            rate[first, i], rate[first + 1, i] = -s, s
    else:
        for i in range(m):
            x0 = np.floor(x[i])
            t, j, s = x[i] - x0, number(x0), slope[i]
            part_of[first, i], rate[first, i] = _outer(t + one), s * _outer_slope(t + one)
            part_of[first + 1, i], rate[first + 1, i] = _inner(t), s * _inner_slope(t)
            part_of[first + 2, i], rate[first + 2, i] = _inner(one - t), -s * _inner_slope(one - t)
            part_of[first + 3, i], rate[first + 3, i] = _outer(one + one - t), -s * _outer_slope(one + one - t)
            for k in range(4):
                at[first + k, i] = _fold(j - 1 + k, size, pad, align) if j > -8 else -1


@exact_part
def positions(points, b, p, m, d, size, taps, pad, align, x, slope):
    """The positions of samples on an axis of pixels, and d position / d u; the last lanes of both may belong to no sample."""
    xs, slopes = x.reshape(1, x.shape[0]), slope.reshape(1, x.shape[0])
    for i in range(m):
        x[i] = points[b, p + i, d]
    for i in range(0, m, LANES):
        here, change = place(load(xs, 0, i, m), size, taps, pad, align)
        store(here, xs, 0, i)
        store(change, slopes, 0, i)


@exact_part
def place(u, size, taps, pad, align):
    """The positions of coordinates on an axis of pixels, and d position / d u. −16 stands for coordinates that see no pixel: so far
    outside that no tap of it exists."""
    nothing = where(u < u, u, 0)
    n = nothing + size
    x = (u + 1) * 0.5 * (n - 1) if align else ((u + 1) * n - 1) * 0.5
    slope = (n - 1) * 0.5 if align else n * 0.5
    if pad == 2:
        low, span = (0.0, max(size - 1.0, 1.0)) if align else (-0.5, max(size + 0.0, 1.0))
        # taps that are folded one by one are whole periods apart, exactly
        a = magnitude(cast(x, np.float64) - low) if taps == 4 else cast(magnitude(x - low), np.float64)
        near = a < FAR
        a = where(near, a, 0)
        flips = floor(a / span)
        rest = a - flips * span  # exact: a multiple of the last digit of a
        wrong = rest < 0
        flips, rest = where(wrong, flips - 1, flips), where(wrong, rest + span, rest)
        back = flips - floor(flips * 0.5) * 2 == 1
        slope = where(back ^ (x < low), nothing - slope, slope)
        rest = where(back, span - rest, rest)
        x = where(near, cast(rest + low, u) if taps == 4 else cast(rest, u) + low, np.inf)
    if pad > 0:
        lowest, highest = (nothing - 1, n) if taps == 4 else (nothing, n - 1)
        live = (magnitude(u) < np.inf) & (x < np.inf) if pad == 2 else magnitude(u) < np.inf
        if taps < 4:
            slope = where((x > lowest) & (x < highest), slope, 0)
            x = where(x > lowest, x, lowest)
        else:  # at −1 the last tap is still the second pixel; below, all taps are the first pixel
            x = where(x < lowest, lowest - 1, x)
        x = where(live, where(x < highest, x, highest), -16)
    return where((x >= -2) & (x <= n + 1) & (n > 0), x, -16), slope


@part
def _fold(i, size, pad, align):
    """The pixel that tap `i` reads, −1 if none."""
    if i >= 0 and i < size:
        return i
    if pad == 0:
        return -1
    if pad == 1:
        return min(max(i, 0), size - 1)
    period = max(2 * size - 2 * align, 1)
    i %= period
    return i if i < size else period - 1 + align - i


# the cubic kernel for 0 ≤ t ≤ 1 and for 1 ≤ t ≤ 2, with a = −¾, and its derivatives


@exact_part
def _inner(t):
    return t * t * (t * _like(t, 1.25) - _like(t, 2.25)) + _like(t, 1)


@exact_part
def _outer(t):
    return ((_like(t, 3.75) - _like(t, 0.75) * t) * t - _like(t, 6)) * t + _like(t, 3)


@exact_part
def _inner_slope(t):
    return (_like(t, 3.75) * t - _like(t, 4.5)) * t


@exact_part
def _outer_slope(t):
    return (_like(t, 7.5) - _like(t, 2.25) * t) * t - _like(t, 6)


@intrinsic
def _like(typing, t, number):
    """A number in the type of `t`: Numba's literals would make everything float64."""

    def generate(context, builder, signature, args):
        return context.cast(builder, args[1], signature.args[1], signature.return_type)

    return t(t, number), generate
