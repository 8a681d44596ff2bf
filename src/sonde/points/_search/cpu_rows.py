"""Dot products and weighted sums of feature rows on CPUs, accurate for any number of terms.

Terms are summed in blocks. Within a block the sum is plain; block sums are added with compensation (SIMD vectors) or in float64
(scalars). A plain float32 sum of 10⁵ terms would lose three digits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, exact_part, part
from ...op.simd import LANES, everywhere, fma, load, spread, store, total, where

BLOCK = 32  # terms of a plain sum


def rates(sigma: Tensor | None, width: float, B: int) -> np.ndarray:
    """1/σ for every row of the batch, in float64 since σ may be out of float32's range, clamped so that 0 · rate stays 0."""
    widths = torch.full((B,), width, dtype=torch.float64, device="cpu") if sigma is None else sigma.detach().double()
    return array(widths.reciprocal().clamp(max=torch.finfo(torch.float64).max))


@exact_part
def falls(near, d, rate):
    """The log of the weight of a point at distance d, relative to one at distance `near`."""
    return (np.float64(near) - np.float64(d)) * rate


@part
def dot(x, i, y, j, F):
    """x_i · y_j in float64; every caller gets the same bits."""
    v = spread(x.dtype.type(0))
    for c in range(0, min(F, BLOCK * LANES), LANES):
        v = fma(load(x, i, c, F), load(y, j, c, F), v)
    found = np.float64(total(v))
    for first in range(BLOCK * LANES, F, BLOCK * LANES):
        v = spread(x.dtype.type(0))
        for c in range(first, min(F, first + BLOCK * LANES), LANES):
            v = fma(load(x, i, c, F), load(y, j, c, F), v)
        found += total(v)
    return found


@exact_part
def times(x, rate):
    """x/σ; an exact part, so that LLVM does not reassociate the product and overflow: 0 must stay 0."""
    return x * rate


@exact_part
def added(v, whole, lost):
    """Compensated addition of vectors: whole + v, and `lost` with its rounding error."""
    s = whole + v
    t = s - whole
    return s, lost + ((whole - (s - t)) + (v - t))


@exact_part
def together(whole, lost):
    """The compensated sum; the compensation is dropped if it is NaN, after an infinite term."""
    return where(lost == lost, whole + lost, whole)


@part
def folded(row, c):
    """One vector of the sum that ``add_block`` keeps in ``row[0]`` and ``row[1]``."""
    return together(load(row, 0, c, row.shape[1]), load(row, 1, c, row.shape[1]))


@exact_part
def finite(v):
    """Whether all lanes are finite."""
    return everywhere(v - v == 0.0)


@part
def add_block(n, weights, rows, x, row, first):
    """Add Σ weights[e]·x[rows[e]] over n terms to ``row[0]`` and the rounding error to ``row[1]``; the `first` block sets both."""
    F, zero = x.shape[1], spread(row.dtype.type(0))
    for c in range(0, F, LANES):
        v = zero
        for e in range(n):
            v = fma(weights[e], load(x, rows[e], c, F), v)
        lost = zero
        if not first:
            v, lost = added(v, load(row, 0, c, row.shape[1]), load(row, 1, c, row.shape[1]))
        store(v, row, 0, c)
        store(lost, row, 1, c)
