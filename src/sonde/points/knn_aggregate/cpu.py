"""``knn_aggregate`` on CPUs: the search of ``knn``, then a softmax and a weighted sum per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import jit, part
from ...op.cpu_steps import Array, CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.simd import LANES, fma, load, spread, store_some
from .._search import cpu
from .._search.arguments import named
from .._search.cpu_rows import BLOCK, added, dot, falls, times, together

NAMES = ("queries", "points", "features", "sigma")


@by_threads
def forward_pass(queries: Tensor, points: Tensor, features: Tensor, *rest: Any) -> Pass:
    *search, sigma, width, k = rest
    (B, M, _), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    p = CpuPass(wide, named(queries, points, features, *search, sigma=sigma))
    found = cpu.search(p, k, writes=())
    lists = [Array(found[name], (B * M, k)) for name in ("distances", "indices")]
    out, rows = p.buffer("out", (B, M, F), wide), Array(p.dense("features", wide), (B * N, F))
    args = M, N, cpu.add_rates(p, width, B), rows, *lists, Array(out, (B * M, F))
    p.run(weigh, B * M, args, grain=_enough(k, F), writes=["out"])
    return p.returns(p.rounded(out, (B, M, F), features.dtype), found["distances"], found["indices"])


@by_threads
def backward_pass(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool
) -> Pass:
    *search, sigma, width, k, distances, indices = rest
    (B, M, _), (_, N, F), wide = queries.shape, features.shape, accumulator(queries, features, sigma)
    operands = named(queries, points, features, *search, sigma=sigma, width=None, k=None)
    p = CpuPass(wide, dict(grad=grad, **operands, distances=distances, indices=indices))
    q, x = cpu.coordinates(p, "queries"), cpu.coordinates(p, "points")
    go, f = p.dense("grad", wide), p.dense("features", wide)
    lengths, numbers = p.dense("distances", distances.dtype), p.dense("indices", indices.dtype)
    shares, slopes = (p.buffer(name, (B * M, k), wide) for name in ("shares", "slopes"))
    g_queries, g_widths = p.buffer("d_queries", (B, M, 3), wide), p.buffer("d_widths", (B, M), torch.float64)
    arrays = [Array(f, (B * N, F)), Array(go, (B * M, F)), *(Array(s, (B * M, k)) for s in (lengths, numbers, shares, slopes))]
    moved = needs[0] or needs[1] or needs[3]
    few = np.float32 if wide == torch.float32 and k <= BLOCK else np.float64  # at most BLOCK terms: float32 sums are exact enough
    args = M, N, moved, few(0), cpu.add_rates(p, width, B), q, x, *arrays, Array(g_queries, (B * M, 3)), Array(g_widths, (B * M,))
    p.run(pull, B * M, args, grain=_enough(k, F), writes=["queries"] if needs[0] else [])
    found: dict[str, str] = {}
    if needs[0]:
        found["queries"] = cpu.columns(p, g_queries, queries)
    if wants := [name for name, need in zip(NAMES[1:3], needs[1:3]) if need]:
        from_lists = numbers, cpu.add_entries(p, B * M, k), slopes, q.slot, x.slot
        made = cpu.add_gather(p, from_lists, (B, M, N), B * M * k, shares if needs[2] else None, go, F, wants)
        found |= dict(zip(wants, made))
    if needs[1]:
        found["points"] = cpu.columns(p, found["points"], points)
    if needs[2]:
        found["features"] = p.rounded(found["features"], features.shape, features.dtype)
    if needs[3]:
        found["sigma"] = cpu.add_widths(p, g_widths, sigma)
    return p.returns(*(found[name] for name, need in zip(NAMES, needs) if need))


def _enough(k: int, F: int) -> int:
    """The fewest rows that are worth a thread."""
    return max(1, 2**14 // (k * max(8, F)))


@part
def softmax(i, rate, distances, indices, share):
    """Compute the weights of row i; returns how many neighbours it has."""
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
    """Weights and weighted sums of rows `start` to `stop`."""
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
    moved,  # whether gradients of queries, points or σ are needed, or only the weights
    zero,  # of the dtype of the sums
    rate,  # [B] 1/σ
    queries,  # [B*M, 3]
    points,  # [B*N, 3]
    features,  # [B*N, F]
    grad,  # [B*M, F]
    distances,  # [B*M, k]
    indices,  # [B*M, k]
    shares,  # [B*M, k]
    slopes,  # [B*M, k]: ∂L/∂d / d, or 0 if d = 0
    g_queries,  # [B*M, 3]
    g_widths,  # [B*M] float64
):
    """Weights and slopes of rows `start` to `stop`, and the gradients of queries and of σ.

    With a = grad · feature and Δ = Σ w a, a slope is −w (a − Δ)/(σ d). Both a and d are taken relative to the nearest
    neighbour, which is allowed since Σ w (a − Δ) = 0: if it has all the weight, the gradients are exactly zero.
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
