"""``radius_aggregate`` on CPUs: one walk for every query; backwards another, and one of every point among the queries.

A weight is exp((n − d)/σ − t) with the nearest's distance n and t = log Σ exp((n − d)/σ), from the same operations in every pass:
of a single neighbour it is exactly 1, and what it gives to queries and points exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...op.cpu import array, jit, run
from ...op.dtypes import accumulator
from ...op.lanes import LANES, fma, load, spread, store, store_some
from ...op.memory import dense, empty
from ...op.plan import Determinism, Kernel
from .. import _cpu_search as cpu
from .. import _cpu_tree as trees
from .._cpu_rows import copied, dot, falls, widths

NAMES = ("queries", "points", "features", "sigma")


def forward(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor]:
    order, ordered, boxes, _, _, _, query_offsets, point_offsets, sigma, width, radius = rest
    (B, M, _), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    tree = cpu.tree_of(points, order, ordered, boxes, point_offsets)
    out, levels = empty((B, M, F), wide), queries.new_empty(B, M, 2, dtype=wide)
    rows, mine = array(trees.three(queries)), trees.segment_of(query_offsets, M)
    (bound,) = cpu.scalars(queries.dtype, cpu.ball(radius, queries.dtype))
    arrays = (array(x) for x in (dense(features, wide).flatten(0, 1), out.flatten(0, 1), levels.flatten(0, 1)))
    by = trees.spatial_order(rows, B)
    run(weigh, B * M, M, N, bound, widths(sigma, width, B, wide), rows, by, mine, *tree[:4], tree.nodes, *arrays, grain=64)
    return out.to(features.dtype), levels


def backward(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest, needs: Sequence[bool], deterministic: bool
) -> list[Tensor]:
    order, ordered, boxes, _, _, _, query_offsets, point_offsets, sigma, width, radius, levels = rest
    (B, M, D), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    go, f, s = dense(grad, wide).flatten(0, 1), dense(features, wide).flatten(0, 1), widths(sigma, width, B, wide)
    (bound,) = cpu.scalars(queries.dtype, cpu.ball(radius, queries.dtype))
    means, g_widths, g_queries = (go.new_empty(B * M, n) for n in (1, 1, 3))
    found: dict[str, Tensor] = {}
    arrays = [array(x) for x in (f, go, levels.reshape(-1, 2), means.view(-1))]
    if needs[0] or needs[1] or needs[3]:
        tree = cpu.tree_of(points, order, ordered, boxes, point_offsets)
        rows, mine = array(trees.three(queries)), trees.segment_of(query_offsets, M)
        by, results = trees.spatial_order(rows, B), (array(g_queries), array(g_widths.view(-1)))
        run(pull, B * M, M, N, bound, s, rows, by, mine, *tree[:4], tree.nodes, *arrays, *results, grain=64)
        found["queries"], found["sigma"] = g_queries[:, :D].reshape(queries.shape), g_widths.view(B, M).sum(1)
    if needs[1] or needs[2]:
        tree = cpu.tree_of(queries, None, None, None, query_offsets)
        rows, mine = array(trees.three(points)), trees.segment_of(point_offsets, N)
        g_points = go.new_empty(B * N if needs[1] else 0, 3)
        g_features = empty((B * N if needs[2] else 0, F), wide)
        by, results = trees.spatial_order(rows, B), (array(g_points), array(g_features))
        run(push, B * N, N, M, bound, s, rows, by, mine, *tree[:4], tree.nodes, *arrays, *results, grain=64)
        found["points"] = g_points[:, :D].reshape(points.shape) if needs[1] else g_points
        found["features"] = g_features.view(features.shape) if needs[2] else g_features
    of = dict(zip(NAMES, (queries, points, features, sigma)))
    return [found[name].to(of[name].dtype).contiguous() for name, need in zip(NAMES, needs) if need]


def plan(queries: Tensor, points: Tensor, features: Tensor, *rest, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    sigma = rest[-3]
    wide = accumulator(queries, features, sigma)
    (B, M, D), (_, N, F), size = queries.shape, features.shape, wide.itemsize
    invariant, rounded = Determinism.BATCH_INVARIANT, features.dtype != wide
    index = cpu.index_bytes(points) if rest[0] is None else 0
    padded = (D < 3) * 3 * B * (M + 2 * N) * queries.dtype.itemsize
    copies = copied(features, wide) + rounded * B * M * F * size
    made = [Kernel(weigh.__name__, ("out",), wide, invariant, index + padded + copies)]
    names = [name for name, need in zip(NAMES, needs) if need]
    used = index + padded + copies + B * (M + N) * 5 * size + rounded * B * N * F * size
    if needs[0] or needs[1] or needs[3]:
        made.append(Kernel(pull.__name__, ("queries",) if needs[0] else (), wide, invariant, used, "backward"))
        if needs[3]:
            made.append(Kernel("torch.sum", ("sigma",), wide, Determinism.RUN_TO_RUN, used, "backward"))
    if needs[1] or needs[2]:
        used += cpu.index_bytes(queries) + (D < 3) * 3 * B * (N + 2 * M) * queries.dtype.itemsize
        writes = tuple(n for n in names if n in ("points", "features"))
        made.append(Kernel(push.__name__, writes, wide, invariant, used, "backward"))
    return made


@jit
def weigh(
    start,
    stop,
    M,
    N,
    bound,  # r²
    sigma,  # [B]
    queries,  # [B*M, 3]
    by,  # [B*M] in which order
    mine,  # [M] the segment of a query; empty where there is one only
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    features,  # [B*N, F]
    out,  # [B*M, F]
    levels,  # [B*M, 2]: n and t; of an empty ball 0 and +inf
):
    """Rows `start` to `stop` of `by`, by an online softmax: where a nearer point comes, what was summed is scaled down."""
    F, real = features.shape[1], out.dtype.type
    stack, leaves = np.empty(128, np.int64), np.empty(N // 8 + 1, np.int64)
    row = np.zeros((1, -(-F // LANES) * LANES), out.dtype)
    zero = spread(real(0))
    for at in range(start, stop):
        i = by[at]
        b = i // M
        s = mine[i - b * M] if mine.size else 0
        near, total = real(np.inf), real(0)
        row[:] = 0
        if s >= 0:
            x, y, z, segment = queries[i, 0], queries[i, 1], queries[i, 2], segments[s]
            for n in range(trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)):
                first, last = trees.of_leaf(segment, leaves[n])
                for j in range(b * N + first, b * N + last):
                    d2 = trees.squared(x, y, z, points, j)
                    if d2 <= bound:
                        d = real(np.sqrt(d2))
                        if d < near:
                            scale = np.exp(falls(d, near, sigma[b])) if total > 0 else real(0)
                            total *= scale
                            for c in range(0, F, LANES):
                                store(fma(scale, load(row, 0, c, row.shape[1]), zero), row, 0, c)
                            near = d
                        w = np.exp(falls(near, d, sigma[b]))
                        total += w
                        for c in range(0, F, LANES):
                            store(fma(w, load(features, b * N + order[j], c, F), load(row, 0, c, row.shape[1])), row, 0, c)
        levels[i, 0], levels[i, 1] = (near, np.log(total)) if total > 0 else (real(0), real(np.inf))
        scale = real(1) / total if total > 0 else real(0)
        for c in range(0, F, LANES):
            store_some(fma(scale, load(row, 0, c, row.shape[1]), zero), out, i, c, F)


@jit
def pull(
    start,
    stop,
    M,
    N,
    bound,
    sigma,  # [B]
    queries,  # [B*M, 3]
    by,  # [B*M]
    mine,  # [M]
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    features,  # [B*N, F]
    grad,  # [B*M, F]
    levels,  # [B*M, 2]
    means,  # [B*M]: Δ = Σ w a
    g_queries,  # [B*M, 3]
    g_widths,  # [B*M]
):
    """Of rows `start` to `stop` of `by`: Δ, and the gradients of queries and of σ.

    The weights sum to one up to the rounding of t, which a − Δ would show: Δ is divided by their sum.
    """
    F, real = features.shape[1], grad.dtype.type
    stack, leaves = np.empty(128, np.int64), np.empty(N // 8 + 1, np.int64)
    for at in range(start, stop):
        i = by[at]
        b = i // M
        s = mine[i - b * M] if mine.size else 0
        g_queries[i, 0], g_queries[i, 1], g_queries[i, 2], g_widths[i], means[i] = 0, 0, 0, 0, 0
        if s < 0:
            continue
        x, y, z, segment, width = queries[i, 0], queries[i, 1], queries[i, 2], segments[s], sigma[b]
        count = trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)
        total = real(0)
        for again in range(2):  # Δ first
            for n in range(count):
                first, last = trees.of_leaf(segment, leaves[n])
                for j in range(b * N + first, b * N + last):
                    d2 = trees.squared(x, y, z, points, j)
                    if d2 <= bound:
                        d = np.sqrt(d2)
                        w = np.exp(falls(levels[i, 0], real(d), width) - levels[i, 1])
                        a = dot(grad, i, features, b * N + order[j], F)
                        if again:
                            ds = w * (a - means[i])
                            g_widths[i] += d * ds / (width * width)
                            if d > 0:
                                slope = -ds / (width * d)
                                g_queries[i, 0] += slope * (x - points[j, 0])
                                g_queries[i, 1] += slope * (y - points[j, 1])
                                g_queries[i, 2] += slope * (z - points[j, 2])
                        else:
                            means[i] += w * a
                            total += w
            if not again and total > 0:
                means[i] /= total


@jit
def push(
    start,
    stop,
    N,
    M,
    bound,
    sigma,  # [B]
    points,  # [B*N, 3]
    by,  # [B*N]
    mine,  # [N]
    queries,  # [B*M, 3] in the order of their tree
    order,  # [B*M]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    features,  # [B*N, F]
    grad,  # [B*M, F]
    levels,  # [B*M, 2]
    means,  # [B*M]
    g_points,  # [B*N, 3]; empty where not wanted
    g_features,  # [B*N, F]; the same
):
    """The gradients of points `start` to `stop` of `by`, from the queries in whose balls they are."""
    F, real = features.shape[1], grad.dtype.type
    stack, leaves = np.empty(128, np.int64), np.empty(M // 8 + 1, np.int64)
    row = np.zeros((1, -(-F // LANES) * LANES), grad.dtype)
    for at in range(start, stop):
        j = by[at]
        b = j // N
        s = mine[j - b * N] if mine.size else 0
        x, y, z, ax, ay, az = points[j, 0], points[j, 1], points[j, 2], real(0), real(0), real(0)
        row[:] = 0
        if s >= 0:
            segment, width = segments[s], sigma[b]
            for n in range(trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)):
                first, last = trees.of_leaf(segment, leaves[n])
                for m in range(b * M + first, b * M + last):
                    d2 = trees.squared(x, y, z, queries, m)
                    if d2 <= bound:
                        d, i = np.sqrt(d2), b * M + order[m]
                        w = np.exp(falls(levels[i, 0], real(d), width) - levels[i, 1])
                        if g_features.size:
                            for c in range(0, F, LANES):
                                store(fma(w, load(grad, i, c, F), load(row, 0, c, row.shape[1])), row, 0, c)
                        if g_points.size and d > 0:
                            slope = -w * (dot(grad, i, features, j, F) - means[i]) / (width * d)
                            ax -= slope * (queries[m, 0] - x)
                            ay -= slope * (queries[m, 1] - y)
                            az -= slope * (queries[m, 2] - z)
        if g_points.size:
            g_points[j, 0], g_points[j, 1], g_points[j, 2] = ax, ay, az
        if g_features.size:
            for c in range(0, F, LANES):
                store_some(load(row, 0, c, row.shape[1]), g_features, j, c, F)
