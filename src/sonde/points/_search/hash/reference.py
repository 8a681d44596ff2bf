"""The definition of the hash of points, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

STEP = -7046029254386353131  # 2⁶⁴ over the golden ratio, odd
START = 0x5DEECE66D  # wider than 32 bits: otherwise torch.compile narrows the positions to int32 before they are multiplied


def point_hash(points: Tensor) -> Tensor:
    """``[B, N, D]`` → ``[B]``: Σ w_i·bits_i over all coordinates of a row, in wrapping 64-bit integers, in any order.

    Weights are odd, so that a change of one coordinate always changes the hash, and mixed from the position, so that swapped
    coordinates do, too.
    """
    bits = bits_of(points).flatten(1)
    place = (torch.arange(1, bits.shape[1] + 1, device=points.device) ^ START) * STEP
    return (((place ^ (place >> 32)) | 1) * bits).sum(1)


def bits_of(points: Tensor) -> Tensor:
    """The bits of coordinates as integers; half precision is converted to float32 first, which is exact."""
    points = points.detach()
    return points.view(torch.int64) if points.dtype == torch.float64 else points.float().view(torch.int32)
