"""Softmax over all points within a radius: forward, and gradients by rows and by columns, without atomics.

A program has a tile of rows and processes candidates one at a time in the order of the walk, so sums have a fixed order. Rows are
queries and candidates points in the forward pass and for the gradients of queries; for those of points and features they swap.

Within a leaf the sum is plain; the sums of leaves are added with compensation, which is accurate for any number of terms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import jit
from ...jit.launch import accumulator, cdiv
from .gpu_walk import (
    Config,
    add_term,
    block_of,
    is_near,
    lowest,
    meet,
    near_points,
    next_leaf,
    number,
    query_tile,
    rate_of,
    root,
    start_walk,
    with_lost,
)  # fmt: skip
from .index.gpu_kernels import LEAF

LEAP = tl.constexpr(4.0)  # how many σ closer than the reference distance a point must be to replace it
UNIT = tl.constexpr(2.0**-6)  # weights of features are scaled by a power of it: they sum to less than 1, so nothing overflows


class Problem(NamedTuple):
    """What a launch computes, for M rows and N candidates; ``Config`` says how."""

    B: int
    M: int
    N: int
    S: int  # segments of a ragged batch
    nodes: int  # boxes of candidates per batch row; 0 to search without boxes
    D: int
    F: int
    radius: tuple[int, int]  # r², as two integers
    width: tuple[int, int]  # σ, if it is not a tensor
    coords: torch.dtype
    wide: torch.dtype
    int64: bool
    columns: bool = False  # rows are points, candidates queries
    coordinates: bool = False  # compute gradients of coordinates
    features: bool = False  # compute gradients of features


def default_config(p: Problem) -> Config:
    """One warp; a thread holds a few of a tile's distances and a few of its features."""
    if p.coordinates or p.features or p.wide == torch.float64:
        return Config(2, 1)
    rows = 4 if p.S else 8  # ragged batches need a few more registers
    return Config(rows * 64 // max(64, block_of(p.F)), 1)


def candidate_configs(p: Problem) -> list[Config]:
    return list(dict.fromkeys([default_config(p), *(Config(q, w) for q in (8, 4, 2, 16) for w in (1, 2))]))


def fits(p: Problem, config: Config) -> bool:
    return config.block_q * block_of(p.F) * p.wide.itemsize <= 8192 * config.num_warps


def launch(p: Problem, config: Config) -> jit.Launch:
    tiles, block_f = cdiv(p.M, config.block_q), block_of(p.F)
    sizes = (p.M, p.N, p.S, p.F, p.nodes, tiles, *p.radius, *p.width)
    constants = (p.D, block_f, accumulator(p.wide), tl.int64 if p.int64 else tl.int32, config.block_q)
    return jit.Launch((p.B * tiles, max(1, cdiv(p.F, block_f)), 1), sizes, constants, config.num_warps, fp_fusion=False)


def launch_gradients(p: Problem, config: Config) -> jit.Launch:
    forward = launch(p, config)
    constants = (*forward.constants, block_of(p.F) >= p.F, p.columns, p.coordinates, p.features)
    return forward._replace(grid=(forward.grid[0], forward.grid[1] if p.features else 1, 1), constants=constants)


SIZES = ["M", "N", "S", "F", "NODES", "TILES", "R_HIGH", "R_LOW", "W_HIGH", "W_LOW"]


@triton.jit(do_not_specialize=SIZES)
def _ball(
    queries,  # [B, M, D], sorted
    qorder,  # [B, M], their indices; None if not sorted
    points,  # [B, N, D], sorted
    order,  # [B, N], their indices; None if not sorted
    boxes,  # [B, NODES, 2, D]; None to search without boxes
    query_offsets,  # [S + 1], of a ragged batch
    point_offsets,  # [S + 1]
    features,  # [B, N, F]
    sigma,  # [B]; None if it is a number
    out,  # [B, M, F]
    levels,  # [B, M, 2]: a distance n, at most a few σ above the smallest, and 1/Σ exp((n − d)/σ); 0 and 0 for an empty ball
    M,
    N,
    S,
    F,
    NODES,
    TILES,
    R_HIGH,
    R_LOW,
    W_HIGH,
    W_LOW,
    D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    RAGGED: tl.constexpr = query_offsets is not None
    b, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    row, in_q, live, q = query_tile(queries, qorder, b, M, query_offsets, point_offsets, N, S, tile, D, BLOCK_Q)
    points += b * N * D
    if boxes is not None:
        boxes += b * NODES * (2 * D)
    if order is not None:
        order += b * N
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    features += b * N * F + f
    rate = rate_of(sigma, b, W_HIGH, W_LOW, ACC)
    bound = tl.where(live, number(R_HIGH, R_LOW).to(q[0].dtype), -1.0)

    none = tl.zeros([BLOCK_Q], ACC)
    one = none + float("inf")  # reference distance, with weight 1: follows the smallest in leaps, so sums are rarely rescaled
    unit = none + UNIT
    total, total_lost = none, none
    acc = tl.zeros([BLOCK_F, BLOCK_Q], ACC)
    lost = acc
    found, walk = tl.program_id(0) * 0, start_walk()
    while found >= 0:
        found, walk = next_leaf(boxes, N, q, bound, walk, D, RAGGED)
        bits = near_points(points, found, N, q, bound, D, RAGGED)
        if bits != 0:
            part = tl.zeros([BLOCK_F, BLOCK_Q], ACC)
            while bits != 0:
                j = found * LEAF + lowest(bits)
                bits = bits & (bits - 1)
                _dx, _dy, _dz, d2, i = meet(points, order, j, q, D)
                value = tl.load(features + i.to(OFFSET) * F, mask=f < F, other=0).to(ACC)
                here = is_near(d2, bound, j, q, RAGGED)
                d = root(d2).to(ACC)
                one = tl.where(here & (one == float("inf")), d, one)
                rise = (one - d) * rate
                w = tl.where(here, tl.exp(rise), 0.0)
                leap = here & (rise > LEAP)
                if tl.max((leap | ((total + w) * unit > 0.5)).to(tl.int32), 0) != 0:
                    less = tl.where(leap, tl.exp(-rise), 1.0)
                    one, w = tl.where(leap, d, one), tl.where(leap, 1.0, w)
                    total, total_lost = total * less, total_lost * less
                    less, unit = less / unit, none + UNIT
                    for _ in tl.static_range(6):
                        unit = tl.where((total + w) * unit > 0.5, unit * UNIT, unit)
                    less *= unit
                    acc, lost, part = acc * less[None, :], lost * less[None, :], part * less[None, :]
                total, total_lost = add_term(total, total_lost, w)
                w = w * unit
                added = tl.fma(w[None, :].broadcast_to(part.shape), value[:, None].broadcast_to(part.shape), part)
                part = tl.where(here[None, :], added, part)
            acc, lost = add_term(acc, lost, part)

    total = total + total_lost
    some = total > 0
    acc = with_lost(acc, lost) / tl.where(some, total * unit, 1.0)[None, :]
    to = out + (b * M + row)[None, :] * F + f[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_q[None, :] & (f < F)[:, None])
    once = in_q & (tl.program_id(1) == 0)
    tl.store(levels + 2 * (b * M + row), tl.where(some, one, 0.0), mask=once)
    tl.store(levels + 2 * (b * M + row) + 1, tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0), mask=once)


@triton.jit(do_not_specialize=SIZES)
def _ball_gradients(
    queries,  # [B, M, D], rows: queries, or points if COLUMNS
    qorder,  # [B, M]
    points,  # [B, N, D], candidates: points, or queries if COLUMNS
    order,  # [B, N]
    boxes,  # [B, NODES, 2, D]
    query_offsets,  # [S + 1]
    point_offsets,  # [S + 1]
    values,  # [B, M, F], of rows: ∂L/∂out, or features if COLUMNS
    others,  # [B, N, F], of candidates: features, or ∂L/∂out if COLUMNS
    sigma,  # [B]
    levels,  # [.., 2], of queries
    delta,  # [..], Δ of queries; written for rows, read for columns
    d_rows,  # [B, M, D], gradient of the rows' coordinates
    d_sigma,  # [B, M]
    d_values,  # [B, M, F], gradient of the features
    M,
    N,
    S,
    F,
    NODES,
    TILES,
    R_HIGH,
    R_LOW,
    W_HIGH,
    W_LOW,
    D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WHOLE: tl.constexpr,  # one block has all features
    COLUMNS: tl.constexpr,
    COORDINATES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    RAGGED: tl.constexpr = query_offsets is not None
    b, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    row, in_q, live, q = query_tile(queries, qorder, b, M, query_offsets, point_offsets, N, S, tile, D, BLOCK_Q)
    points += b * N * D
    if boxes is not None:
        boxes += b * NODES * (2 * D)
    if order is not None:
        order += b * N
    f = tl.arange(0, BLOCK_F)
    if FEATURES:
        f += tl.program_id(1) * BLOCK_F
    others += b * N * F
    mine = values + (b * M + row)[None, :] * F
    rate = rate_of(sigma, b, W_HIGH, W_LOW, ACC)
    bound = tl.where(live, number(R_HIGH, R_LOW).to(q[0].dtype), -1.0)
    if COLUMNS:
        levels += 2 * b * N
        delta += b * N
    else:
        near = tl.load(levels + 2 * (b * M + row), mask=in_q, other=0)
    if COORDINATES and WHOLE:
        value = tl.load(mine + f[:, None], mask=in_q[None, :] & (f < F)[:, None], other=0).to(ACC)

    none = tl.zeros([BLOCK_Q], ACC)
    # Σ w (a − p) u and Σ w (a − p) (n − d), where u = (x − y)/d. Columns know Δ, and p is Δ; rows compute it on the way and take a
    # relative to an estimate p
    gx, gy, gz, moment = none, none, none, none
    lost_x, lost_y, lost_z, lost_m = none, none, none, none
    # for rows: Σ w, Σ w (a − p), Σ w u, Σ w (n − d), and the value of Σ w when p was chosen
    weight, along, ux0, uy0, uz0, gap0 = none, none, none, none, none, none
    lost_w, lost_a, lost_ux, lost_uy, lost_uz, lost_g = none, none, none, none, none, none
    p, chosen = none, none
    acc = tl.zeros([BLOCK_F, BLOCK_Q], ACC)
    lost = acc
    found, walk = tl.program_id(0) * 0, start_walk()
    while found >= 0:
        found, walk = next_leaf(boxes, N, q, bound, walk, D, RAGGED)
        bits = near_points(points, found, N, q, bound, D, RAGGED)
        if bits != 0:
            pw, pa, pux, puy, puz, pg, pm = none, none, none, none, none, none, none  # sums over this leaf
            part = tl.zeros([BLOCK_F, BLOCK_Q], ACC)
            while bits != 0:
                j = found * LEAF + lowest(bits)
                bits = bits & (bits - 1)
                dx, dy, dz, d2, i = meet(points, order, j, q, D)
                here = is_near(d2, bound, j, q, RAGGED)
                theirs = others + i.to(OFFSET) * F
                if COLUMNS:
                    at = levels + 2 * i.to(tl.int64)
                    near, share = tl.load(at), tl.load(at + 1)
                if FEATURES or WHOLE:
                    other = tl.load(theirs + f, mask=f < F, other=0).to(ACC)
                d = root(tl.where(here, d2, 0.0)).to(ACC)
                gap = tl.where(here, near - d, 0.0)
                w = tl.where(here, tl.exp(gap * rate), 0.0)
                if COLUMNS:
                    w = w * share
                if FEATURES:
                    added = tl.fma(w[None, :].broadcast_to(acc.shape), other[:, None].broadcast_to(acc.shape), part)
                    part = tl.where(here[None, :], added, part)
                if COORDINATES:
                    if WHOLE:
                        a = tl.sum(value * other[:, None], 0)
                    else:
                        a, lost_f = tl.zeros([BLOCK_Q], ACC), tl.zeros([BLOCK_Q], ACC)
                        for f0 in range(0, F, BLOCK_F):
                            c = f0 + tl.arange(0, BLOCK_F)
                            row_f = tl.load(theirs + c, mask=c < F, other=0).to(ACC)
                            mine_f = tl.load(mine + c[:, None], mask=in_q[None, :] & (c < F)[:, None], other=0).to(ACC)
                            a, lost_f = add_term(a, lost_f, tl.sum(mine_f * row_f[:, None], 0))
                        a = with_lost(a, lost_f)
                    apart = here & (d > 0)
                    over = w / tl.where(apart, d, 1.0)
                    ux = tl.where(apart, over * dx.to(ACC), 0.0)
                    uy = tl.where(apart, over * dy.to(ACC), 0.0)
                    uz = tl.where(apart, over * dz.to(ACC), 0.0)
                    if COLUMNS:
                        mean = tl.load(delta + i)
                        a = tl.where(here, tl.where(w < 1, a - mean, 0.0 * mean), 0.0)  # if w = 1, a is Δ: exactly 0, or NaN
                    else:
                        p = tl.where(here & (weight == 0) & (pw == 0), a, p)  # the first neighbour: nothing was summed yet
                        a = tl.where(here, a - p, 0.0)
                        pw += w
                        pa += w * a
                        pux, puy, puz = pux + ux, puy + uy, puz + uz
                        if d_sigma is not None:
                            pg += w * gap
                            pm += a * (w * gap)
                    gx, lost_x = add_term(gx, lost_x, a * ux)  # no plain sum per leaf: it would cost registers
                    gy, lost_y = add_term(gy, lost_y, a * uy)
                    gz, lost_z = add_term(gz, lost_z, a * uz)
            if FEATURES:
                acc, lost = add_term(acc, lost, part)
            if COORDINATES and not COLUMNS:
                weight, lost_w = add_term(weight, lost_w, pw)
                along, lost_a = add_term(along, lost_a, pa)
                ux0, lost_ux = add_term(ux0, lost_ux, pux)
                uy0, lost_uy = add_term(uy0, lost_uy, puy)
                uz0, lost_uz = add_term(uz0, lost_uz, puz)
                if d_sigma is not None:
                    gap0, lost_g = add_term(gap0, lost_g, pg)
                    moment, lost_m = add_term(moment, lost_m, pm)
                # whenever the sum of weights has doubled, p becomes the current mean, which limits cancellation
                due = weight > 2 * chosen
                if tl.max(due.to(tl.int32), 0) != 0:
                    chosen = tl.where(due, weight, chosen)
                    mean = tl.where(due, p + (along + lost_a) / tl.where(due, weight, 1.0), p)
                    gx, lost_x = add_term(gx, lost_x, (p - mean) * ux0)
                    gy, lost_y = add_term(gy, lost_y, (p - mean) * uy0)
                    gz, lost_z = add_term(gz, lost_z, (p - mean) * uz0)
                    along, lost_a = add_term(along, lost_a, (p - mean) * weight)
                    if d_sigma is not None:
                        moment, lost_m = add_term(moment, lost_m, (p - mean) * gap0)
                    p = mean

    if COORDINATES:
        gx, gy, gz = gx + lost_x, gy + lost_y, gz + lost_z
        if not COLUMNS:
            weight = weight + lost_w
            over = 1.0 / tl.where(weight > 0, weight, 1.0)
            mean = (along + lost_a) * over
            gx = (gx - mean * (ux0 + lost_ux)) * over
            gy = (gy - mean * (uy0 + lost_uy)) * over
            gz = (gz - mean * (uz0 + lost_uz)) * over
            if delta is not None:
                tl.store(delta + b * M + row, p + mean, mask=in_q)
        if d_sigma is not None:
            moment = (moment + lost_m - mean * (gap0 + lost_g)) * over
            tl.store(d_sigma + b * M + row, -(moment * rate) * rate, mask=in_q)
        if d_rows is not None:
            to = d_rows + (b * M + row) * D
            tl.store(to, (-rate * gx).to(d_rows.dtype.element_ty), mask=in_q)
            if D > 1:
                tl.store(to + 1, (-rate * gy).to(d_rows.dtype.element_ty), mask=in_q)
            if D > 2:
                tl.store(to + 2, (-rate * gz).to(d_rows.dtype.element_ty), mask=in_q)
    if FEATURES:
        to = d_values + (b * M + row)[None, :] * F + f[:, None]
        tl.store(to, with_lost(acc, lost).to(d_values.dtype.element_ty), mask=in_q[None, :] & (f < F)[:, None])


ball = jit.kernel(
    _ball, "points.ball", default=default_config, candidates=candidate_configs, launch=launch, sizes=("M", "N"),
    batch=("B", "S", "nodes", "radius", "width"), writes=(9, 10), fits=fits,
)  # fmt: skip
ball_gradients = jit.kernel(
    _ball_gradients, "points.ball_gradients", default=default_config, candidates=candidate_configs, launch=launch_gradients,
    sizes=("M", "N"), batch=("B", "S", "nodes", "radius", "width"), writes=(11, 12, 13, 14), fits=fits,
)  # fmt: skip
