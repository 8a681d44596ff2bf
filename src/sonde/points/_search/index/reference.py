"""The definition of an index, in plain PyTorch: points in some order, non-finite ones last, and their bounding boxes."""

from __future__ import annotations

import torch
from torch import Tensor


def nodes(N: int, segments: int) -> int:
    """An upper bound on the number of boxes: leaves of 16 points and all levels above them, for every segment."""
    return N // 4 + segments + 4


def point_index(points: Tensor, point_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The simplest index: a single box around everything."""
    B, N, D = points.shape
    finite = points.isfinite().all(-1)
    order = (~finite).to(torch.int32).sort(dim=-1, stable=True).indices
    inf = points.new_full((), torch.inf)
    ordered = torch.where(finite[..., None], points, inf).gather(1, order[..., None].expand(-1, -1, D))
    boxes = points.new_full((B, nodes(N, 1 if point_offsets is None else point_offsets.shape[0] - 1), 2, D), torch.inf)
    if N:
        box = torch.stack([ordered.amin(1), torch.where(finite[..., None], points, -inf).amax(1)], 1)[:, None]
        boxes = torch.cat([box, boxes[:, 1:]], 1)
    return order.to(torch.int32), ordered, boxes
