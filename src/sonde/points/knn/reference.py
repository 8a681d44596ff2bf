"""The definition of ``knn``, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search.reference import distances, nearest


def knn(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor]:
    *_index, query_offsets, point_offsets, k = rest  # the index only changes speed
    indices, _ = nearest(queries, points, query_offsets, point_offsets, k, torch.inf)
    return distances(queries, points, indices), indices
