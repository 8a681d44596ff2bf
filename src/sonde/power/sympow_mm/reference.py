"""What ``sympow_mm`` means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ...op.dtypes import accumulator
from .._dense.reference import product
from .._sympow.reference import power_of


def sympow_mm(
    a: Tensor, b: Tensor, accumulate: Tensor | None, power: int, expand: str, d_tile: int, scaled: bool, alpha: float, beta: float,
    tf32: bool,
) -> Tensor:  # fmt: skip
    wide = accumulator(a, b, accumulate)
    rows = a.to(wide) if expand == "k" else a.to(wide).mT
    phi = power_of(rows, power, d_tile, scaled)
    out = alpha * product(phi if expand == "k" else phi.mT, b.to(wide))
    if accumulate is not None:
        out = out + beta * accumulate.to(wide)
    return out.to(a.dtype)
