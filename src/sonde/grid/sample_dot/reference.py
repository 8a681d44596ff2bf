"""What ``sample_dot`` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._epipolar.reference import dots


def sample_dot(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None = None, num_octaves: int = 0) -> Tensor:
    wide = accumulator(images, samples, queries, depths)
    return dots(images, samples, queries, depths, num_octaves, wide).to(torch.promote_types(images.dtype, queries.dtype))
