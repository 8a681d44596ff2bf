"""Rows of features on CPUs: one dtype, one layout, their products and weighted sums, exact for any number of terms.

Terms are added in blocks: one after the other within a block, and the blocks' sums together with what rounding loses of them
(lanes), or in float64 (numbers). Plain float32 sums of 10⁵ terms lose three digits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, exact_part, part
from ...op.simd import LANES, everywhere, fma, load, spread, store, total, where

BLOCK = 32  # terms


def rates(sigma: Tensor | None, width: float, B: int) -> np.ndarray:
    """1/σ of every row of the batch, in float64, since σ may be out of float32's range; finite, so that 0 · rate stays 0."""
    widths = torch.full((B,), width, dtype=torch.float64, device="cpu") if sigma is None else sigma.detach().double()
    return array(widths.reciprocal().clamp(max=torch.finfo(torch.float64).max))


@exact_part
def falls(near, d, rate):
    """The logarithm of what a point at d weighs, if one at `near` weighs 1."""
    return (np.float64(near) - np.float64(d)) * rate


@part
def dot(x, i, y, j, F):
    """x_i · y_j in float64: the same bits wherever it is asked for."""
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
    """x/σ; said apart, so that nobody takes 1/σ times anything else first, and 0 stays 0."""
    return x * rate


@exact_part
def added(v, whole, lost):
    """A sum of lanes and one more term, and what rounding has lost of it."""
    s = whole + v
    t = s - whole
    return s, lost + ((whole - (s - t)) + (v - t))


@exact_part
def together(whole, lost):
    """Both; after an infinite term nothing is lost that counts."""
    return where(lost == lost, whole + lost, whole)


@part
def folded(row, c):
    """What was added to a row of two, in lanes."""
    return together(load(row, 0, c, row.shape[1]), load(row, 1, c, row.shape[1]))


@exact_part
def finite(v):
    """Whether all lanes are."""
    return everywhere(v - v == 0.0)


@part
def add_block(n, weights, rows, x, row, first):
    """Add Σ weights[e]·x[rows[e]] over n terms to ``row[0]``, to ``row[1]`` what rounding loses; the `first` block begins both."""
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
