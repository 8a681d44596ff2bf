"""What ``sample_dot`` means, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._epipolar.reference import taps


def sample_dot(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None = None, num_octaves: int = 0) -> Tensor:
    wide = accumulator(images, samples, queries, depths)
    values, live = taps(images, samples, wide)  # [B, C, Q, D], [B, Q, D]
    plain, encoded = values.split([queries.shape[3], 2 * num_octaves], 1)
    out = (queries.to(wide).transpose(2, 3)[..., None] * plain[:, None]).sum(2)  # [B, h, Q, D]
    if num_octaves:
        assert depths is not None
        waves = encoding(torch.where(live, depths.to(wide), 0), num_octaves)  # [B, 2·octaves, Q, D]
        out = out + (waves * encoded).sum(1)[:, None]
    return torch.where(live[:, None], out, 0).to(torch.promote_types(images.dtype, queries.dtype))


def encoding(depths: Tensor, num_octaves: int) -> Tensor:
    """``sin 2πt, cos 2πt`` for t = depth, 2·depth, 4·depth, … as channels; t is reduced to [−½, ½] first, which is exact."""
    t = depths[:, None] * 2.0 ** torch.arange(num_octaves, device=depths.device, dtype=depths.dtype)[:, None, None]
    r = 2 * math.pi * (t - t.round())
    return torch.stack([r.sin(), r.cos()], 2).flatten(1, 2)
