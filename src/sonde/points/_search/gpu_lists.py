"""All points within a radius, as lists of any length: one launch counts them, a second writes them in the order of the walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import jit
from ...jit.launch import cdiv, number
from .gpu_walk import Config, is_near, lowest, meet, near_points, next_leaf, query_tile, start_walk
from .index.gpu_kernels import LEAF


class Problem(NamedTuple):
    """What a launch computes; ``Config`` says how."""

    B: int
    M: int
    N: int
    S: int  # segments of a ragged batch
    nodes: int  # boxes per batch row; 0 to search without boxes
    D: int
    radius: tuple[int, int]  # r², as two integers
    coords: torch.dtype
    writes: bool  # False: only count


def default_config(p: Problem) -> Config:
    return Config(8 if p.coords == torch.float32 else 4, 1)


def candidate_configs(p: Problem) -> list[Config]:
    return list(dict.fromkeys([default_config(p), *(Config(q, 1) for q in (8, 16, 4, 32))]))


def launch(p: Problem, config: Config) -> jit.Launch:
    tiles = cdiv(p.M, config.block_q)
    sizes, constants = (p.M, p.N, p.S, p.nodes, tiles, *p.radius), (p.D, p.writes, config.block_q)
    return jit.Launch((p.B * tiles, 1, 1), sizes, constants, config.num_warps, fp_fusion=False)


@triton.jit(do_not_specialize=["M", "N", "S", "NODES", "TILES", "R_HIGH", "R_LOW"])
def _list(
    queries,  # [B, M, D], sorted
    qorder,  # [B, M], their indices; None if not sorted
    points,  # [B, N, D], sorted
    order,  # [B, N], their indices; None if not sorted
    boxes,  # [B, NODES, 2, D]; None to search without boxes
    query_offsets,  # [S + 1], of a ragged batch
    point_offsets,  # [S + 1]
    offsets,  # [B · M + 1], of the lists; when counting, counts are written from the second element on
    squares,  # [total], d²
    indices,  # [total]
    rows,  # [total], the query's row
    M,
    N,
    S,
    NODES,
    TILES,
    R_HIGH,
    R_LOW,
    D: tl.constexpr,
    WRITES: tl.constexpr,
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
    bound = tl.where(live, number(R_HIGH, R_LOW).to(q[0].dtype), -1.0)
    at = tl.zeros([BLOCK_Q], tl.int64)
    if WRITES:
        at = tl.load(offsets + b * M + row, mask=in_q, other=0)

    found, walk = tl.program_id(0) * 0, start_walk()
    while found >= 0:
        found, walk = next_leaf(boxes, N, q, bound, walk, D, RAGGED)
        bits = near_points(points, found, N, q, bound, D, RAGGED)
        while bits != 0:
            j = found * LEAF + lowest(bits)
            bits = bits & (bits - 1)
            _dx, _dy, _dz, d2, i = meet(points, order, j, q, D)
            here = is_near(d2, bound, j, q, RAGGED)
            if WRITES:
                tl.store(squares + at, d2, mask=here)
                tl.store(indices + at, tl.zeros_like(at) + i, mask=here)
                tl.store(rows + at, b * M + row, mask=here)
            at += here.to(tl.int64)
    if not WRITES:
        tl.store(offsets + b * M + row + 1, at, mask=in_q)


lists = jit.kernel(
    _list, "points.list", default=default_config, candidates=candidate_configs, launch=launch, sizes=("M", "N"),
    batch=("B", "S", "nodes", "radius"), writes=(7, 8, 9, 10),
)  # fmt: skip
