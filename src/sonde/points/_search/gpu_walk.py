"""Device code of the tree traversal that all searches share.

A program handles a tile of queries that are close to each other; each has a bound, the largest squared distance it still accepts.
The program tests 32 boxes at once and keeps those within the bound of any query as the bits of an integer. The lowest bit leads to
32 smaller boxes, and so on down to points, which all queries of the tile process one at a time. Tiles are
``[boxes or points, queries]``.

The distance to a box uses the same operations in the same order as the distance to a point, each rounded, so no box is farther
than a point in it, to the last bit, and rounding loses no neighbour. This requires that kernels are compiled without FMA.

Each kernel advances its pointers to its batch row itself: Triton 3.6 cannot return None from a function.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...jit.launch import number, power_of_2
from .index.gpu_kernels import FLAT, LEAF, code_at, code_of, coordinates, finite, get_box, segment_of

NONE = tl.constexpr(0x7FFFFFFF)  # no point
MOST_F = 128  # most features that one program sums


@dataclass(frozen=True)
class Config:
    """How a kernel with a tile of rows is launched."""

    block_q: int  # rows per program
    num_warps: int


def block_of(F: int) -> int:
    """The number of features that one program sums."""
    return min(MOST_F, power_of_2(max(1, F)))


def nodes_of(boxes: Tensor | None) -> int:
    """The number of boxes per batch row; 0 to search without boxes."""
    return 0 if boxes is None else boxes.shape[1]


@triton.jit
def rate_of(sigma, b, W_HIGH, W_LOW, ACC: tl.constexpr):
    """1/σ, clamped to a finite value so that 0 · rate stays 0; any other gap times the largest rate is still beyond exp's range."""
    if sigma is not None:
        rate = 1.0 / tl.load(sigma + b).to(ACC)
    else:
        rate = 1.0 / number(W_HIGH, W_LOW).to(ACC)
    MOST: tl.constexpr = 1.7e308 if ACC.is_fp64() else 3.4e38
    return tl.where(rate > MOST, MOST, rate)  # NaN stays


@triton.jit
def add_term(total, lost, x):
    """Compensated sum: total + x, and `lost` with its rounding error. float64 sums are plain: they have digits to spare."""
    s = total + x
    if x.dtype != tl.float64:
        lost = lost + (x - (s - total))
    return s, lost


@triton.jit
def with_lost(total, lost):
    """The compensated sum; without compensation if it is infinite, where `lost` is NaN."""
    return tl.where(tl.abs(total) < float("inf"), total + lost, total)


@triton.jit
def lowest(bits):
    """The position of the lowest set bit, from the exponent of a float."""
    low = (bits & -bits).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def squared(dx, dy, dz):
    return (dx * dx + dy * dy) + dz * dz


@triton.jit
def root(x):
    """The correctly rounded square root."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def outside(q, low, high):
    """The distance of a coordinate from an interval."""
    return tl.maximum(tl.maximum(low - q, q - high), 0.0)


@triton.jit
def box_distance(boxes, i, there, x, y, z, D: tl.constexpr):
    """Squared distances from queries to boxes i; infinite for empty boxes."""
    x0, y0, z0, x1, y1, z1 = get_box(boxes, i, there, D)
    d = squared(outside(x, x0, x1), outside(y, y0, y1), outside(z, z0, z1))
    return tl.where(there & (x0 <= x1), d, float("inf"))


@triton.jit
def as_bits(hit):
    """An integer with a bit for each of 32 rows, set if any column of the row has a hit."""
    i = tl.arange(0, LEAF)
    some = tl.max(hit.to(tl.int32), 1)
    return tl.sum(some << i, 0).to(tl.int32)


@triton.jit
def query_tile(queries, qorder, b, M, query_offsets, point_offsets, N, S, tile, D: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The queries of a program → rows in the results, mask, mask of those that can have neighbours, and ``q``.

    ``q`` is (x, y, z, begin, end): coordinates, and the range of points that a query may see. In a ragged batch these are the
    points of its segment, otherwise all.
    """
    at = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_q = at < M
    x, y, z = coordinates(queries + b * M * D, at.to(tl.int64), in_q, D)
    row = at
    if qorder is not None:
        row = tl.load(qorder + b * M + at, mask=in_q, other=0)
    live = in_q & finite(x, y, z)
    first, last = tl.zeros_like(at), tl.zeros_like(at) + N
    if query_offsets is not None:
        s = segment_of(row, query_offsets, S)
        live = live & (s >= 0) & (s < S)
        first = tl.load(point_offsets + s, mask=live, other=0)
        last = tl.load(point_offsets + s + 1, mask=live, other=0)
        first = tl.minimum(tl.maximum(first, 0), N).to(tl.int32)  # even if the offsets are wrong
        last = tl.minimum(tl.maximum(last, 0), N).to(tl.int32)
    return row, in_q, live, (x, y, z, first, last)


@triton.jit
def meet(points, order, j, q, D: tl.constexpr):
    """Compare the tile's queries with point j → differences along the axes, d², and the index of the point."""
    x, y, z, _begin, _end = q
    at = points + j.to(tl.int64) * D
    dx, dy, dz = x - tl.load(at), y, z
    if D > 1:
        dy = y - tl.load(at + 1)
    if D > 2:
        dz = z - tl.load(at + 2)
    i = j
    if order is not None:
        i = tl.load(order + j)
    return dx, dy, dz, squared(dx, dy, dz), i


@triton.jit
def is_near(d, bound, j, q, RAGGED: tl.constexpr):
    """Which queries have point j, at the squared distance d, within their bound and their segment."""
    _x, _y, _z, begin, end = q
    here = (d <= bound) & (d < float("inf"))
    if RAGGED:
        here = here & (j >= begin) & (j < end)
    return here


@triton.jit
def near_boxes(boxes, first, count, span, q, bound, D: tl.constexpr, RAGGED: tl.constexpr):
    """Bits of the 32 boxes from `first` on, of `span` points each, that are within the bound of any query."""
    x, y, z, begin, end = q
    i = first + tl.arange(0, LEAF)[:, None]
    d = box_distance(boxes, i.to(tl.int64), i < count, x[None, :], y[None, :], z[None, :], D)
    hit = (d <= bound[None, :]) & (d < float("inf"))
    if RAGGED:
        hit = hit & (i * span < end[None, :]) & (i * span + span > begin[None, :])
    return as_bits(hit)


@triton.jit
def near_points(points, leaf, N, q, bound, D: tl.constexpr, RAGGED: tl.constexpr):
    """Bits of the points of a leaf that are within the bound of any query."""
    x, y, z, begin, end = q
    j = leaf * LEAF + tl.arange(0, LEAF)[:, None]
    px, py, pz = coordinates(points, j.to(tl.int64), (j < N) & (leaf >= 0), D)
    d = squared(x[None, :] - px, y[None, :] - py, z[None, :] - pz)
    hit = (d <= bound[None, :]) & (d < float("inf"))
    if RAGGED:
        hit = hit & (j >= begin[None, :]) & (j < end[None, :])
    return as_bits(hit)


@triton.jit
def start_walk():
    """The initial state of a walk, which :func:`next_leaf` takes and returns."""
    zero = tl.program_id(0) * 0
    return zero, zero, zero, zero, zero, zero, zero


@triton.jit
def next_leaf(boxes, N, q, bound, walk, D: tl.constexpr, RAGGED: tl.constexpr):
    """The next leaf to visit, −1 at the end, and the new state of the walk.

    The state holds what is left to visit, as bits: `leaves` counted from `leaf`, `inner` boxes from `box`, `outer` boxes from
    `top`; `ahead` is the first outermost box that was not tested yet. Without `boxes`, leaves are visited one after the other.
    """
    leaf, leaves, box, inner, top, outer, ahead = walk
    if boxes is None:
        found = tl.where(ahead * LEAF < N, ahead, -1)
        ahead += 1
    else:
        LEAVES = tl.cdiv(N, LEAF)
        BOXES = tl.cdiv(N, LEAF * LEAF)
        deep = N > FLAT
        OUTER = tl.where(deep, tl.cdiv(BOXES, LEAF), BOXES)
        while (leaves == 0) & ((ahead < OUTER) | (inner != 0) | (outer != 0)):
            # test 32 boxes: leaves of an inner box if any is left, else inner boxes of an outer one, else more of the outermost
            up = inner == 0
            far = up & (outer == 0)
            first = tl.where(far, ahead, LEAF * tl.where(up, top + lowest(outer), box + lowest(inner)))
            high = far & deep
            middle = up & (far != deep)
            count = tl.where(high, OUTER, tl.where(middle, BOXES, LEAVES))
            before = tl.where(high, LEAVES + BOXES, tl.where(middle, LEAVES, 0))
            span = tl.where(high, LEAF * LEAF * LEAF, tl.where(middle, LEAF * LEAF, LEAF))
            level = boxes + before.to(tl.int64) * (2 * D)
            bits = near_boxes(level, first, count, span, q, bound, D, RAGGED)
            outer = tl.where(high, bits, tl.where(up, outer & (outer - 1), outer))
            top = tl.where(high, first, top)
            inner = tl.where(middle, bits, inner & (inner - 1))
            box = tl.where(middle, first, box)
            leaves = tl.where(up, 0, bits)
            leaf = tl.where(up, leaf, first)
            ahead = tl.where(far, ahead + LEAF, ahead)
        found = tl.where(leaves != 0, leaf + lowest(leaves), -1)
        leaves = leaves & (leaves - 1)
    return found, (leaf, leaves, box, inner, top, outer, ahead)


@triton.jit
def first_bound(points, boxes, N, NODES, q, D: tl.constexpr, K: tl.constexpr, SEED: tl.constexpr):
    """A squared distance within which each query has at least K neighbours, from the SEED points around it on the curve."""
    x, y, z, begin, end = q
    LEAVES = tl.cdiv(N, LEAF)
    BOXES = tl.cdiv(N, LEAF * LEAF)
    TOPS = tl.where(N > FLAT, tl.cdiv(BOXES, LEAF), 0)
    codes = boxes + (LEAVES + BOXES + TOPS).to(tl.int64) * (2 * D)
    code = code_of(x, y, z, boxes + (NODES - 1).to(tl.int64) * (2 * D), D)
    # binary search: the last leaf of the query's segment that starts at or before its position, or the one before the first
    leaf, last = tl.cdiv(begin, LEAF) - 1, tl.cdiv(end, LEAF)
    step = 1
    while step < LEAVES:
        step *= 2
    while step > 0:
        more = leaf + step
        before = (more < last) & (code_at(codes + more, more < last) <= code)
        leaf = tl.where(before, more, leaf)
        step = step // 2
    start = tl.minimum(leaf * LEAF - (SEED - LEAF) // 2, end - SEED)
    j = tl.maximum(start, begin)[None, :] + tl.arange(0, SEED)[:, None]
    px, py, pz = coordinates(points, j.to(tl.int64), j < end[None, :], D)
    d = squared(x[None, :] - px, y[None, :] - py, z[None, :] - pz)
    d = tl.where(d >= 0, d, float("inf"))  # NaN, and masked points
    bound = tl.zeros_like(x) - 1
    for _ in range(K):
        bound = tl.min(tl.where(d > bound[None, :], d, float("inf")), 0)  # equal distances count once: looser, but still a bound
    return bound
