"""What ``mm`` means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ...op.dtypes import accumulator
from .._dense.reference import product


def mm(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    wide = accumulator(a, b)
    return product(a.to(wide), b.to(wide)).to(a.dtype)
