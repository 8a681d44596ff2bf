"""What ``weighted_sum`` means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ...op.dtypes import accumulator


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    wide = accumulator(rows, weights)
    return (weights.to(wide)[..., None] * rows.to(wide)).sum(1).to(rows.dtype)
