"""What ``deformable_aggregation`` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._pyramid.reference import taps, tensors


def deformable_aggregation(
    features: Tensor,
    spatial_shapes: Tensor | None,
    level_starts: Tensor | None,
    locations: Tensor,
    weights: Tensor,
    levels: tuple[int, ...],
    drop: bool,
) -> Tensor:
    wide = accumulator(features, locations, weights)
    C, (cams, L, G) = features.shape[2], weights.shape[3:]
    sizes = tensors((spatial_shapes, level_starts, levels), (cams, L), features.device)
    values, live = taps(features, locations[..., None, :], sizes, wide, drop)  # [B, A, P, cams, L, C], [B, A, P, cams, L]
    weights = torch.where(live[..., None], weights.to(wide), 0)
    of_channel = weights[..., None].expand(*weights.shape, C // max(1, G)).flatten(-2)  # [B, A, P, cams, L, C]
    return (of_channel * values).sum((2, 3, 4)).to(features.dtype)
