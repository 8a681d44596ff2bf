"""Device code for samples that one thread locates on behalf of all threads that hold their channels.

Values per sample are one-dimensional. Tiles ``[samples, channels]`` hold one part of the samples at a time: every second, fourth or
eighth one, so that a row of a tile belongs to the same query in every part.
"""

import triton
import triton.language as tl

from .._pyramid.gpu_levels import along, shares


@triton.jit
def fetch_together(locations, i, here, ACC: tl.constexpr):
    """Load the coordinates (v, u) of locations, both in one access; outside of every level if not `here`."""
    u, v = tl.split(tl.load(locations + 2 * i[:, None] + tl.arange(0, 2), mask=here[:, None], other=-1.0))
    return v.to(ACC), u.to(ACC)


@triton.jit
def repeated(x, TIMES: tl.constexpr):
    """Repeat each element of a column TIMES times."""
    return tl.reshape(tl.broadcast_to(x, [x.shape[0], TIMES]), [x.shape[0] * TIMES])


@triton.jit
def part(x, j: tl.constexpr, PARTS: tl.constexpr):
    """Part `j` of `x` as a column: every PARTS-th element."""
    if PARTS == 1:
        column = x[:, None]
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        column = part(odd if j % 2 else even, j // 2, PARTS // 2)
    return column


@triton.jit
def whole(columns, PARTS: tl.constexpr):
    """The inverse of ``part``, from parts with one number per row."""
    if PARTS == 1:
        x = columns[0]
    else:
        x = tl.reshape(tl.join(whole(columns[0::2], PARTS // 2), whole(columns[1::2], PARTS // 2)), [columns[0].shape[0] * PARTS])
    return x


@triton.jit
def packed(k00, k01, k10, k11):
    """Pack four masks of each sample into the bits of an integer."""
    return k00.to(tl.int32) + 2 * k01.to(tl.int32) + 4 * k10.to(tl.int32) + 8 * k11.to(tl.int32)


@triton.jit
def unpacked(k):
    return (k & 1) != 0, (k & 2) != 0, (k & 4) != 0, (k & 8) != 0


@triton.jit
def merged(v, u, w, H, W, POINTS: tl.constexpr, OFFSET: tl.constexpr):
    """→ what to add to each corner of a sample's cell, and whether this sample is the one that adds it.

    All points of a query add multiples of one row, its gradient. If several have a pixel in common, the first adds for all of them:
    their weights, which are single numbers, are summed. POINTS adjacent samples belong to one query and level; each is compared
    with every other. A pixel exists for all samples that have it as a corner or for none; absent samples have no corner that
    exists.
    """
    y, fy, _top, _bottom = along(v, H, OFFSET)
    x, fx, _left, _right = along(u, W, OFFSET)
    y, x = y.to(w.dtype), x.to(w.dtype)
    s00, s01, s10, s11 = shares(fy, fx)
    s00, s01, s10, s11 = w * s00, w * s01, w * s10, w * s11
    n00 = tl.zeros_like(w)  # how many earlier points have the corner; numbers need no predicate registers
    n01, n10, n11 = n00, n00, n00
    i = tl.arange(0, w.shape[0])
    for step in tl.static_range(1, POINTS):
        j = i ^ step
        before = tl.where(j < i, 1.0, 0.0).to(w.dtype)
        dy, dx, other = tl.gather(y, j, 0) - y, tl.gather(x, j, 0) - x, tl.gather(w, j, 0)
        py, px = dy + tl.gather(fy, j, 0), dx + tl.gather(fx, j, 0)  # the other's position, relative to this one's first corner
        has_y0, has_y1, has_x0, has_x1 = tl.abs(dy + 0.5) < 1, tl.abs(dy - 0.5) < 1, tl.abs(dx + 0.5) < 1, tl.abs(dx - 0.5) < 1
        y0, y1 = other * (1 - tl.abs(py)), other * (1 - tl.abs(py - 1))
        x0, x1 = 1 - tl.abs(px), 1 - tl.abs(px - 1)
        s00, n00 = tl.where(has_y0 & has_x0, s00 + y0 * x0, s00), tl.where(has_y0 & has_x0, n00 + before, n00)
        s01, n01 = tl.where(has_y0 & has_x1, s01 + y0 * x1, s01), tl.where(has_y0 & has_x1, n01 + before, n01)
        s10, n10 = tl.where(has_y1 & has_x0, s10 + y1 * x0, s10), tl.where(has_y1 & has_x0, n10 + before, n10)
        s11, n11 = tl.where(has_y1 & has_x1, s11 + y1 * x1, s11), tl.where(has_y1 & has_x1, n11 + before, n11)
    return s00, s01, s10, s11, n00 == 0, n01 == 0, n10 == 0, n11 == 0


@triton.jit
def low(pair):
    """The first of two bfloat16 in 32 bits: one instruction, where a bfloat16 that was loaded alone takes two."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)
