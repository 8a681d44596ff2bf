"""Device code of bilinear sampling: where a sample falls, what it reads, how it interpolates.

Every function works on tensors that broadcast against each other. A tile of channels has two dimensions, ``[LANES, VEC]``, so
that one thread holds VEC neighbouring channels (one 16-byte access) and neighbouring threads hold neighbouring channels.
"""

import math

import triton
import triton.language as tl

# Taylor coefficients of sin 2πr in powers of r²; float32 uses seven of them, float64 all eleven
SIN = tl.constexpr(tuple((-1) ** k * (2 * math.pi) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(11)))
TAU = tl.constexpr(2 * math.pi)


@triton.jit
def position(u, size):
    """Pixel coordinate of `u` in [−1, 1], with every operation rounded as in the reference.

    The minimum turns NaN and huge values into a coordinate that is merely outside. It also keeps the compiler from fusing the
    product with the subtraction: an FMA rounds once instead of twice, and the last bit decides which cell a sample falls into.
    """
    return (tl.minimum((u + 1) * size, 1e30) - 1) * 0.5


@triton.jit
def fetch(samples, index, in_range, ACC: tl.constexpr):
    """Load the coordinates (y, x) of the samples with these indices; NaN, which is never live, where not `in_range`."""
    x = tl.load(samples + 2 * index, mask=in_range, other=float("nan")).to(ACC)
    y = tl.load(samples + 2 * index + 1, mask=in_range, other=float("nan")).to(ACC)
    return y, x


@triton.jit
def locate(y, x, H, W, OFFSET: tl.constexpr):
    """→ live: does the sample see any pixel; (y0, x0): the top left corner of its cell; (fy, fx): its position in the cell."""
    y, x = position(y, H), position(x, W)
    live = (x >= -1) & (x < W) & (y >= -1) & (y < H)
    x, y = tl.where(live, x, 0), tl.where(live, y, 0)
    x0, y0 = tl.floor(x), tl.floor(y)
    return live, y0.to(OFFSET), x0.to(OFFSET), y - y0, x - x0


@triton.jit
def edges(live, y0, x0, H, W):
    """Masks of the cell's four corners: True where a corner is a pixel of the image."""
    left, right = live & (x0 >= 0), live & (x0 + 1 < W)
    top, bottom = y0 >= 0, y0 + 1 < H
    return left & top, right & top, left & bottom, right & bottom


@triton.jit
def channel(c, H, W, STRIDE: tl.constexpr, OFFSET: tl.constexpr):
    """Offset of channel `c` within a pixel; pixels are STRIDE apart, where 1 means that each channel is a plane."""
    if STRIDE == 1:
        c = c.to(OFFSET) * H * W
    return c


@triton.jit
def corners(image, pixel, k00, k01, k10, k11, c, in_c, W, STRIDE: tl.constexpr, ACC: tl.constexpr):
    """Load the four pixels of each sample's cell, zero where masked; `pixel` is the index of (y0, x0), `c` is from ``channel``."""
    p = image + pixel * STRIDE + c
    v00 = tl.load(p, mask=k00 & in_c, other=0).to(ACC)
    v01 = tl.load(p + STRIDE, mask=k01 & in_c, other=0).to(ACC)
    v10 = tl.load(p + W * STRIDE, mask=k10 & in_c, other=0).to(ACC)
    v11 = tl.load(p + (W * STRIDE + STRIDE), mask=k11 & in_c, other=0).to(ACC)
    return v00, v01, v10, v11


@triton.jit
def shared_cell(live, pixel):
    """→ do all live samples share one cell, and which; the samples of a query that misses the image often do."""
    first = tl.min(tl.where(live, pixel, 2**30))
    last = tl.max(tl.where(live, pixel, -(2**30)))
    return first == last, first


@triton.jit
def scatter(image, value, fy, fx, pixel, k00, k01, k10, k11, one_cell, cell, c, in_c, W, STRIDE: tl.constexpr):
    """Atomically add each sample's row of `value`, bilinearly weighted, to the four pixels of its cell; the order varies.

    If all rows go to `one_cell`, whose index is `cell`, they are reduced first: atomics on a pixel that thousands of samples
    share would be serialized, and would lose precision.
    """
    bottom = fy * value
    top = value - bottom
    if one_cell:
        row = image + cell * STRIDE + c
        add_row(row, top - fx * top, k00, in_c)
        add_row(row + STRIDE, fx * top, k01, in_c)
        add_row(row + W * STRIDE, bottom - fx * bottom, k10, in_c)
        add_row(row + (W * STRIDE + STRIDE), fx * bottom, k11, in_c)
    else:
        p = image + pixel * STRIDE + c
        tl.atomic_add(p, top - fx * top, mask=k00 & in_c, sem="relaxed")
        tl.atomic_add(p + STRIDE, fx * top, mask=k01 & in_c, sem="relaxed")
        tl.atomic_add(p + W * STRIDE, bottom - fx * bottom, mask=k10 & in_c, sem="relaxed")
        tl.atomic_add(p + (W * STRIDE + STRIDE), fx * bottom, mask=k11 & in_c, sem="relaxed")


@triton.jit
def add_row(p, rows, k, in_c):
    """Atomically add the sum of the rows that mask `k` selects."""
    there = tl.max(k.to(tl.int32), 0, keep_dims=True) > 0
    tl.atomic_add(p, tl.sum(tl.where(k, rows, 0), 0, keep_dims=True), mask=there & in_c, sem="relaxed")


@triton.jit
def interpolate(v00, v01, v10, v11, fy, fx):
    """→ the value and its derivatives in y and x; written with differences, so a constant image interpolates exactly."""
    dx_top, dx_bottom = v01 - v00, v11 - v10
    top = v00 + fx * dx_top
    dy = v10 + fx * dx_bottom - top
    return top + fy * dy, dy, dx_top + fy * (dx_bottom - dx_top)


@triton.jit
def octave(depth, f):
    """→ (2^f·depth reduced to [−½, ½] turns, 2^f); both are exact, as the power is built from its exponent bits."""
    power = ((f + 127) << 23).to(tl.float32, bitcast=True).to(depth.dtype)
    t = power * depth
    return t - tl.floor(t + 0.5), power


@triton.jit
def wave(r, cosine):
    """sin 2πr, or cos 2πr where `cosine`, for r in [−½, ½].

    The argument is folded into a quarter turn and a polynomial evaluated: as accurate as the library's sine, whose slow path
    for large arguments needs the stack.
    """
    a = tl.abs(r)
    r = tl.where(cosine, 0.25 - a, tl.where(a > 0.25, tl.where(r < 0, a - 0.5, 0.5 - a), r))
    z = r * r
    s = SIN[6] + tl.zeros_like(z)
    if r.dtype == tl.float64:
        s = (((SIN[10] * z + SIN[9]) * z + SIN[8]) * z + SIN[7]) * z + SIN[6]
    return ((((((s * z + SIN[5]) * z + SIN[4]) * z + SIN[3]) * z + SIN[2]) * z + SIN[1]) * z + SIN[0]) * r
