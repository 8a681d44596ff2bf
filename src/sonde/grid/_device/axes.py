"""Device code of sampling along one axis: a coordinate's taps, their weights, and the derivatives of the weights.

Images and volumes are products of axes, so all modes and paddings come from the same few functions.
"""

import triton
import triton.language as tl

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
TAPS = (2, 1, 4)  # taps along an axis, for each mode
FAR = tl.constexpr(2.0**30)  # reflection needs the integer part of a position: farther away, samples see nothing
A = tl.constexpr(-0.75)  # of the cubic kernel, as in torch


@triton.jit
def along(u, N, TAPS: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr):
    """Coordinate `u` on an axis of N pixels → may it see any, its first tap, its position in the cell, d position / d u.

    The minimum makes huge values merely outside, and prevents an FMA, as in ``taps.position``.
    """
    live = (tl.abs(u) < float("inf")) & (N > 0)
    if ALIGN:
        x = tl.minimum((u + 1) * 0.5 * (N - 1), 1e30)
        slope = tl.zeros_like(u) + 0.5 * (N - 1)
    else:
        x = (tl.minimum((u + 1) * N, 1e30) - 1) * 0.5
        slope = tl.zeros_like(u) + 0.5 * N
    if PAD == 2 and TAPS == 4:  # reduce by whole periods, which is exact; taps are folded one by one in ``pixel``
        period = tl.maximum(2 * N - 2, 1) if ALIGN else tl.maximum(2 * N, 1)
        live = live & (tl.abs(x) < FAR)
        x = tl.where(live, x, 0)
        whole = tl.floor(x)
        i = whole.to(tl.int32) % period
        i = tl.where(i < 0, i + period, i)
        x = i.to(u.dtype) + (x - whole)
        slope = tl.where(i < N, slope, -slope)
        x = tl.where(i < N, x, (period if ALIGN else period - 1) - x)
    elif PAD == 2:
        LOW: tl.constexpr = 0.0 if ALIGN else -0.5
        span = tl.maximum(N - 1, 1) if ALIGN else tl.maximum(N, 1)
        a = tl.abs(x - LOW)
        live = live & (a < FAR)
        a = tl.where(live, a, 0)
        whole = tl.floor(a)
        i = whole.to(tl.int32)  # an integer remainder is exact
        flips = i // span
        rest = (i - flips * span).to(u.dtype) + (a - whole)
        back = flips % 2 == 1
        slope = tl.where(back != (x < LOW), -slope, slope)
        x = tl.where(back, span - rest, rest) + LOW
    if PAD > 0:
        if TAPS == 4:  # ``pixel`` clamps each tap; below −1 (at −1 the last tap is still the second pixel) all are the border
            x = tl.where(x < -1, -2.0, tl.minimum(x, N))
        else:
            slope = tl.where((x > 0) & (x < N - 1), slope, 0)
            x = tl.minimum(tl.maximum(x, 0), N - 1)
    live = live & (x >= -2) & (x <= N + 1)
    x = tl.where(live, x, 0)
    x0 = tl.floor(x)
    t = x - x0
    if TAPS == 1:
        odd = x0 - 2 * tl.floor(x0 * 0.5)
        x0 = tl.where((t > 0.5) | ((t == 0.5) & (odd == 1)), x0 + 1, x0)
    if TAPS == 4:
        x0 = x0 - 1
    return live, x0.to(INDEX), t, slope


@triton.jit
def pixel(live, first, k: tl.constexpr, N, TAPS: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr):
    """→ the index of tap `k`'s pixel, and whether it exists."""
    i = first + k
    if TAPS == 4 and PAD == 1:
        i = tl.minimum(tl.maximum(i, 0), N - 1)
    if TAPS == 4 and PAD == 2:
        period = tl.maximum(2 * N - 2, 1) if ALIGN else tl.maximum(2 * N, 1)
        i = (i + 2 * period) % period  # taps are at most two pixels outside
        i = tl.where(i < N, i, (period if ALIGN else period - 1) - i)
    return i, live & (i >= 0) & (i < N)


@triton.jit
def inner(t):
    """The cubic kernel for 0 ≤ t ≤ 1."""
    return ((A + 2) * t - (A + 3)) * t * t + 1


@triton.jit
def outer(t):
    """The cubic kernel for 1 ≤ t ≤ 2."""
    return ((A * t - 5 * A) * t + 8 * A) * t - 4 * A


@triton.jit
def weight(t, k: tl.constexpr, TAPS: tl.constexpr):
    if TAPS == 1:
        w = tl.zeros_like(t) + 1
    elif TAPS == 2:
        w = 1 - t if k == 0 else t
    elif k == 0:
        w = outer(t + 1)
    elif k == 1:
        w = inner(t)
    elif k == 2:
        w = inner(1 - t)
    else:
        w = outer(2 - t)
    return w


@triton.jit
def inner_slope(t):
    return (3 * (A + 2) * t - 2 * (A + 3)) * t


@triton.jit
def outer_slope(t):
    return (3 * A * t - 10 * A) * t + 8 * A


@triton.jit
def weight_slope(t, k: tl.constexpr, TAPS: tl.constexpr):
    """d weight / d t."""
    if TAPS == 2:
        s = tl.zeros_like(t) + (2 * k - 1)
    elif k == 0:
        s = outer_slope(t + 1)
    elif k == 1:
        s = inner_slope(t)
    elif k == 2:
        s = -inner_slope(1 - t)
    else:
        s = -outer_slope(2 - t)
    return s


@triton.jit
def axis(u, N, STRIDE, TAPS: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr, OFFSET: tl.constexpr, SLOPES: tl.constexpr):
    """Tuples over the taps of an axis: offset, mask, weight and, if SLOPES, the derivative of the weight in u."""
    live, first, t, slope = along(u, N, TAPS, PAD, ALIGN, tl.int32)
    at = ()
    there = ()
    weights = ()
    slopes = ()
    for k in tl.static_range(TAPS):
        i, inside = pixel(live, first, k, N, TAPS, PAD, ALIGN)
        at = at + (i.to(OFFSET) * STRIDE,)
        there = there + (inside,)
        weights = weights + (weight(t, k, TAPS),)
        if SLOPES:
            slopes = slopes + (weight_slope(t, k, TAPS) * slope,)
    return at, there, weights, slopes


@triton.jit
def none(u):
    """What ``axis`` returns for the z axis of an image: one tap of weight 1."""
    zero = tl.zeros_like(u)
    return (zero.to(tl.int32),), (zero == 0,), (zero + 1,), (zero,)


@triton.jit
def coordinate(grid, b, p, in_p, axis: tl.constexpr, GROUP, G_B, G_P, G_D, ACC: tl.constexpr):
    return tl.load(grid + (b // GROUP) * G_B + p * G_P + axis * G_D, mask=in_p, other=float("nan")).to(ACC)


@triton.jit
def tile(base, p, c, S_C, S_P, LAST: tl.constexpr, ROW: tl.constexpr, VECTOR: tl.constexpr):
    """Addresses of elements (p, c), vectorizable where one stride is 1 (LAST, ROW) and the other a multiple of VECTOR."""
    if LAST:
        at = base + p * (S_P // VECTOR * VECTOR) + c
    elif ROW:
        at = base + p + c * (S_C // VECTOR * VECTOR)
    else:
        at = base + p * S_P + c * S_C
    return at


@triton.jit
def any_of(there):
    found = there[0]
    for k in tl.static_range(1, len(there)):
        found = found | there[k]
    return found


@triton.jit
def over_channels(x, live):
    """The sum of each sample's row; exactly zero for samples that see nothing, even if the row has a NaN."""
    return tl.where(live, tl.sum(x, 1, keep_dims=True), 0)


GROUP = tl.constexpr(32)  # consecutive samples that can exchange values: a warp


@triton.jit
def neighbours(there, z, y, x, H, W, BLOCK: tl.constexpr):
    """For samples ``[BLOCK, 1]`` in cells (z, y, x) → is the previous sample one cell to the left, the next one to the right?

    Such a pair adds to the same two pixels (per row), which the first sample can leave to the second.
    """
    # a gap between rows, so that the end of one and the start of the next are not neighbours
    cell = ((z.to(tl.int64) + 1) * (H + 2) + y + 1) * (W + 2) + x + 1
    cell = tl.where(there, cell, -9)
    place = tl.arange(0, BLOCK)[:, None] % GROUP
    joined = (place > 0) & (shift(cell, -1, BLOCK) + 1 == cell)
    taken = (place < GROUP - 1) & (shift(joined.to(tl.int32), 1, BLOCK) > 0)
    return joined, taken


@triton.jit
def shift(x, by: tl.constexpr, BLOCK: tl.constexpr):
    """The value of the sample `by` places further in the group; clamped at the group's ends."""
    SHAPE: tl.constexpr = [BLOCK // GROUP, GROUP]
    place = tl.reshape(tl.arange(0, BLOCK) % GROUP, SHAPE)
    return tl.reshape(tl.gather(tl.reshape(x, SHAPE), tl.minimum(tl.maximum(place + by, 0), GROUP - 1), 1), [BLOCK, 1])
