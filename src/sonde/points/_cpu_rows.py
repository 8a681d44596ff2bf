"""Rows of features on CPUs: one dtype, one layout, products of two of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..op.cpu import array, exact_part, part
from ..op.lanes import LANES, fma, load, spread, total
from ..op.memory import dense, is_dense


def copied(x: Tensor, wide: torch.dtype) -> int:
    """Bytes of what `dense` makes."""
    return 0 if is_dense(x, wide) else x.numel() * wide.itemsize


def widths(sigma: Tensor | None, width: float, B: int, wide: torch.dtype) -> np.ndarray:
    """σ of every row of the batch."""
    return array(torch.full((B,), width, dtype=wide, device="cpu") if sigma is None else dense(sigma, wide))


@exact_part
def falls(near, d, sigma):
    """The logarithm of what a point at d weighs, if one at `near` weighs 1; rounded as written, for 1/σ may be infinite."""
    return (near - d) / sigma


@part
def dot(x, i, y, j, F):
    """x_i · y_j: the same bits wherever it is asked for."""
    v = spread(x.dtype.type(0))
    for c in range(0, F, LANES):
        v = fma(load(x, i, c, F), load(y, j, c, F), v)
    return total(v)
