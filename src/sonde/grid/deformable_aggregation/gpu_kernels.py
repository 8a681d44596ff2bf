"""The kernels of ``deformable_aggregation``, one for the value and one for all gradients.

A program has one anchor and some of its samples; a sample is a point as one camera sees it. Most samples see nothing. The value
kernel tests a block of samples at once and then processes those that see something, a few at a time, as rows of a tile
``[samples, channels]`` within one group. The gradient kernel processes the cells of a level one by one, each with all its samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import cdiv, power_of_2
from .._device.long_sums import MANY, compensated, two_sum, zeros
from .._device.taps import corners
from .._pyramid.gpu_expected import gradients, host, portions
from .._pyramid.gpu_levels import along, fetch_location, inside, level, locate, put, scatter, shares
from .._scatter.marked_rows import mark
from .gpu_configs import (
    Problem,
    candidate_cells,
    candidate_configs,
    default_cells,
    default_config,
    fits,
    fits_cells,
    launch,
    launch_cells,
    launch_mark,
    launch_total,
)
from .gpu_parts import corners_of, over_groups, pick, products, read, slice_of, spread, take, turns, visible

SIZES = ["S", "A", "N", "SLICES", "BATCH"]


@triton.jit(do_not_specialize=SIZES)
def _aggregate(
    features,  # [B, S, C], pixels ROW apart
    shapes,  # levels, see _pyramid.gpu_levels
    starts,
    locations,  # [B, A, N, 2]
    weights,  # [B, A, N, L, G]
    out,  # [B, A, SLICES, C]
    S,
    A,
    N,
    SLICES,
    BATCH,
    CAMS: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,  # channels per group
    ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    DROP: tl.constexpr,
    TABLE: tl.constexpr,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EACH: tl.constexpr,  # tiles per group
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    LONG: tl.constexpr,  # so many samples that sums must be compensated
):
    """Accumulate TILES channel tiles over all samples that see something; accumulators stay in registers."""
    anchor = tl.program_id(0) // SLICES
    b, anchor = (anchor // A).to(tl.int64), anchor.to(tl.int64)
    begin, end = slice_of(tl.program_id(0) % SLICES, N, SLICES)
    tile = 0
    if TILES < EACH * G:
        tile = tl.program_id(1) * TILES
    image = features + b * (BATCH // VECTOR * VECTOR)
    locations += anchor * N * 2
    weights += anchor * N * (L * G)
    totals = ()
    for _ in tl.static_range(TILES):
        totals = totals + (tl.zeros([ROWS, BLOCK_C], ACC),)
    if LONG:
        lost = zeros(totals[0], TILES)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        v, u = fetch_location(locations, n, n < end, ACC)
        seen = visible(v, u, shapes, starts, n % CAMS, L, DROP, TABLE, MASK, OFFSET) & (n < end)
        rank = tl.cumsum(seen.to(tl.int32), 0)
        count = tl.max(rank, 0)
        for j in range(0, count, ROWS):
            here, sample = pick(rank, j, count, ROWS)
            sample += n0
            v1, u1 = fetch_location(locations, sample, here, ACC)
            for lev in tl.range(0, L, loop_unroll_factor=UNROLL):
                H, W, start = level(shapes, starts, sample % CAMS * L + lev, TABLE, MASK, OFFSET)
                pixel, fy, fx, k00, k01, k10, k11, live = locate(v1, u1, here, H, W, start, S, ROW, MASK, OFFSET)
                s00, s01, s10, s11 = shares(fy, fx)
                of = weights + (sample.to(OFFSET) * L + lev) * G
                sums = ()
                losses = ()
                for t in tl.static_range(TILES):
                    g, at = (tile + t) // EACH, (tile + t) % EACH * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                    in_c = (at < GROUP) & (g < G)
                    w = tl.load(of + g, mask=live & (g < G), other=0).to(ACC)
                    v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, g * GROUP + at, in_c, W, ROW, ACC)
                    if LONG:
                        more, less = two_sum(totals[t], lost[t], w * (s00 * v00 + s01 * v01 + s10 * v10 + s11 * v11))
                        sums = sums + (more,)
                        losses = losses + (less,)
                    else:
                        sums = sums + (totals[t] + w * (s00 * v00 + s01 * v01 + s10 * v10 + s11 * v11),)
                totals = sums
                if LONG:
                    lost = losses
    for t in tl.static_range(TILES):
        g, at = (tile + t) // EACH, (tile + t) % EACH * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        total = tl.sum(compensated(totals[t], lost[t]) if LONG else totals[t], 0, keep_dims=True)
        put(out + tl.program_id(0).to(tl.int64) * C + g * GROUP + at, total, (at < GROUP) & (g < G))


@triton.jit(do_not_specialize=["ANCHORS", "SLICES"])
def _total(
    parts,  # [ANCHORS, SLICES, C]
    out,  # [ANCHORS, C]
    ANCHORS,
    SLICES,
    C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LONG: tl.constexpr,
):
    a = tl.program_id(0).to(tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    there = (a < ANCHORS) & (c < C)
    total = tl.zeros([BLOCK_A, BLOCK_C], parts.dtype.element_ty)
    if LONG:
        lost = tl.zeros_like(total)
    for k in range(SLICES):
        x = tl.load(parts + (a * SLICES + k) * C + c, mask=there, other=0)
        if LONG:
            total, lost = two_sum(total, lost, x)
        else:
            total += x
    if LONG:
        total = compensated(total, lost)
    put(out + a * C + c, total, there)


@triton.jit(do_not_specialize=SIZES)
def _aggregate_gradients(
    grad,  # [B, A, C]
    features,  # [B, S, C], pixels ROW apart
    shapes,
    starts,
    locations,  # [B, A, N, 2]
    weights,  # [B, A, N, L, G]
    d_features,  # [B, S, C]; None if not needed
    d_locations,
    d_weights,
    S,
    A,
    N,
    SLICES,
    BATCH,
    CAMS: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,  # channels per group
    ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    DROP: tl.constexpr,
    TABLE: tl.constexpr,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    TURNS: tl.constexpr,  # programs run camera by camera; otherwise part by part
    POINTS: tl.constexpr,  # processed together
    SPAN: tl.constexpr,  # groups per tile
    PADDED: tl.constexpr,  # channels per group, rounded up to a power of two
    VEC: tl.constexpr,  # adjacent channels per thread
):
    """All gradients in one pass over the cells that contain samples; zeros for samples that see nothing.

    A program has some points of an anchor as one camera sees them. If there are many programs, they run camera by camera, so that
    the features in use fit into the cache; otherwise part by part, and the last part is the smallest, so that all programs end at
    about the same time. Points in the same cell of a level are processed together: the cell's pixels are read once and multiplied
    with the gradient, every point derives its results from these products, and the pixels are added to once. Meanwhile the pixels
    of the next cell are prefetched.

    Values per point are tiles ``[points · groups]``, values per pixel are tiles ``[pieces · groups, channels of a piece]``;
    ``turns`` defines the order of their elements.
    """
    PIECES: tl.constexpr = PADDED // VEC
    READS: tl.constexpr = d_locations is not None or d_weights is not None
    LONG: tl.constexpr = READS and L * G > MANY * SPAN
    i = tl.program_id(0)
    b, slice = (i // A // SLICES).to(tl.int64), i // A % SLICES
    anchor = b * A + i % A
    if READS:
        image = features + b * (BATCH // VECTOR * VECTOR)
    if d_features is not None:
        d_image = d_features + b * S * C
    locations += anchor * N * 2
    weights += anchor * N * (L * G)
    if d_locations is not None:
        d_locations += anchor * N * 2
    if d_weights is not None:
        d_weights += anchor * N * (L * G)
    parts = SLICES // CAMS
    camera, part = (slice // parts, slice % parts) if TURNS else (slice % CAMS, slice // CAMS)
    first, last = slice_of(part, N // CAMS, parts)
    begin, end = first * CAMS, last * CAMS
    point, group = turns(tl.arange(0, POINTS * SPAN), POINTS, SPAN)
    piece, its_group = turns(tl.arange(0, PIECES * SPAN)[:, None], PIECES, SPAN)
    c = piece * VEC + tl.arange(0, VEC)[None, :]
    in_c = c < GROUP
    c += its_group * GROUP
    for n0 in range(begin + camera, end, POINTS * CAMS):
        n = n0 + point * CAMS
        v, u = fetch_location(locations, n, n < end, ACC)
        seen = visible(v, u, shapes, starts, camera, L, DROP, TABLE, MASK, OFFSET) & (n < end)
        v, u = tl.where(seen, v, -1), tl.where(seen, u, -1)  # keep NaN out of products
        g_v = tl.zeros_like(v)  # one sum per group until the end
        g_u = tl.zeros_like(v)
        if LONG:
            lost_v, lost_u = zeros(v, 2)
        levels = tl.max(seen.to(tl.int32)) * L  # 0 if no sample sees anything
        for lev in range(levels):
            H, W, start = level(shapes, starts, camera * L + lev, TABLE, MASK, OFFSET)
            y, fy, top, bottom = along(v, H, OFFSET)
            x, fx, left, right = along(u, W, OFFSET)
            live = seen & (top | bottom) & (left | right)
            for g in range(0, G, SPAN):
                at = g * GROUP + c
                go = tl.load(grad + anchor * C + at, mask=in_c, other=0).to(ACC)
                of = (n.to(OFFSET) * L + lev) * G + g + group
                w = tl.load(weights + of, mask=live, other=0).to(ACC)
                g_w = tl.zeros_like(w)
                todo, y0, x0 = take(live, point, y, x, locations, n0, H, W, CAMS, POINTS, ACC, OFFSET)
                ahead = read(image, y0, x0, at, in_c, H, W, start, S, ROW, MASK, OFFSET) if READS else ()
                for _ in range(tl.sum(live.to(tl.int32)) // SPAN):
                    if y0 > -2:  # a while loop would say the same, but Triton cannot compile one that carries this state
                        meet, pixels, cell_y, cell_x = live & (y == y0) & (x == x0), ahead, y0, x0
                        todo, y0, x0 = take(todo, point, y, x, locations, n0, H, W, CAMS, POINTS, ACC, OFFSET)
                        ahead = read(image, y0, x0, at, in_c, H, W, start, S, ROW, MASK, OFFSET) if READS else ()
                        if READS:
                            value, dx, dy, dyx = products(go, pixels, PIECES, POINTS, SPAN, ACC)
                            dy += fx * dyx
                            g_w = tl.where(meet, value + fx * dx + fy * dy, g_w)
                            if LONG:
                                g_v, lost_v = two_sum(g_v, lost_v, tl.where(meet, w * dy, 0) * H)
                                g_u, lost_u = two_sum(g_u, lost_u, tl.where(meet, w * (dx + fy * dyx), 0) * W)
                            else:
                                g_v += tl.where(meet, w * dy, 0) * H
                                g_u += tl.where(meet, w * (dx + fy * dyx), 0) * W
                        if d_features is not None:
                            f = tl.where(meet, w, 0)
                            f0, f1 = f * (1 - fy), f * fy
                            f00, f01, f10, f11 = f0 * (1 - fx), f0 * fx, f1 * (1 - fx), f1 * fx
                            f00, f01 = spread(f00, POINTS, PIECES, SPAN)[:, None], spread(f01, POINTS, PIECES, SPAN)[:, None]
                            f10, f11 = spread(f10, POINTS, PIECES, SPAN)[:, None], spread(f11, POINTS, PIECES, SPAN)[:, None]
                            pixel, k00, k01, k10, k11 = corners_of(cell_y, cell_x, H, W, start, S, ROW, MASK, OFFSET)
                            scatter(d_image + pixel * C + at, go, f00, f01, f10, f11, k00, k01, k10, k11, in_c, W, C)
                if d_weights is not None:
                    put(d_weights + of, g_w, n < end)
        if d_weights is not None:
            for k in range(0, L * G - levels * G, SPAN):
                put(d_weights + n.to(OFFSET) * (L * G) + k + group, tl.zeros_like(v), n < end)
        if LONG:
            g_v, g_u = compensated(g_v, lost_v), compensated(g_u, lost_u)
        if d_locations is not None:
            n = n0 + tl.arange(0, POINTS) * CAMS
            put(d_locations + 2 * n, over_groups(g_u, POINTS, SPAN), n < end)
            put(d_locations + 2 * n + 1, over_groups(g_v, POINTS, SPAN), n < end)


@triton.jit(do_not_specialize=["SAMPLES", "S", "EACH"])
def _mark(
    shapes,
    starts,
    locations,  # [SAMPLES, 2]
    marks,  # [B, S]
    SAMPLES,
    S,
    EACH,  # samples of an image
    CAMS: tl.constexpr,
    L: tl.constexpr,
    ROW: tl.constexpr,
    DROP: tl.constexpr,
    TABLE: tl.constexpr,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the rows that the gradients' kernel will add to."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v, u = fetch_location(locations, i, i < SAMPLES, ACC)
    seen = inside(v, u) if DROP else i < SAMPLES
    camera, image = (i % CAMS).to(tl.int32), marks + i // EACH * S
    for lev in range(L):
        H, W, start = level(shapes, starts, camera * L + lev, TABLE, MASK, OFFSET)
        pixel, _fy, _fx, k00, k01, k10, k11, _live = locate(v, u, seen, H, W, start, S, ROW, MASK, OFFSET)
        mark(image + pixel, k00, k01, k10, k11, W)


def _portions(p: Problem) -> list[slice]:
    return portions(p.A, p.B * p.N * p.L * p.C)


def expected(p: Problem, features: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, out: Tensor):
    from .reference import deformable_aggregation

    levels, wide = host(p.table, shapes, starts), features.to(p.wide)
    slice_of_sample = (torch.arange(p.N, device=out.device) // max(1, cdiv(p.N, p.slices))).view(-1, p.cams, 1, 1)
    found = torch.empty(p.B, p.A, p.slices, p.C, dtype=p.wide, device=out.device)
    for k in range(p.slices):
        some = torch.where(slice_of_sample == k, weights, 0)
        for a in _portions(p):
            found[:, a, k] = deformable_aggregation(wide, None, None, locations[:, a], some[:, a], levels, p.drop)
    return {5: found.view(out.shape)}


def expected_gradients(
    p: Problem, grad: Tensor, features, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, *results
):
    from .reference import deformable_aggregation

    if features is None:
        features = torch.zeros(p.B, p.S, p.C, device=grad.device)
    levels = host(p.table, shapes, starts)
    return gradients(
        deformable_aggregation, levels, p.drop, _portions(p), grad, features, locations, weights, results, p.wide
    )  # fmt: skip


aggregate = jit.kernel(
    _aggregate,
    "grid.deformable_aggregation",
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("S", "A", "N"),
    batch=("B", "batch"),
    writes=(5,),
    fits=fits,
    expected=expected,
)
aggregate_gradients = jit.kernel(
    _aggregate_gradients,
    "grid.deformable_aggregation_gradients",
    default=default_cells,
    candidates=candidate_cells,
    launch=launch_cells,
    sizes=("S", "A", "N"),
    batch=("B", "batch"),
    writes=(6, 7, 8),
    adds=(6,),
    fits=fits_cells,
    expected=expected_gradients,
)
total = jit.kernel(_total, "grid.total", default=lambda p: min(256, power_of_2(p.C)), launch=launch_total)
mark_rows = jit.kernel(_mark, "grid.deformable_aggregation_marks", default=lambda p: 128, launch=launch_mark)
