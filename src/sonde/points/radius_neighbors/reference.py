"""The definition of ``radius_neighbors``, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from .._search.reference import distances, nearest


def radius_neighbors(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *_index, query_offsets, point_offsets, radius, k = rest  # the index only changes speed
    indices, count = nearest(queries, points, query_offsets, point_offsets, k, radius * radius)
    return distances(queries, points, indices), indices, (count - k).clamp(min=0)
