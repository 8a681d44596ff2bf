"""The kernels of ``deformable_aggregation``, one for the value and one for all gradients.

A program has one anchor and a slice of its samples, a sample being a point as one camera has it. Most see nothing: a block of
samples is looked at together, and those that do see something take their turns a few at a time, as rows of a tile
``[samples, channels]``. A tile of channels lies in one group, or has several groups whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...op.gpu import cdiv, power_of_2
from .._gpu_pyramid import fetch, inside, level, locate, put, scatter, sees, shares
from .._gpu_pyramid_expected import gradients, host, portions
from .._gpu_taps import corners, interpolate
from .gpu_configs import Problem, candidate_configs, default_config, fits, launch, launch_total

SIZES = ["S", "A", "N", "SLICES", "BATCH"]


@triton.jit(do_not_specialize=SIZES)
def _aggregate(
    features,  # [B, S, C], pixels ROW apart
    shapes,  # levels, as _gpu_pyramid has them
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
    GROUP: tl.constexpr,  # channels of a group
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
    EACH: tl.constexpr,  # tiles of a group
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    SPAN: tl.constexpr,  # groups of a tile
):
    """Some tiles of channels, all samples that see something in turn; a thread's sums stay in it until the end."""
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
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = visible(locations, shapes, starts, n, n < end, CAMS, L, DROP, TABLE, MASK, ACC, OFFSET)
        rank = tl.cumsum(seen.to(tl.int32), 0)
        count = tl.max(rank, 0)
        for j in range(0, count, ROWS):
            here, sample = pick(rank, j, count, ROWS)
            sample += n0
            v, u = fetch(locations, sample, here, ACC)
            for lev in tl.range(0, L, loop_unroll_factor=UNROLL):
                H, W, start = level(shapes, starts, sample % CAMS * L + lev, TABLE, MASK, OFFSET)
                pixel, fy, fx, k00, k01, k10, k11, live = locate(v, u, here, H, W, start, S, MASK, OFFSET)
                s00, s01, s10, s11 = shares(fy, fx)
                of = weights + (sample.to(OFFSET) * L + lev) * G
                sums = ()
                for t in tl.static_range(TILES):
                    g, at = (tile + t) // EACH, (tile + t) % EACH * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                    in_c = (at < GROUP) & (g < G)
                    w = tl.load(of + g, mask=live & (g < G), other=0).to(ACC)
                    v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, g * GROUP + at, in_c, W, ROW, ACC)
                    sums = sums + (totals[t] + w * (s00 * v00 + s01 * v01 + s10 * v10 + s11 * v11),)
                totals = sums
    for t in tl.static_range(TILES):
        g, at = (tile + t) // EACH, (tile + t) % EACH * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        total = tl.sum(totals[t], 0, keep_dims=True)
        put(out + tl.program_id(0).to(tl.int64) * C + g * GROUP + at, total, (at < GROUP) & (g < G))


@triton.jit
def slice_of(i, N, SLICES):
    """The samples of slice `i`, all but the last of one size."""
    size = tl.cdiv(N, SLICES)
    return i * size, tl.minimum((i + 1) * size, N)


@triton.jit
def visible(
    locations, shapes, starts, n, in_n, CAMS: tl.constexpr, L: tl.constexpr, DROP: tl.constexpr, TABLE: tl.constexpr,
    MASK: tl.constexpr, ACC: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Which samples see anything."""
    v, u = fetch(locations, n, in_n, ACC)
    if DROP:
        found = inside(v, u)
    else:
        found = n < 0
        for lev in range(L):
            H, W, _start = level(shapes, starts, n % CAMS * L + lev, TABLE, MASK, OFFSET)
            found = found | sees(v, u, H, W, OFFSET)
    return found & in_n


@triton.jit
def pick(rank, j, count, ROWS: tl.constexpr):
    """The samples whose ranks follow `j`: as many samples come before the one of rank r + 1 as have a rank of r at most."""
    slot = j + tl.arange(0, ROWS)[:, None]
    here = slot < count
    return here, tl.where(here, tl.sum((rank[None, :] <= slot).to(tl.int32), 1, keep_dims=True), 0)


@triton.jit(do_not_specialize=["ANCHORS", "SLICES"])
def _total(
    parts,  # [ANCHORS, SLICES, C]
    out,  # [ANCHORS, C]
    ANCHORS,
    SLICES,
    C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    a = tl.program_id(0).to(tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    there = (a < ANCHORS) & (c < C)
    total = tl.zeros([BLOCK_A, BLOCK_C], parts.dtype.element_ty)
    for k in range(SLICES):
        total += tl.load(parts + (a * SLICES + k) * C + c, mask=there, other=0)
    put(out + a * C + c, total, there)


@triton.jit(do_not_specialize=SIZES)
def _aggregate_gradients(
    grad,  # [B, A, C]
    features,  # [B, S, C], pixels ROW apart
    shapes,
    starts,
    locations,  # [B, A, N, 2]
    weights,  # [B, A, N, L, G]
    d_features,  # [B, S, C]; None where nobody asked
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
    GROUP: tl.constexpr,  # channels of a group
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
    EACH: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    SPAN: tl.constexpr,  # groups of a tile
):
    """All gradients in one pass over the samples that see something, for each all channels; zeros for the others.

    A slice has every SLICES-th sample, and slices take turns. Cameras are neighbours among samples: if there are as many slices, or
    a multiple, all programs look at one camera at a time, and that fits into the cache.
    """
    READS: tl.constexpr = d_locations is not None or d_weights is not None
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
    c = tl.arange(0, BLOCK_C)[None, :]
    for n0 in range(slice, N, BLOCK_N * SLICES):
        n = n0 + tl.arange(0, BLOCK_N) * SLICES
        seen = visible(locations, shapes, starts, n, n < N, CAMS, L, DROP, TABLE, MASK, ACC, OFFSET)
        unseen = (n < N) & (seen == 0)
        if d_locations is not None:
            clear(d_locations, n, unseen, 2, BLOCK_N)
        if d_weights is not None:
            clear(d_weights, n, unseen, L * G, BLOCK_N)
        rank = tl.cumsum(seen.to(tl.int32), 0)
        some = tl.max(rank, 0)
        for j in range(0, some, ROWS):
            here, sample = pick(rank, j, some, ROWS)
            sample = n0 + sample * SLICES
            v, u = fetch(locations, sample, here, ACC)
            g_v = tl.zeros([ROWS, BLOCK_C], ACC)  # sums over channels stay apart by channel of the tile until the end
            g_u = tl.zeros([ROWS, BLOCK_C], ACC)
            for lev in tl.range(0, L, loop_unroll_factor=UNROLL):
                H, W, start = level(shapes, starts, sample % CAMS * L + lev, TABLE, MASK, OFFSET)
                pixel, fy, fx, k00, k01, k10, k11, live = locate(v, u, here, H, W, start, S, MASK, OFFSET)
                s00, s01, s10, s11 = shares(fy, fx)
                of = (sample.to(OFFSET) * L + lev) * G
                g_y = tl.zeros([ROWS, BLOCK_C], ACC)
                g_x = tl.zeros([ROWS, BLOCK_C], ACC)
                for g in tl.range(0, G, SPAN, loop_unroll_factor=TILES):
                    if SPAN == 1:
                        w = tl.load(weights + of + g, mask=live, other=0).to(ACC)
                    else:
                        w = tl.load(weights + of + g + c // GROUP, mask=live, other=0).to(ACC)
                    product = tl.zeros([ROWS, BLOCK_C], ACC)
                    for c0 in range(0, SPAN * GROUP, BLOCK_C):
                        at, in_c = g * GROUP + c0 + c, c0 + c < SPAN * GROUP
                        go = tl.load(grad + anchor * C + at + tl.zeros([ROWS, 1], tl.int32), mask=here & in_c, other=0).to(ACC)
                        a = w * go
                        if READS:
                            v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, at, in_c, W, ROW, ACC)
                            s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
                            product += go * s
                            g_y += a * dy
                            g_x += a * dx
                        if d_features is not None:
                            p = d_image + pixel * C + at
                            scatter(p, a, s00, s01, s10, s11, k00, k01, k10, k11, in_c, W, C)
                    if d_weights is not None:
                        if SPAN == 1:
                            total = tl.sum(product, 1, keep_dims=True)
                        else:
                            total = tl.sum(tl.reshape(product, [ROWS, SPAN, GROUP]), 2)
                        put(d_weights + of + g + tl.arange(0, SPAN)[None, :], tl.where(live, total, 0), here)
                if d_locations is not None:
                    g_v += tl.where(live, g_y * H, 0)
                    g_u += tl.where(live, g_x * W, 0)
            if d_locations is not None:
                put(d_locations + 2 * sample, tl.sum(g_u, 1, keep_dims=True), here)
                put(d_locations + 2 * sample + 1, tl.sum(g_v, 1, keep_dims=True), here)


@triton.jit
def clear(p, n, there, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros in the rows `n` that are `there`."""
    BLOCK: tl.constexpr = 8 if WIDTH > 2 else 2
    for k0 in range(0, WIDTH, BLOCK):
        k = k0 + tl.arange(0, BLOCK)[None, :]
        put(p + n[:, None] * WIDTH + k, tl.zeros([BLOCK_N, BLOCK], tl.float32), there[:, None] & (k < WIDTH))


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
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("S", "A", "N"),
    batch=("B", "batch"),
    writes=(6, 7, 8),
    adds=(6,),
    fits=fits,
    expected=expected_gradients,
)
total = jit.kernel(_total, "grid.total", default=lambda p: min(256, power_of_2(p.C)), launch=launch_total)
