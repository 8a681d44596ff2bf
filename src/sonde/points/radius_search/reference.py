"""The definition of ``radius_search``, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search.reference import distances, nearest


def radius_search(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *_index, query_offsets, point_offsets, radius = rest  # the index only changes speed
    indices, count = nearest(queries, points, query_offsets, point_offsets, None, radius * radius)
    found = indices >= 0
    offsets = torch.nn.functional.pad(count.flatten().cumsum(0), (1, 0))
    return offsets, indices[found], distances(queries, points, indices)[found]
