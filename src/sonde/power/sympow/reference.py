"""What ``sympow`` means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ...op.dtypes import accumulator
from .._sympow.reference import power_of


def sympow(x: Tensor, power: int, d_tile: int, scaled: bool) -> Tensor:
    return power_of(x.to(accumulator(x)), power, d_tile, scaled).to(x.dtype)
