"""The definition of ``radius_aggregate``, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from .._search.reference import aggregate, nearest


def radius_aggregate(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor]:
    *_index, query_offsets, point_offsets, sigma, width, radius = rest  # the index only changes speed
    indices, _ = nearest(queries, points, query_offsets, point_offsets, None, radius * radius)
    out, _, levels = aggregate(queries, points, features, indices, sigma, width)
    return out, levels
