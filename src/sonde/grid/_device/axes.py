"""Device code of sampling along axes: where a coordinate falls, which pixels it reads, how much of each, and how that changes.

Everything is per axis, so that images and volumes, all modes and all paddings are products of the same few functions.
"""

import triton
import triton.language as tl

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
TAPS = (2, 1, 4)  # of each mode, along an axis
FAR = tl.constexpr(2.0**30)
A = tl.constexpr(-0.75)


@triton.jit
def along(u, N, TAPS: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr):
    """A coordinate on an axis of N pixels → whether it may see any, its first tap, its place in the cell, d position / d u.

    The minimum makes something merely outside of what is huge. It also keeps the product apart from the subtraction: fused,
    they would round once instead of twice, and the last bit decides on which side of a pixel's edge a sample lies.
    """
    live = (tl.abs(u) < float("inf")) & (N > 0)
    if ALIGN:
        x = tl.minimum((u + 1) * 0.5 * (N - 1), 1e30)
        slope = tl.zeros_like(u) + 0.5 * (N - 1)
    else:
        x = (tl.minimum((u + 1) * N, 1e30) - 1) * 0.5
        slope = tl.zeros_like(u) + 0.5 * N
    if PAD == 2 and TAPS == 4:  # its taps are folded one by one, so that positions are whole periods apart, exactly
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
        i = whole.to(tl.int32)  # the remainder by integers is exact
        flips = i // span
        rest = (i - flips * span).to(u.dtype) + (a - whole)
        back = flips % 2 == 1
        slope = tl.where(back != (x < LOW), -slope, slope)
        x = tl.where(back, span - rest, rest) + LOW
    if PAD > 0:
        if TAPS == 4:  # its taps are folded one by one; beyond this all of them are the border
            x = tl.where(x < -1, -2.0, tl.minimum(x, N))  # at −1 the last tap is the second pixel; beyond, all are the first
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
    """The pixel of tap `k`, and whether there is one."""
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
    """And for 1 ≤ t ≤ 2."""
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
    """Of each tap along an axis: where it is, whether it is, its weight and, if SLOPES, the weight's derivative by u."""
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
    """The axis that an image lacks."""
    zero = tl.zeros_like(u)
    return (zero.to(tl.int32),), (zero == 0,), (zero + 1,), (zero,)


@triton.jit
def coordinate(grid, b, p, in_p, axis: tl.constexpr, GROUP, G_B, G_P, G_D, ACC: tl.constexpr):
    return tl.load(grid + (b // GROUP) * G_B + p * G_P + axis * G_D, mask=in_p, other=float("nan")).to(ACC)


@triton.jit
def tile(base, p, c, S_C, S_P, LAST: tl.constexpr, ROW: tl.constexpr, VECTOR: tl.constexpr):
    """Where elements (p, c) are; one of the strides may be known to be one, the other to be a multiple of VECTOR."""
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
    """The sum of each sample's row; exactly zero for one that sees nothing, whatever it was multiplied with."""
    return tl.where(live, tl.sum(x, 1, keep_dims=True), 0)


GROUP = tl.constexpr(32)  # samples side by side that can hand each other something


@triton.jit
def neighbours(there, z, y, x, H, W, BLOCK: tl.constexpr):
    """Of samples ``[BLOCK, 1]`` in cells (z, y, x): is the one before in the cell to the left, and the one behind to the right?

    Then two of them add to the same pixels: the former can leave that to the latter.
    """
    cell = (
        ((z.to(tl.int64) + 1) * (H + 2) + y + 1) * (W + 2) + x + 1
    )  # the end of a row and the start of the next are not neighbours
    cell = tl.where(there, cell, -9)
    place = tl.arange(0, BLOCK)[:, None] % GROUP
    joined = (place > 0) & (shift(cell, -1, BLOCK) + 1 == cell)
    taken = (place < GROUP - 1) & (shift(joined.to(tl.int32), 1, BLOCK) > 0)
    return joined, taken


@triton.jit
def shift(x, by: tl.constexpr, BLOCK: tl.constexpr):
    """Of the sample `by` places further in the group, where there is one."""
    SHAPE: tl.constexpr = [BLOCK // GROUP, GROUP]
    place = tl.reshape(tl.arange(0, BLOCK) % GROUP, SHAPE)
    return tl.reshape(tl.gather(tl.reshape(x, SHAPE), tl.minimum(tl.maximum(place + by, 0), GROUP - 1), 1), [BLOCK, 1])
