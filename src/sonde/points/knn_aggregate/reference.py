"""The definition of ``knn_aggregate``, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search.reference import aggregate, nearest


def knn_aggregate(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *_index, query_offsets, point_offsets, sigma, width, k = rest  # the index only changes speed
    indices, _ = nearest(queries, points, query_offsets, point_offsets, k, torch.inf)
    out, distances, _ = aggregate(queries, points, features, indices, sigma, width)
    return out, distances, indices
