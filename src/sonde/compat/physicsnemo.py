"""Drop-ins for functions of PhysicsNeMo and of its tutorial on custom kernels.

As in the originals, the tutorial's functions take queries first, and the functionals take points first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..points import knn as _knn
from ..points import knn_aggregate, radius_aggregate, radius_neighbors
from ..points import radius_search as _radius_search

__all__ = ["knn", "knn_weighted_feature_aggregation", "radius_bounded_feature_aggregation", "radius_search"]


def __dir__() -> list[str]:
    return __all__


def knn_weighted_feature_aggregation(
    p1: Tensor, p2: Tensor, p2_features: Tensor, k: int = 3, sigma: float | Tensor = 0.1, eps: float = 1e-8
) -> Tensor:
    """Weighted mean of the features of the k nearest points of `p2`, for every point of `p1`: :func:`sonde.knn_aggregate`.

    Args:
        p1: Queries, ``[M, D]`` or ``[B, M, D]``.
        p2: Points, ``[N, D]`` or ``[B, N, D]``.
        p2_features: ``[N, F]`` or ``[B, N, F]``.
        k: How many neighbours.
        sigma: σ of the weights softmax(−d/σ).
        eps: Ignored, as in the original.

    Returns:
        ``[M, F]`` or ``[B, M, F]``.
    """
    return knn_aggregate(p1, p2, p2_features, k, sigma)


def radius_bounded_feature_aggregation(
    p1: Tensor, p2: Tensor, p2_features: Tensor, radius: float, sigma: float | Tensor = 0.1
) -> Tensor:
    """Weighted mean of the features of all points of `p2` within `radius`, for every point of `p1`: :func:`sonde.radius_aggregate`.

    The weights sum to one. The original divides by their sum plus 1e-8, so results vanish where σ is much smaller than the
    distances; the gradient of its Warp kernel omits the division.
    """
    return radius_aggregate(p1, p2, p2_features, radius, sigma)


def knn(points: Tensor, queries: Tensor, k: int, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """``physicsnemo.nn.functional.knn``: indices ``[M, k]``, then distances ``[M, k]``.

    `implementation` is ignored. With fewer than k points, missing indices are −1 and distances +inf; the original fails.
    """
    found = _knn(queries, points, k)
    return found.indices, found.distances


def radius_search(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``physicsnemo.nn.functional.radius_search``.

    With `max_points`, the **nearest** neighbours up to that number, nearest first (the original's Warp kernel takes the first it
    finds). As in the original, missing neighbours are 0 in indices, points and distances; :func:`sonde.radius_neighbors` returns
    −1, which cannot be mistaken for the first point.

    Args:
        points: ``[N, D]`` or ``[B, N, D]``.
        queries: ``[M, D]`` or ``[B, M, D]``.
        radius: Inclusive.
        max_points: At most this many per query; None finds all, and waits for the device, since the count sets the result's size.
        return_dists: Also return distances, with gradients.
        return_points: Also return the points, with gradients.
        implementation: Ignored.

    Returns:
        Indices ``[M, max_points]``; with ``max_points=None``, pairs ``[2, count]`` (query, point) or, for batches, triples
        ``[3, count]`` (row, query, point), ordered by query, then distance. Then points and distances, if asked for, as a tuple.
    """
    for name, value in (("return_dists", return_dists), ("return_points", return_points)):
        if not isinstance(value, (bool, int)):
            raise TypeError(f"radius_search: {name} must be True or False; got {type(value).__name__}")
    if max_points is None:
        indices, chosen, distances = _pairs(points, queries, radius, return_points)
    else:
        distances, found, _ = radius_neighbors(queries, points, radius, max_points)
        there = found >= 0
        indices, distances = torch.where(there, found, 0), torch.where(there, distances, 0)
        chosen = torch.where(there[..., None], _rows(points, indices), 0) if return_points else None
    results = (indices, *(() if chosen is None else (chosen,)), *((distances,) if return_dists else ()))
    return results if len(results) > 1 else indices


def _pairs(points: Tensor, queries: Tensor, radius: float, return_points: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    offsets, found, distances = _radius_search(queries, points, radius)
    M = queries.shape[-2]
    row = torch.repeat_interleave(torch.arange(offsets.shape[0] - 1, device=found.device), offsets.diff())
    if points.ndim == 2:
        return torch.stack([row, found]), points[found] if return_points else None, distances
    batch, query = row // max(1, M), row % max(1, M)
    return torch.stack([batch, query, found]), points[batch, found] if return_points else None, distances


def _rows(points: Tensor, indices: Tensor) -> Tensor:
    """``points[indices]`` for each row of the batch; zeros if there are no points."""
    if points.shape[-2] == 0:
        return points.new_zeros(*indices.shape, points.shape[-1])
    if points.ndim == 2:
        return points[indices]
    return points[torch.arange(points.shape[0], device=points.device)[:, None, None], indices]
