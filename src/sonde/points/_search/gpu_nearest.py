"""The k nearest points of each query, optionally within a radius, optionally with the weighted sum of their features: one kernel.

A program keeps the k best pairs (d², index) of each query unsorted, tracks the worst one and replaces it. At the end they are
extracted in ascending order, which is the order of the results and of the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import jit
from ...jit.launch import accumulator, cdiv, power_of_2
from .gpu_walk import (
    NONE,
    Config,
    first_bound,
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
)
from .index.gpu_kernels import LEAF


class Problem(NamedTuple):
    """What a launch computes; ``Config`` says how."""

    B: int
    M: int
    N: int
    S: int  # segments of a ragged batch
    nodes: int  # boxes per batch row; 0 to search without boxes
    D: int
    k: int
    F: int  # 0 without features
    radius: tuple[int, int]  # r², as two integers
    width: tuple[int, int]  # σ, if it is not a tensor
    limited: bool  # whether there is a radius
    coords: torch.dtype
    wide: torch.dtype
    int64: bool


def default_config(p: Problem) -> Config:
    """One warp; a thread holds up to eight of a tile's distances and a few of its best pairs."""
    return Config(8 if p.k <= 16 else 4, 1)


def candidate_configs(p: Problem) -> list[Config]:
    return list(dict.fromkeys([default_config(p), *(Config(q, w) for q in (8, 16, 4, 32) for w in (1, 2))]))


def fits(p: Problem, config: Config) -> bool:
    return config.block_q * power_of_2(p.k) <= 512 * config.num_warps


def launch(p: Problem, config: Config) -> jit.Launch:
    tiles = cdiv(p.M, config.block_q)
    block_f = min(64, power_of_2(max(1, p.F)))
    constants = (
        *(p.D, p.k, power_of_2(p.k), block_f, max(64, power_of_2(2 * p.k)), 2 if p.F else 1, p.limited),
        *(accumulator(p.wide), tl.int64 if p.int64 else tl.int32, config.block_q),
    )
    sizes = (p.M, p.N, p.S, p.F, p.nodes, tiles, *p.radius, *p.width)
    return jit.Launch((p.B * tiles, 1, 1), sizes, constants, config.num_warps, fp_fusion=False)


SIZES = ["M", "N", "S", "F", "NODES", "TILES", "R_HIGH", "R_LOW", "W_HIGH", "W_LOW"]


@triton.jit(do_not_specialize=SIZES)
def _nearest(
    queries,  # [B, M, D], sorted
    qorder,  # [B, M], their indices; None if not sorted
    points,  # [B, N, D], sorted
    order,  # [B, N], their indices; None if not sorted
    boxes,  # [B, nodes, 2, D]; None to search without boxes
    query_offsets,  # [S + 1], of a ragged batch
    point_offsets,  # [S + 1]
    features,  # [B, N, F] or None
    sigma,  # [B]; None if it is a number
    distances,  # [B, M, K]
    indices,  # [B, M, K]
    truncated,  # [B, M]; only with a radius
    out,  # [B, M, F]
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
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SEED: tl.constexpr,  # points from which the first bound is computed
    UNROLL: tl.constexpr,
    LIMITED: tl.constexpr,
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
    if LIMITED:
        limit = tl.where(live, number(R_HIGH, R_LOW).to(q[0].dtype), -1.0)
        bound = limit
    else:
        limit = tl.where(live, float("inf"), tl.zeros_like(q[0]) - 1)
        bound = limit
        if boxes is not None:
            bound = tl.minimum(limit, first_bound(points, boxes, N, NODES, q, D, K, SEED))

    slot = tl.arange(0, BLOCK_K)[:, None]
    best = tl.zeros([BLOCK_K, BLOCK_Q], q[0].dtype) + tl.where(slot < K, float("inf"), -1.0).to(q[0].dtype)
    best_i = tl.zeros([BLOCK_K, BLOCK_Q], tl.int32) + tl.where(slot < K, NONE - slot, -1)  # unique indices for free slots
    worst = tl.max(best, 0)
    worst_i = tl.max(tl.where(best == worst[None, :], best_i, -1), 0)
    count = tl.zeros([BLOCK_Q], tl.int32)

    found, walk = tl.program_id(0) * 0, start_walk()
    while found >= 0:
        found, walk = next_leaf(boxes, N, q, bound, walk, D, RAGGED)
        bits = near_points(points, found, N, q, bound, D, RAGGED)
        while bits != 0:
            j = found * LEAF + lowest(bits)
            bits = bits & (bits - 1)
            _dx, _dy, _dz, d, i = meet(points, order, j, q, D)
            here = is_near(d, limit, j, q, RAGGED)
            if LIMITED:
                count += here.to(tl.int32)
            better = here & ((d < worst) | ((d == worst) & (i < worst_i)))
            replace = (best == worst[None, :]) & (best_i == worst_i[None, :]) & better[None, :]
            best = tl.where(replace, d[None, :], best)
            best_i = tl.where(replace, i, best_i)
            worst = tl.max(best, 0)
            worst_i = tl.max(tl.where(best == worst[None, :], best_i, -1), 0)
        if not LIMITED:
            bound = tl.minimum(bound, worst)

    best = tl.where(slot < K, best, float("inf"))
    best_i = tl.where(slot < K, best_i, NONE)
    to = (b * M + row) * K
    if LIMITED:
        tl.store(truncated + b * M + row, tl.maximum(count - K, 0).to(truncated.dtype.element_ty), mask=in_q)
    if features is not None:
        rate = rate_of(sigma, b, W_HIGH, W_LOW, ACC)
        features += b * N * F
        # weights are normalised first, so that no sum exceeds the largest feature
        away = root(best).to(ACC)
        least = tl.min(away, 0)
        least = tl.where(least < float("inf"), least, 0.0)
        total = tl.sum(tl.where(best < float("inf"), tl.exp((least[None, :] - away) * rate), 0.0), 0)
        share = 1.0 / tl.where(total > 0, total, 1.0)
    for f0 in range(0, tl.maximum(F, 1), BLOCK_F):
        left = best
        acc = tl.zeros([BLOCK_F, BLOCK_Q], ACC)
        f = f0 + tl.arange(0, BLOCK_F)[:, None]
        for e in tl.range(0, K, loop_unroll_factor=UNROLL):
            d2 = tl.min(left, 0)
            i = tl.min(tl.where(left == d2[None, :], best_i, NONE), 0)
            left = tl.where(best_i == i[None, :], float("inf"), left)
            there = d2 < float("inf")
            d = root(d2)
            tl.store(distances + to + e, d, mask=in_q & (f0 == 0))
            tl.store(indices + to + e, tl.where(there, i, -1).to(tl.int64), mask=in_q & (f0 == 0))
            if features is not None:
                wide = tl.where(there, d, 0.0).to(ACC)
                w = tl.where(there, tl.exp((least - wide) * rate) * share, 0.0)
                from_ = features + i.to(OFFSET)[None, :] * F + f
                value = tl.load(from_, mask=there[None, :] & (f < F), other=0).to(ACC)
                acc = tl.fma(w[None, :].broadcast_to(acc.shape), value, acc)
        if features is not None:
            to_f = out + (b * M + row)[None, :] * F + f
            tl.store(to_f, acc.to(out.dtype.element_ty), mask=in_q[None, :] & (f < F))


nearest = jit.kernel(
    _nearest,
    "points.nearest",
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("M", "N"),
    batch=("B", "S", "nodes", "radius", "width"),
    writes=(9, 10, 11, 12),
    fits=fits,
)
