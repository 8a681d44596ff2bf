"""``knn_aggregate`` on CPUs: the search of ``knn``, then weights and sums, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, jit, part, run
from ...op.dtypes import accumulator
from ...op.lanes import LANES, fma, load, spread, store_some
from ...op.memory import dense, empty
from ...op.plan import Determinism, Kernel
from .._search import cpu
from .._search import cpu_tree as trees
from .._search.cpu_rows import BLOCK, added, copied, dot, falls, rates, times, together
from .._search.cpu_segments import gather, lists, sums

NAMES = ("queries", "points", "features", "sigma")


def forward(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *index, sigma, width, k = rest
    distances, indices, _ = cpu.search((queries, points, *index), k)
    (B, M, _), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    out = empty((B, M, F), wide)
    arrays = (
        array(x) for x in (dense(features, wide).flatten(0, 1), distances.view(-1, k), indices.view(-1, k), out.flatten(0, 1))
    )
    run(weigh, B * M, M, N, rates(sigma, width, B), *arrays, grain=max(1, 2**14 // (k * max(8, F))))
    return out.to(features.dtype), distances, indices


def backward(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest, needs: Sequence[bool], deterministic: bool
) -> list[Tensor]:
    *_index, sigma, width, k, distances, indices = rest
    (B, M, D), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    q, p = trees.three(queries), trees.three(points)
    go, f = dense(grad, wide).flatten(0, 1), dense(features, wide).flatten(0, 1)
    shares, slopes = (go.new_empty(B * M * k) for _ in range(2))
    g_queries, g_widths = go.new_empty(B * M, 3), go.new_empty(B, M, dtype=torch.float64)
    lengths = distances.reshape(-1, k), indices.reshape(-1, k), shares.view(-1, k), slopes.view(-1, k)
    arrays = (array(x) for x in (q, p, f, go, *lengths, g_queries, g_widths.view(-1)))
    moved = needs[0] or needs[1] or needs[3]
    few = np.float32 if wide == torch.float32 and k <= BLOCK else np.float64  # sums of so few terms need no wider ones
    run(pull, B * M, M, N, moved, few(0), rates(sigma, width, B), *arrays, grain=max(1, 2**14 // (k * max(8, F))))
    found: dict[str, Tensor] = {}
    if needs[1] or needs[2]:
        of_points = lists(array(indices.reshape(-1)), np.arange(B * M + 1, dtype=np.int64) * k, B, M, N)
        g_points, g_features = sums(of_points, slopes, q, p, shares if needs[2] else None, go, bool(needs[1]))
        found["features"] = g_features.view(B, N, F) if needs[2] else g_features
        found["points"] = g_points[:, :D].reshape(B, N, D) if needs[1] else g_points
    found["queries"], found["sigma"] = g_queries[:, :D].reshape(queries.shape), g_widths.sum(1)
    of = dict(zip(NAMES, (queries, points, features, sigma)))
    return [found[name].to(of[name].dtype).contiguous() for name, need in zip(NAMES, needs) if need]


def plan(queries: Tensor, points: Tensor, features: Tensor, *rest, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    *index, sigma, _width, k = rest
    wide = accumulator(queries, features, sigma)
    (B, M, D), (_, N, F), size = queries.shape, features.shape, wide.itemsize
    (search,) = cpu.search_kernels((queries, points, *index), k, (False, False))
    rounded, invariant = features.dtype != wide, Determinism.BATCH_INVARIANT
    copies = copied(features, wide)
    made = [
        Kernel(search.name, (), search.accumulator, invariant, search.workspace),
        Kernel(weigh.__name__, ("out",), wide, invariant, copies + rounded * B * M * F * size),
    ]
    names = [name for name, need in zip(NAMES, needs) if need]
    if names:
        padded = (D < 3) * 3 * B * (M + N) * queries.dtype.itemsize
        pieces = B * (N + M * k // 4096) * (3 + F) * size
        used = copies + padded + pieces + B * M * (8 + (2 * k + 3 + rounded * F) * size)
        made.append(Kernel(pull.__name__, ("queries",) if needs[0] else (), wide, invariant, used, "backward"))
        if needs[1] or needs[2]:
            writes = tuple(n for n in names if n in ("points", "features"))
            made.append(Kernel(gather.__name__, writes, wide, invariant, used, "backward"))
        if needs[3]:
            made.append(Kernel("torch.sum", ("sigma",), wide, Determinism.RUN_TO_RUN, used, "backward"))
    return made


@part
def softmax(i, rate, distances, indices, share):
    """The weights of row i; return how many neighbours it has."""
    n, total, real = 0, 0.0, share.dtype.type
    while n < share.shape[0] and indices[i, n] >= 0:
        n += 1
    for e in range(n):
        share[e] = np.exp(real(falls(distances[i, 0], distances[i, e], rate)))
        total += share[e]
    if n:
        total = 1 / total
    for e in range(n):
        share[e] = share[e] * total
    return n


@jit
def weigh(
    start,
    stop,
    M,
    N,
    rate,  # [B] 1/σ
    features,  # [B*N, F]
    distances,  # [B*M, k]
    indices,  # [B*M, k]
    out,  # [B*M, F]
):
    """Rows `start` to `stop`."""
    F, k = features.shape[1], distances.shape[1]
    share, zero = np.empty(k, out.dtype), spread(out.dtype.type(0))
    for i in range(start, stop):
        n, row = softmax(i, rate[i // M], distances, indices, share), i // M * N
        for c in range(0, F, LANES):
            whole, lost = zero, zero
            for e in range(min(n, BLOCK)):
                whole = fma(share[e], load(features, row + indices[i, e], c, F), whole)
            if n > BLOCK:
                for first in range(BLOCK, n, BLOCK):
                    v = zero
                    for e in range(first, min(n, first + BLOCK)):
                        v = fma(share[e], load(features, row + indices[i, e], c, F), v)
                    whole, lost = added(v, whole, lost)
                whole = together(whole, lost)
            store_some(whole, out, i, c, F)


@jit
def pull(
    start,
    stop,
    M,
    N,
    moved,  # whether more is wanted than the weights
    zero,  # of the dtype in which sums run
    rate,  # [B] 1/σ
    queries,  # [B*M, 3]
    points,  # [B*N, 3]
    features,  # [B*N, F]
    grad,  # [B*M, F]
    distances,  # [B*M, k]
    indices,  # [B*M, k]
    shares,  # [B*M, k]
    slopes,  # [B*M, k]: ∂L/∂d / d, 0 where the distance is
    g_queries,  # [B*M, 3]
    g_widths,  # [B*M] float64
):
    """Weights of rows `start` to `stop`, what pulls along their distances, and the gradients of queries and of σ.

    a counts from the nearest's own, and d too, since Σ w (a − Δ) is 0: where nobody else has a weight, nothing is left, exactly.
    """
    k, F, real = distances.shape[1], features.shape[1], grad.dtype.type
    share, along = np.empty(k, grad.dtype), np.full(k, zero)
    for i in range(start, stop):
        row, r = i // M * N, rate[i // M]
        n, mean, total, base = softmax(i, r, distances, indices, share), zero, zero, 0.0
        for e in range(n):
            shares[i, e] = share[e]
            if moved:
                a = dot(grad, i, features, row + indices[i, e], F)
                if e == 0:
                    base = a
                along[e] = a - base
                mean += share[e] * along[e]
                total += share[e]
        if not moved:
            continue
        if n:
            mean /= total
        x, y, z, t = zero, zero, zero, zero
        for e in range(k):
            slopes[i, e] = 0
            if e < n:
                d, j = distances[i, e], row + indices[i, e]
                ds = share[e] * (along[e] - mean)
                t += (d - distances[i, 0]) * ds
                if d > 0:
                    pulls = -real(times(ds, r)) / d
                    x += pulls * (queries[i, 0] - points[j, 0])
                    y += pulls * (queries[i, 1] - points[j, 1])
                    z += pulls * (queries[i, 2] - points[j, 2])
                    slopes[i, e] = pulls
        g_queries[i, 0], g_queries[i, 1], g_queries[i, 2], g_widths[i] = x, y, z, times(times(t, r), r)
