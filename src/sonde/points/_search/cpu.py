"""Searches on CPUs, and what a gradient of distances gives to queries and points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, jit, run
from ...op.plan import Determinism, Kernel
from . import cpu_tree as trees
from .cpu_segments import Lists, gather, lists, sums
from .index.cpu import forward as build

Opt = Tensor | None


def tree_of(points: Tensor, order: Opt, ordered: Opt, boxes: Opt, offsets: Opt) -> trees.Tree:
    """The tree of an index; of few points it is made here."""
    made = build(points, offsets) if order is None or ordered is None or boxes is None else (order, ordered, boxes)
    return trees.tree(*made, offsets)


def ball(radius: float, dtype: torch.dtype) -> float:
    """r², rounded once; no distance is infinite."""
    return min(float(torch.tensor(radius * radius, dtype=dtype, device="cpu")), torch.finfo(dtype).max)


def scalars(dtype: torch.dtype, *numbers: float) -> list:
    """Numbers of the kernels' own dtype, which would else be float64."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    return [kind(x) for x in numbers]


def search(args: Sequence, k: int, radius: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The k nearest (within `radius`): distances, indices, and how many were cut."""
    queries, points, order, ordered, boxes, _, _, _, query_offsets, point_offsets = args
    (B, M, _), N = queries.shape, points.shape[1]
    tree = tree_of(points, order, ordered, boxes, point_offsets)
    distances = queries.new_empty(B, M, k)
    indices = queries.new_empty(B, M, k, dtype=torch.int64)
    truncated = queries.new_empty(B, M if radius is not None else 0, dtype=torch.int64)
    (bound,) = scalars(queries.dtype, torch.finfo(queries.dtype).max if radius is None else ball(radius, queries.dtype))
    rows, mine = array(trees.three(queries)), trees.segment_of(query_offsets, M)
    results = array(distances.view(-1, k)), array(indices.view(-1, k)), array(truncated.view(-1))
    run(neighbours, B * M, M, N, k, bound, rows, trees.spatial_order(rows, B), mine, *tree[:4], tree.nodes, *results, grain=64)
    return distances, indices, truncated


def search_kernels(args: Sequence, k: int, needs: Sequence[bool], extra: int = 0) -> list[Kernel]:
    """What `search` and `distance_gradients` launch and allocate."""
    queries, points = args[:2]
    (B, M, D), N, size = queries.shape, points.shape[1], queries.dtype.itemsize
    small = index_bytes(points) if args[2] is None else 0
    padded = (D < 3) * 3 * B * (M + 2 * N) * size
    kinds = queries.dtype, Determinism.BATCH_INVARIANT
    made = [Kernel(neighbours.__name__, ("out",), *kinds, small + padded)]
    used = padded + B * M * k * (2 * size + 8) + B * (M + N) * 3 * size + extra
    if any(needs):
        made.append(Kernel(pull.__name__, ("queries",) if needs[0] else (), *kinds, used, "backward"))
    if needs[1]:
        made.append(Kernel(gather.__name__, ("points",), *kinds, used, "backward"))
    return made


def index_bytes(points: Tensor) -> int:
    B, N, D = points.shape
    return B * (N * (4 + D * points.dtype.itemsize) + (N // 4 + 5) * 2 * D * points.dtype.itemsize)


def distance_gradients(grad: Tensor, args: Sequence, distances: Tensor, indices: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """Of lists ``[B, M, k]`` of neighbours: ∂q_i = Σ_j g_ij (q_i − p_j)/d_ij, ∂p_j the negative sum."""
    queries, points = args[:2]
    (B, M, _), k = queries.shape, indices.shape[-1]
    entries = np.arange(B * M + 1, dtype=np.int64) * k
    return list_gradients(grad.reshape(-1), queries, points, distances.reshape(-1), indices.reshape(-1), entries, needs)


def list_gradients(grad, queries, points, distances, indices, entries, needs) -> list[Tensor]:
    """The same for lists of any length; those of row i are entries[i] to entries[i + 1]."""
    (B, M, D), N = queries.shape, points.shape[1]
    q, p = trees.three(queries), trees.three(points)
    slopes = queries.new_empty(grad.shape)
    g_queries = queries.new_empty(B * M, 3)
    given = [array(x.detach().contiguous()) for x in (grad.to(queries.dtype), distances, indices)]
    run(pull, B * M, M, N, entries, array(q), array(p), *given, array(slopes), array(g_queries), grain=256)
    found = [g_queries[:, :D].reshape(queries.shape)] if needs[0] else []
    if needs[1]:
        of_points: Lists = lists(array(indices), entries, B, M, N)
        none = queries.new_empty(0, 0)
        g_points, _ = sums(of_points, slopes, q, p, None, none, True)
        found.append(g_points[:, :D].reshape(points.shape))
    return [g.contiguous() for g in found]


@jit
def neighbours(
    start,
    stop,
    M,
    N,
    k,
    bound,
    queries,  # [B*M, 3]
    rows,  # [B*M] in which order
    mine,  # [M] the segment of a query; empty where there is one only
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    distances,  # [B*M, k]
    indices,  # [B*M, k]
    truncated,  # [B*M]; empty where the k nearest of all are wanted
):
    """The neighbours of queries `start` to `stop` of `rows`."""
    best, which = np.empty(min(k, N), distances.dtype), np.empty(min(k, N), np.int64)
    stack, lows = np.empty(128, np.int64), np.empty(128, distances.dtype)
    leaves = np.empty(N // 8 + 1 if truncated.size else 0, np.int64)
    for at in range(start, stop):
        i = rows[at]
        b, found = i // M, 0
        s = mine[i - b * M] if mine.size else 0
        x, y, z = queries[i, 0], queries[i, 1], queries[i, 2]
        if s >= 0:
            segment = segments[s]
            base = b * nodes + segment[2]
            if truncated.size:
                whole = 0
                for n in range(trees.leaves_within(x, y, z, boxes, segment, base, bound, leaves, stack)):
                    first, last = trees.of_leaf(segment, leaves[n])
                    for j in range(b * N + first, b * N + last):
                        d2 = trees.squared(x, y, z, points, j)
                        if d2 <= bound:
                            found = trees.insert(d2, order[j], found, k, best, which)
                            whole += 1
                truncated[i] = whole - found
            else:
                found = trees.nearest(x, y, z, points, order, boxes, segment, base, b * N, k, bound, best, which, stack, lows)
        elif truncated.size:
            truncated[i] = 0
        for e in range(k):
            distances[i, e], indices[i, e] = (np.sqrt(best[e]), which[e]) if e < found else (np.inf, -1)


@jit
def pull(
    start,
    stop,
    M,
    N,
    entries,  # [B*M + 1]
    queries,  # [B*M, 3]
    points,  # [B*N, 3]
    grad,  # [entries]
    distances,  # [entries]
    indices,  # [entries]
    slopes,  # [entries]: grad/d, 0 where the distance is
    g_queries,  # [B*M, 3]
):
    """The gradients of queries `start` to `stop`."""
    for i in range(start, stop):
        a, b, c = 0.0, 0.0, 0.0
        for e in range(entries[i], entries[i + 1]):
            slopes[e] = 0
            if indices[e] >= 0 and distances[e] > 0:
                j = i // M * N + indices[e]
                slope = grad[e] / distances[e]
                a += slope * (queries[i, 0] - points[j, 0])
                b += slope * (queries[i, 1] - points[j, 1])
                c += slope * (queries[i, 2] - points[j, 2])
                slopes[e] = slope
        g_queries[i, 0], g_queries[i, 1], g_queries[i, 2] = a, b, c
