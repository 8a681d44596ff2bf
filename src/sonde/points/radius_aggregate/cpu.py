"""``radius_aggregate`` on CPUs: a tree traversal per query; backward another one, and one per point over a tree of queries.

A weight is exp((n − d)/σ)·s with the smallest distance n and s = 1/Σ exp((n − d)/σ). Every pass computes it by the same operations,
so that a single neighbour has a weight of exactly 1 and contributes exactly 0 to the gradients of queries and points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import NUMPY, exact_part, jit, part
from ...op.cpu_steps import Array, CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.simd import LANES, load, store, store_some, where
from .._search import cpu
from .._search import cpu_tree as trees
from .._search.arguments import named
from .._search.cpu_rows import BLOCK, add_block, dot, falls, finite, folded, times

NAMES = ("queries", "points", "features", "sigma")
LEAP = 4.0  # how many σ closer than the reference distance a point must be to replace it
SHRINK = 2.0**-40  # scales weights after an overflow: then no sum of 2³¹ terms with weights up to exp(LEAP) overflows


@by_threads
def forward_pass(queries: Tensor, points: Tensor, features: Tensor, *rest: Any) -> Pass:
    *search, sigma, width, radius = rest
    (B, M, _), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    p = CpuPass(wide, named(queries, points, features, *search, sigma=sigma))
    tree, rows = cpu.add_tree(p), cpu.add_rows(p)
    out, levels = p.buffer("out", (B, M, F), wide), p.buffer("levels", (B, M, 2), wide)
    bound = cpu.scalar(queries.dtype, cpu.ball(radius, queries.dtype))
    arrays = Array(p.dense("features", wide), (B * N, F)), Array(out, (B * M, F)), Array(levels, (B * M, 2))
    args = M, N, bound, cpu.add_rates(p, width, B), *rows, *tree, *arrays
    p.run(weigh, B * M, args, grain=64, writes=["out"], scratch=trees.leaves_bytes(N))
    return p.returns(p.rounded(out, (B, M, F), features.dtype), levels)


@by_threads
def backward_pass(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool
) -> Pass:
    *search, sigma, width, radius, levels = rest
    (B, M, _), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    operands = named(queries, points, features, *search, sigma=sigma, width=None, radius=None)
    p = CpuPass(wide, dict(grad=grad, **operands, levels=levels))
    bound, means = cpu.scalar(queries.dtype, cpu.ball(radius, queries.dtype)), p.buffer("means", (B * M,), torch.float64)
    arrays = [
        Array(p.dense("features", wide), (B * N, F)), Array(p.dense("grad", wide), (B * M, F)),
        Array(p.dense("levels", levels.dtype), (B * M, 2)), Array(means, (B * M,)),
    ]  # fmt: skip
    found: dict[str, str] = {}
    if needs[0] or needs[1] or needs[3]:
        tree, rows = cpu.add_tree(p), cpu.add_rows(p)
        g_queries, g_widths = p.buffer("d_queries", (B, M, 3), wide), p.buffer("d_widths", (B, M), torch.float64)
        results = Array(g_queries, (B * M, 3)), Array(g_widths, (B * M,))
        args = M, N, bound, cpu.add_rates(p, width, B), *rows, *tree, *arrays, *results
        p.run(pull, B * M, args, grain=64, writes=["queries"] if needs[0] else [], scratch=trees.leaves_bytes(N))
        if needs[0]:
            found["queries"] = cpu.columns(p, g_queries, queries)
        if needs[3]:
            found["sigma"] = cpu.add_widths(p, g_widths, sigma)
    if wants := [name for name, need in zip(NAMES[1:3], needs[1:3]) if need]:
        tree, rows = cpu.add_tree(p, "queries", "query_offsets", given=False), cpu.add_rows(p, "points", "point_offsets")
        sizes = dict(points=3, features=F)
        made = {name: p.buffer(f"d_{name}", (B, N, sizes[name]), wide) for name in wants}
        written = [
            Array(made[name], (B * N, n)) if name in made else np.empty((0, n), NUMPY[wide]) for name, n in sizes.items()
        ]  # fmt: skip
        args = N, M, bound, cpu.add_rates(p, width, B), *rows, *tree, *arrays, *written
        p.run(push, B * N, args, grain=64, writes=wants, scratch=trees.leaves_bytes(M))
        if needs[1]:
            found["points"] = cpu.columns(p, made["points"], points)
        if needs[2]:
            found["features"] = p.rounded(made["features"], features.shape, features.dtype)
    return p.returns(*(found[name] for name, need in zip(NAMES, needs) if need))


@jit
def weigh(
    start,
    stop,
    M,
    N,
    bound,  # r²
    rate,  # [B] 1/σ
    queries,  # [B*M, 3]
    by,  # [B*M] the order in which queries are visited
    mine,  # [M] the segment of each query; empty if there is only one
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    features,  # [B*N, F]
    out,  # [B*M, F]
    levels,  # [B*M, 2]: n and s; 0 and 0 for an empty ball
):
    """Rows ``by[start:stop]`` by an online softmax, a block of neighbours at a time.

    A sum may overflow although the mean does not: then the row is summed again with smaller weights.
    """
    F, real = features.shape[1], out.dtype.type
    stack, leaves = np.empty(128, np.int64), np.empty(N // 8 + 1, np.int64)
    seen, far, share = np.empty(BLOCK, np.int64), np.empty(BLOCK, out.dtype), np.empty(BLOCK, out.dtype)
    row = np.zeros((2, -(-F // LANES) * LANES), out.dtype)
    for at in range(start, stop):
        i = by[at]
        b = i // M
        s = mine[i - b * M] if mine.size else 0
        x, y, z, segment, count = queries[i, 0], queries[i, 1], queries[i, 2], segments[max(s, 0)], 0
        if s >= 0:
            count = trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)
        for again in range(2):
            shrink = SHRINK if again else 1.0
            near, one, total, n = real(np.inf), real(np.inf), 0.0, 0
            for leaf in range(count):
                first, last = trees.of_leaf(segment, leaves[leaf])
                for j in range(b * N + first, b * N + last):
                    d2 = trees.squared(x, y, z, points, j)
                    if d2 <= bound:
                        seen[n], far[n] = b * N + order[j], np.sqrt(d2)
                        n += 1
                        if n == BLOCK:
                            near, one, total = take(n, seen, far, share, near, one, total, rate[b], shrink, features, row)
                            n = 0
            if n:
                near, one, total = take(n, seen, far, share, near, one, total, rate[b], shrink, features, row)
            levels[i, 0], levels[i, 1], scale = 0, 0, real(0)
            if total > 0:
                levels[i, 0], levels[i, 1] = near, 1 / (total * np.exp(falls(near, one, rate[b])))
                scale = real(1 / (total * shrink))
            else:
                row[:] = 0
            if finish(i, scale, row, out, F, again):
                break


@part
def take(n, seen, far, share, near, one, total, rate, shrink, features, row):
    """Add a block of neighbours; `one` is the reference distance, with a weight of 1.

    The reference follows the smallest distance in leaps of several σ, which bounds the rounding error: weights that were
    rescaled many times are too small to matter.
    """
    real, begins = far.dtype.type, total == 0
    for e in range(n):
        near = min(near, far[e])
    if begins:
        one = near
    elif falls(near, one, rate) < -LEAP:
        less = real(np.exp(falls(near, one, rate)))
        total *= less
        one = near
        for c in range(0, row.shape[1], LANES):
            store(load(row, 0, c, row.shape[1]) * less, row, 0, c)
            store(load(row, 1, c, row.shape[1]) * less, row, 1, c)
    for e in range(n):
        w = np.exp(real(falls(one, far[e], rate)))
        total += w
        share[e] = w * real(shrink)
    add_block(n, share, seen, features, row, begins)
    return near, one, total


@exact_part
def finish(i, scale, row, out, F, again):
    """Write a row; returns whether it is finite. The second time (`again`), only non-finite elements are replaced."""
    good = True
    for c in range(0, F, LANES):
        v = folded(row, c) * scale
        good = finite(v) and good
        if again:
            before = load(out, i, c, F)
            v = where(before - before == 0.0, before, v)
        store_some(v, out, i, c, F)
    return good


@jit
def pull(
    start,
    stop,
    M,
    N,
    bound,
    rate,  # [B] 1/σ
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
    means,  # [B*M] float64: Δ = Σ w a
    g_queries,  # [B*M, 3]
    g_widths,  # [B*M] float64
):
    """Δ and the gradients of queries and σ for rows ``by[start:stop]``, in one traversal.

    With a = grad · feature, Σ w (a − Δ) u is computed as Σ w a u − Δ Σ w u in float64. To limit cancellation, a is taken relative
    to a base: that of the nearest point once it was seen (if it has all the weight, the result is exactly zero), and the current
    mean whenever the sum of weights has doubled.
    """
    F, real = features.shape[1], grad.dtype.type
    stack, leaves = np.empty(128, np.int64), np.empty(N // 8 + 1, np.int64)
    of, with_a = np.empty(5), np.empty(5)  # Σ w·(1, d − n, u), and the same with a
    for at in range(start, stop):
        i = by[at]
        b = i // M
        s = mine[i - b * M] if mine.size else 0
        g_queries[i, 0], g_queries[i, 1], g_queries[i, 2], g_widths[i], means[i] = 0, 0, 0, 0, 0
        if s < 0:
            continue
        x, y, z, segment, r = queries[i, 0], queries[i, 1], queries[i, 2], segments[s], rate[b]
        near, base, found, chosen = levels[i, 0], 0.0, False, 0.0
        of[:], with_a[:] = 0, 0
        for n in range(trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)):
            first, last = trees.of_leaf(segment, leaves[n])
            for j in range(b * N + first, b * N + last):
                d2 = trees.squared(x, y, z, points, j)
                if d2 <= bound:
                    d = real(np.sqrt(d2))
                    w = np.exp(real(falls(near, d, r)))
                    a = dot(grad, i, features, b * N + order[j], F)
                    if d == near and not found:
                        base, found = count_from(a, base, of, with_a), True
                    add_to(w, a - base, d, near, x - points[j, 0], y - points[j, 1], z - points[j, 2], of, with_a)
            if of[0] > 2 * chosen:
                base, chosen = count_from(base + with_a[0] / of[0], base, of, with_a), of[0]
        if of[0] > 0:
            mean = with_a[0] / of[0]
            means[i] = base + mean
            g_widths[i] = times(times(apart(with_a[1], mean, of[1]) / of[0], r), r)
            for e in range(3):
                g_queries[i, e] = -times(apart(with_a[2 + e], mean, of[2 + e]) / of[0], r)


@exact_part
def count_from(new, base, of, with_a):
    """Change the base of all sums to `new`, which is returned."""
    for e in range(5):
        with_a[e] -= (new - base) * of[e]
    return new


@exact_part
def add_to(w, a, d, near, dx, dy, dz, of, with_a):
    """Add a neighbour to the sums; those in `with_a` get a times what those in `of` get, to the bit."""
    w, d, of[0] = np.float64(w), np.float64(d), of[0] + w
    with_a[0] += a * w
    wd = w * (d - near)
    of[1] += wd
    with_a[1] += a * wd
    if d > 0:
        w /= d
        wx, wy, wz = w * dx, w * dy, w * dz
        of[2], of[3], of[4] = of[2] + wx, of[3] + wy, of[4] + wz
        with_a[2], with_a[3], with_a[4] = with_a[2] + a * wx, with_a[3] + a * wy, with_a[4] + a * wz


@exact_part
def apart(with_a, mean, of):
    """Σ w a u − Δ Σ w u; exactly 0 for a single term, since no FMA is used."""
    return with_a - mean * of


@jit
def push(
    start,
    stop,
    N,
    M,
    bound,
    rate,  # [B] 1/σ
    points,  # [B*N, 3]
    by,  # [B*N]
    mine,  # [N]
    queries,  # [B*M, 3] in tree order
    order,  # [B*M]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    features,  # [B*N, F]
    grad,  # [B*M, F]
    levels,  # [B*M, 2]
    means,  # [B*M] float64
    g_points,  # [B*N, 3]; empty if not needed
    g_features,  # [B*N, F]; empty if not needed
):
    """The gradients of points ``by[start:stop]``, summed over the queries within the radius."""
    F, real = features.shape[1], grad.dtype.type
    stack, leaves = np.empty(128, np.int64), np.empty(M // 8 + 1, np.int64)
    seen, share = np.empty(BLOCK, np.int64), np.empty(BLOCK, grad.dtype)
    row = np.zeros((2, -(-F // LANES) * LANES), grad.dtype)
    for at in range(start, stop):
        j = by[at]
        b = j // N
        s = mine[j - b * N] if mine.size else 0
        x, y, z, ax, ay, az, count, begins = points[j, 0], points[j, 1], points[j, 2], 0.0, 0.0, 0.0, 0, True
        if s >= 0:
            segment, r = segments[s], rate[b]
            for n in range(trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)):
                first, last = trees.of_leaf(segment, leaves[n])
                for m in range(b * M + first, b * M + last):
                    d2 = trees.squared(x, y, z, queries, m)
                    if d2 <= bound:
                        d, i = np.sqrt(d2), b * M + order[m]
                        w = np.exp(real(falls(levels[i, 0], real(d), r))) * levels[i, 1]
                        if g_points.size and d > 0:
                            pulls = -real(times(w * (dot(grad, i, features, j, F) - means[i]), r)) / d
                            ax -= pulls * (queries[m, 0] - x)
                            ay -= pulls * (queries[m, 1] - y)
                            az -= pulls * (queries[m, 2] - z)
                        if g_features.size:
                            seen[count], share[count] = i, w
                            count += 1
                            if count == BLOCK:
                                add_block(count, share, seen, grad, row, begins)
                                count, begins = 0, False
        if g_points.size:
            g_points[j, 0], g_points[j, 1], g_points[j, 2] = ax, ay, az
        if g_features.size:
            if count or begins:
                add_block(count, share, seen, grad, row, begins)
            for c in range(0, F, LANES):
                store_some(folded(row, c), g_features, j, c, F)
