"""The index on a GPU: points sorted along a Hilbert curve, with boxes of 32, 1024 and 32768 consecutive points.

All sizes depend only on the number of points, so nothing waits for the host. ``boxes`` holds the leaves, then the boxes of 32
leaves, then, for more than ``FLAT`` points, those of 1024 leaves; then, for each leaf, the curve position of its first point; the
last box holds the origin and scale of the curve. Non-finite points come last and are in no box.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....jit.launch import Launch, cdiv
from ....jit.steps import Pass
from .reference import nodes

LEAF = tl.constexpr(32)  # points per leaf, leaves per box, boxes per larger box: the number of bits of an int32
FLAT = tl.constexpr(1 << 17)  # up to this many points, two levels are enough
SAMPLE = tl.constexpr(64)  # points from which the centre and width of a cloud are estimated
NOWHERE = tl.constexpr(1 << 30)  # one past the last position of the curve
BLOCK = 512


class Levels(NamedTuple):
    leaves: int
    boxes: int
    tops: int


def levels(n: int) -> Levels:
    leaves = cdiv(n, LEAF.value)
    return Levels(leaves, cdiv(leaves, LEAF.value), cdiv(leaves, LEAF.value**2) if n > FLAT.value else 0)


def build(points: Tensor, point_offsets: Tensor | None) -> Pass:
    """The pass from points ``[B, N, D]`` to order ``[B, N]``, sorted points ``[B, N, D]`` and boxes ``[B, nodes, 2, D]``."""
    (B, N, D), count = points.shape, levels(points.shape[1])
    p = Pass(points.device, points.dtype, dict(points=points, point_offsets=point_offsets))
    S = 0 if point_offsets is None else point_offsets.shape[0] - 1
    room = nodes(N, 1 if point_offsets is None else S)
    order = p.buffer("order", (B, N), torch.int32)
    ordered = p.buffer("sorted", (B, N, D), points.dtype)
    boxes = p.buffer("boxes", (B, room, 2, D), points.dtype)
    if not B * N:
        return p.returns(order, ordered, boxes)
    own, blocks = p.contiguous("points"), cdiv(N, BLOCK)
    key = torch.int32 if point_offsets is None else torch.int64
    keys = p.buffer("keys", (B, N), key)
    sizes = (N, S, blocks, room)
    p.start(_codes, [own, "point_offsets", keys, boxes], Launch((B * blocks, 1, 1), sizes, (D, BLOCK), 4, fp_fusion=False))
    gives = [("keys", (B, N), key), ("place", (B, N), torch.int64)]
    keys, place = p.call("torch.sort", _sorted, [keys], gives, scratch=B * N * sort_scratch(key.itemsize))
    launch = Launch((B * count.boxes, 1, 1), (N, *count, room), (D,), 4, fp_fusion=False)
    p.start(_leaves, [own, keys, place, order, ordered, boxes], launch, writes=["order", "sorted", "boxes"])
    p.start(_tops, [boxes], Launch((B * count.tops, 1, 1), (*count, room), (D,), 1, fp_fusion=False), writes=["boxes"])
    return p.returns(order, ordered, boxes)


def _sorted(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered, place = torch.sort(keys, dim=-1, stable=True)
    return ordered, place


def sort_scratch(key: int) -> int:
    """Bytes that ``torch.sort`` allocates per key of `key` bytes: initial indices, and buffers of keys and indices."""
    return 8 + (key + 8)


@triton.jit
def coordinates(points, i, there, D: tl.constexpr):
    """x, y, z of points i of ``[N, D]``; missing dimensions are 0, masked points NaN."""
    x = tl.load(points + i * D, mask=there, other=float("nan"))
    y, z = tl.zeros_like(x), tl.zeros_like(x)
    if D > 1:
        y = tl.load(points + i * D + 1, mask=there, other=float("nan"))
    if D > 2:
        z = tl.load(points + i * D + 2, mask=there, other=float("nan"))
    return x, y, z


@triton.jit
def finite(x, y, z):
    return (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf")) & (tl.abs(z) < float("inf"))


@triton.jit
def segment_of(i, offsets, S):
    """The segment of i by binary search; −1 before the first offset, S from the last one on."""
    s = tl.zeros_like(i)  # one more than the segment
    step = 1
    while step < S + 1:
        step *= 2
    while step > 0:
        more = s + step
        below = (more <= S + 1) & (tl.load(offsets + more - 1, mask=more <= S + 1, other=0) <= i)
        s = tl.where(below, more, s)
        step = step // 2
    return s - 1


@triton.jit
def put_box(box, x0, y0, z0, x1, y1, z1, there, D: tl.constexpr):
    tl.store(box, x0, mask=there)
    tl.store(box + D, x1, mask=there)
    if D > 1:
        tl.store(box + 1, y0, mask=there)
        tl.store(box + D + 1, y1, mask=there)
    if D > 2:
        tl.store(box + 2, z0, mask=there)
        tl.store(box + D + 2, z1, mask=there)


@triton.jit
def get_box(boxes, i, there, D: tl.constexpr):
    """Both corners of boxes i of ``[nodes, 2, D]``, NaN if masked."""
    x0, y0, z0 = coordinates(boxes, 2 * i, there, D)
    x1, y1, z1 = coordinates(boxes, 2 * i + 1, there, D)
    return x0, y0, z0, x1, y1, z1


@triton.jit(do_not_specialize=["N", "S", "BLOCKS", "NODES"])
def _codes(
    points,  # [B, N, D]
    offsets,  # [S + 1] or None
    keys,  # [B, N]
    boxes,  # [B, NODES, 2, D]
    N,
    S,
    BLOCKS,
    NODES,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort keys: positions on a curve through a cube around most points. Non-finite points come last.

    The cube is estimated from a sample and outliers are compressed into its rim, so they take no resolution from the rest.
    """
    b, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    cloud, curve = points + b * N * D, boxes + (b * NODES + NODES - 1) * (2 * D)
    s = tl.arange(0, SAMPLE)
    x, y, z = coordinates(cloud, s.to(tl.int64) * N // SAMPLE, s < SAMPLE, D)
    live = finite(x, y, z)
    x0, width = middle(x, live)
    y0, y_width = middle(y, live)
    z0, z_width = middle(z, live)
    width = tl.maximum(width, tl.maximum(y_width, z_width))
    scale = 1.0 / tl.where((width > 1e-30) & (width < 1e30), width, 1.0)
    first = block == 0
    tl.store(curve, x0, mask=first)
    if D > 1:
        tl.store(curve + 1, y0, mask=first)
    if D > 2:
        tl.store(curve + 2, z0, mask=first)
    tl.store(curve + D, scale, mask=first)

    i = block * BLOCK + tl.arange(0, BLOCK)
    x, y, z = coordinates(cloud, i.to(tl.int64), i < N, D)
    live = finite(x, y, z)
    key = tl.where(live, hilbert(cell(x, x0, scale, live, D), cell(y, y0, scale, live, D), cell(z, z0, scale, live, D), D), NOWHERE)
    if offsets is not None:
        key = ((segment_of(i, offsets, S) + 1).to(tl.int64) << 31) | key.to(tl.int64)
    tl.store(keys + b * N + i, key, mask=i < N)


@triton.jit
def code_of(x, y, z, curve, D: tl.constexpr):
    """Positions of queries on the curve of a cloud."""
    scale = tl.load(curve + D)
    live = finite(x, y, z)
    u = cell(x, tl.load(curve), scale, live, D)
    v, w = tl.zeros_like(u), tl.zeros_like(u)
    if D > 1:
        v = cell(y, tl.load(curve + 1), scale, live, D)
    if D > 2:
        w = cell(z, tl.load(curve + 2), scale, live, D)
    return hilbert(u, v, w, D)


@triton.jit
def code_at(codes, there):
    """Load curve positions, which are stored as the bits of floating-point numbers."""
    code = tl.load(codes, mask=there, other=0)
    if code.dtype == tl.float64:
        return code.to(tl.int64, bitcast=True).to(tl.int32)
    else:
        return code.to(tl.int32, bitcast=True)


@triton.jit
def put_code(codes, code, there):
    if codes.dtype.element_ty == tl.float64:
        tl.store(codes, code.to(tl.int64).to(tl.float64, bitcast=True), mask=there)
    else:
        tl.store(codes, code.to(tl.float32, bitcast=True), mask=there)


@triton.jit
def middle(x, live):
    """The median of the live values, and half the distance between their 10th and 90th percentile."""
    i = tl.arange(0, SAMPLE)
    x = tl.where(live, x, float("inf"))
    before = (x[None, :] < x[:, None]) | ((x[None, :] == x[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    count = tl.sum(live.to(tl.int32), 0)
    x = tl.where(live, x, 0.0)
    low, high = tl.sum(tl.where(rank == count // 10, x, 0.0), 0), tl.sum(tl.where(rank == count - 1 - count // 10, x, 0.0), 0)
    return tl.sum(tl.where(rank == count // 2, x, 0.0), 0), high * 0.5 - low * 0.5


@triton.jit
def cell(x, x0, scale, live, D: tl.constexpr):
    """The cell of a coordinate: evenly spaced within 1.5 widths of the centre, wider and wider outside."""
    CELLS: tl.constexpr = 1 << (24 if D == 1 else 30 // D)  # a float32 has 24 bits
    t = tl.where(live, x - x0, 0.0) * scale
    far = tl.maximum(tl.abs(t) - 1.5, 0.0)
    u = tl.minimum(tl.abs(t), 1.5) + (1.0 - 1.0 / (1.0 + far))
    u = tl.where(t < 0, 2.5 - u, 2.5 + u) * (CELLS / 5.0)
    return tl.minimum(tl.maximum(u, 0.0), CELLS - 1.0).to(tl.int32)


@triton.jit
def hilbert(u, v, w, D: tl.constexpr):
    """The Hilbert index of cell (u, v, w), by Skilling's algorithm, with the bits interleaved; uses the first D axes."""
    B: tl.constexpr = 30 // D  # bits per axis
    if D == 1:
        code = u
    else:
        for t in tl.static_range(B - 1):
            u = flipped(u, u, B - 1 - t)
            u, v = rotate(u, v, B - 1 - t)
            if D > 2:
                u, w = rotate(u, w, B - 1 - t)
        v = v ^ u
        last = v
        if D > 2:
            w = w ^ v
            last = w
        flip = tl.zeros_like(u)
        for t in tl.static_range(B - 1):
            flip = flipped(flip, last, B - 1 - t)
        u, v, w = u ^ flip, v ^ flip, w ^ flip
        code = tl.zeros_like(u)
        for t in tl.static_range(B):
            code = (code << 2) | (((u >> (B - 1 - t)) & 1) << 1) | ((v >> (B - 1 - t)) & 1)
            if D > 2:
                code = (code << 1) | ((w >> (B - 1 - t)) & 1)
    return code


@triton.jit
def flipped(u, v, BIT: tl.constexpr):
    """u with the bits below BIT inverted where v has bit BIT."""
    return tl.where(((v >> BIT) & 1) != 0, u ^ ((1 << BIT) - 1), u)


@triton.jit
def rotate(u, v, BIT: tl.constexpr):
    """Where v has bit BIT, invert the bits of u below it; elsewhere, swap them with those of v."""
    same = ((v >> BIT) & 1) == 0
    low = (u ^ v) & ((1 << BIT) - 1)
    return tl.where(same, u ^ low, u ^ ((1 << BIT) - 1)), tl.where(same, v ^ low, v)


@triton.jit(do_not_specialize=["N", "LEAVES", "BOXES", "TOPS", "NODES"])
def _leaves(
    points,  # [B, N, D]
    keys,  # [B, N], sorted
    place,  # [B, N], int64 indices of the sorted points
    order,  # [B, N], the same in int32
    ordered,  # [B, N, D]
    boxes,  # [B, NODES, 2, D]
    N,
    LEAVES,
    BOXES,
    TOPS,
    NODES,
    D: tl.constexpr,
):
    """Gather 1024 points in sorted order, and compute the boxes of their 32 leaves and the box of all."""
    b, box = (tl.program_id(0) // BOXES).to(tl.int64), tl.program_id(0) % BOXES
    leaf = box * LEAF + tl.arange(0, LEAF)
    j = (leaf[:, None] * LEAF + tl.arange(0, LEAF)[None, :]).to(tl.int64)
    i = tl.load(place + b * N + j, mask=j < N, other=0)
    i = tl.minimum(tl.maximum(i, 0), N - 1)
    x, y, z = coordinates(points + b * N * D, i, j < N, D)
    tl.store(order + b * N + j, i.to(tl.int32), mask=j < N)
    row = ordered + (b * N + j) * D
    tl.store(row, x, mask=j < N)
    if D > 1:
        tl.store(row + 1, y, mask=j < N)
    if D > 2:
        tl.store(row + 2, z, mask=j < N)
    here = finite(x, y, z)
    x0, x1 = tl.min(tl.where(here, x, float("inf")), 1), tl.max(tl.where(here, x, -float("inf")), 1)
    y0, y1 = tl.min(tl.where(here, y, float("inf")), 1), tl.max(tl.where(here, y, -float("inf")), 1)
    z0, z1 = tl.min(tl.where(here, z, float("inf")), 1), tl.max(tl.where(here, z, -float("inf")), 1)
    row = boxes + b * NODES * (2 * D)
    put_box(row + leaf.to(tl.int64) * (2 * D), x0, y0, z0, x1, y1, z1, leaf < LEAVES, D)
    starts = row + (LEAVES + BOXES + TOPS).to(tl.int64) * (2 * D) + leaf
    key = tl.load(keys + b * N + leaf.to(tl.int64) * LEAF, mask=leaf < LEAVES, other=0)
    put_code(starts, (key & 0x7FFFFFFF).to(tl.int32), leaf < LEAVES)
    row += (LEAVES + box).to(tl.int64) * (2 * D)
    put_box(row, tl.min(x0), tl.min(y0), tl.min(z0), tl.max(x1), tl.max(y1), tl.max(z1), True, D)


@triton.jit(do_not_specialize=["LEAVES", "BOXES", "TOPS", "NODES"])
def _tops(
    boxes,  # [B, NODES, 2, D]
    LEAVES,
    BOXES,
    TOPS,
    NODES,
    D: tl.constexpr,
):
    """Compute the box of 32 boxes of 32 leaves."""
    b, top = (tl.program_id(0) // TOPS).to(tl.int64), tl.program_id(0) % TOPS
    row = boxes + b * NODES * (2 * D)
    i = top * LEAF + tl.arange(0, LEAF)
    there = i < BOXES
    x0, y0, z0, x1, y1, z1 = get_box(row + LEAVES.to(tl.int64) * (2 * D), i.to(tl.int64), there, D)
    x0, x1 = tl.min(tl.where(there, x0, float("inf"))), tl.max(tl.where(there, x1, -float("inf")))
    y0, y1 = tl.min(tl.where(there, y0, float("inf"))), tl.max(tl.where(there, y1, -float("inf")))
    z0, z1 = tl.min(tl.where(there, z0, float("inf"))), tl.max(tl.where(there, z1, -float("inf")))
    put_box(row + (LEAVES + BOXES + top).to(tl.int64) * (2 * D), x0, y0, z0, x1, y1, z1, True, D)
