"""What ``sample_sum`` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._epipolar.reference import taps


def sample_sum(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    wide = accumulator(images, samples, weights)
    values, live = taps(images, samples, wide)  # [B, C, Q, D], [B, Q, D]
    weights = torch.where(live[:, None], weights.to(wide), 0)  # [B, h, Q, D]
    out = (weights[:, :, None] * values[:, None]).sum(-1)  # [B, h, C, Q]
    return out.transpose(2, 3).contiguous().to(images.dtype)
