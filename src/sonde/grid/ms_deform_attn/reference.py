"""What ``ms_deform_attn`` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._pyramid.reference import taps, tensors


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor | None,
    level_starts: Tensor | None,
    locations: Tensor,
    weights: Tensor,
    levels: tuple[int, ...],
    logits: bool,
) -> Tensor:
    wide = accumulator(value, locations, weights)
    (B, _, h, D), (Q, L, P) = value.shape, (weights.shape[1], *weights.shape[3:])
    weights = weights.to(wide)
    if logits:
        weights = weights.flatten(3).softmax(-1).unflatten(3, (L, P))
    sizes = tensors((spatial_shapes, level_starts, levels), (L, 1), value.device)
    of_head, at = value.transpose(1, 2).flatten(0, 1), locations.transpose(1, 2).flatten(0, 1)  # [B·h, S, D], [B·h, Q, L, P, 2]
    values, live = taps(of_head, at, sizes, wide, drop=False)
    weights = torch.where(live, weights.transpose(1, 2).flatten(0, 1), 0)
    out = (weights[..., None] * values).sum((2, 3))  # [B·h, Q, D]
    return out.unflatten(0, (B, h)).transpose(1, 2).reshape(B, Q, h * D).to(value.dtype)
