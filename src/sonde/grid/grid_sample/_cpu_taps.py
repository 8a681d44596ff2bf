"""Where samples are along an axis, on CPUs: which pixels they read, how much of each, and how that changes."""

from __future__ import annotations

import numpy as np

from ...op.cpu import exact_part, part
from ...op.lanes import intrinsic

FAR = 2.0**30


@exact_part
def axis(points, b, p, m, d, size, taps, pad, align, at, part_of, rate):
    """The taps along axis `d`. Every loop is simple enough to be vectorised, every operation is rounded as in the reference."""
    real = points.dtype.type
    first = d * taps
    positions(points, b, p, m, d, size, taps, pad, align, part_of[first], rate[first])
    x, slope = part_of[first], rate[first]
    one, half, number = real(1), real(0.5), at.dtype.type
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
    """Where samples are on an axis of pixels, −16 for those that see none, and d position / d u."""
    real = points.dtype.type
    one, half, n, zero, nowhere, end = real(1), real(0.5), real(size), real(0), real(-16), real(np.inf)
    for i in range(m):
        u = points[b, p + i, d]
        x[i] = (u + one) * half * (n - one) if align else ((u + one) * n - one) * half
        slope[i] = half * (n - one) if align else half * n
    if pad == 2:
        low, span = (0.0, max(size - 1.0, 1.0)) if align else (-0.5, max(size + 0.0, 1.0))
        for i in range(m):
            # taps that are folded one by one are whole periods apart, exactly
            a = abs(np.float64(x[i]) - low) if taps == 4 else np.float64(abs(x[i] - real(low)))
            near = a < FAR
            a = a if near else 0.0
            flips = np.floor(a / span)
            rest = a - flips * span  # exact: a multiple of the last digit of a
            wrong = rest < 0.0
            flips, rest = flips - 1.0 if wrong else flips, rest + span if wrong else rest
            back = flips - 2.0 * np.floor(flips * 0.5) == 1.0
            turned = back != (x[i] < real(low))
            slope[i] = -slope[i] if turned else slope[i]
            rest = span - rest if back else rest
            x[i] = end if not near else real(rest + low) if taps == 4 else real(rest) + real(low)
    if pad > 0:
        floor, ceiling = (-one, n) if taps == 4 else (zero, n - one)
        for i in range(m):
            u = points[b, p + i, d]
            live = abs(u) < end and (pad == 1 or x[i] < end)
            flat = taps < 4 and not (x[i] > floor and x[i] < ceiling)
            slope[i] = zero if flat else slope[i]
            x[i] = min(max(x[i], floor), ceiling) if live else nowhere
    for i in range(m):
        x[i] = x[i] if x[i] >= real(-2) and x[i] <= n + one and size > 0 else nowhere


@part
def _fold(i, size, pad, align):
    """The pixel that stands for tap `i`, −1 where there is none."""
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
