"""Neighbours by brute force in NumPy, and point clouds that are hard for searches."""

from __future__ import annotations

import numpy as np
import torch

KINDS = (
    "uniform", "duplicates", "line", "plane", "one_point", "far", "outliers", "fewer_than_k", "no_queries", "no_points",
    "not_finite", "lattice", "one_place", "all_not_finite",
)  # fmt: skip


def cloud(seed: int) -> tuple[str, torch.Tensor, torch.Tensor, int, float]:
    """A name of the kind, queries ``[M, D]``, points ``[N, D]``, k and a radius."""
    g = np.random.default_rng(seed)
    kind, D = KINDS[seed % len(KINDS)], int(g.integers(1, 4))
    M, N, k = int(g.integers(1, 12)), int(g.integers(20, 150)), int(g.integers(1, 12))
    if kind == "no_queries":
        M = 0
    if kind == "no_points":
        N = 0
    if kind == "one_point":
        N = 1
    if kind == "fewer_than_k":
        N, k = int(g.integers(1, 6)), 9
    q, p = g.uniform(-1, 1, (M, D)), g.uniform(-1, 1, (N, D))
    if kind == "duplicates":
        p = p[g.integers(0, max(1, N // 4), N)]
    elif kind == "line":
        p[:, 1:] = 0.25
    elif kind == "plane":
        p[:, -1:] = 0.25
    elif kind == "far":
        q, p = q + 1e4, p + 1e4
    elif kind == "outliers":
        p[g.random(N) < 0.1] *= 1e6
        q[g.random(M) < 0.3] *= 1e6
    elif kind == "not_finite":
        for x in (q, p):
            x[g.random(x.shape) < 0.15] = np.nan
            x[g.random(x.shape) < 0.1] = np.inf
            x[g.random(x.shape) < 0.1] = -np.inf
    elif kind == "all_not_finite":
        p[:, 0] = np.nan
    elif kind == "lattice":
        q, p = np.round(q * 3), np.round(p * 3)
    elif kind == "one_place":
        p[:] = 0.5
    dtype = torch.float64 if seed % 5 == 4 else torch.float32
    return kind, torch.from_numpy(q).to(dtype), torch.from_numpy(p).to(dtype), k, float(g.uniform(0.1, 1.5))


def squared(queries: torch.Tensor, points: torch.Tensor) -> np.ndarray:
    """d² ``[M, N]``, each operation rounded to the coordinates' dtype; +inf where d² is not finite."""
    q, p = queries.numpy(), points.numpy()
    with np.errstate(all="ignore"):
        d = q[:, None] - p[None]
        total = d[..., 0] * d[..., 0]
        for axis in range(1, d.shape[-1]):
            total = total + d[..., axis] * d[..., axis]
    return np.where(np.isfinite(total), total, np.inf)


def neighbours(queries: torch.Tensor, points: torch.Tensor, radius: float | None = None) -> list[list[int]]:
    """Indices of all neighbours of each query, ascending by (d², index)."""
    d2 = squared(queries, points)
    bound = np.inf if radius is None else d2.dtype.type(radius * radius)
    found = []
    for row in d2:
        order = np.lexsort((np.arange(len(row)), row))
        found.append([int(j) for j in order if row[j] <= bound and row[j] < np.inf])
    return found


def padded(lists: list[list[int]], k: int) -> torch.Tensor:
    rows = [(row + [-1] * k)[:k] for row in lists]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(lists), k)
