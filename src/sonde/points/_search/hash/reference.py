"""What the hash of points is, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

STEP = -7046029254386353131  # 2⁶⁴ over the golden ratio, odd
START = 0x5DEECE66D  # wider than 32 bits, to which a compiled graph would narrow the numbers of places before they meet STEP


def point_hash(points: Tensor) -> Tensor:
    """``[B]`` of ``[B, N, D]``: Σ w_i·bits_i over a row's coordinates, in 64-bit integers that wrap around.

    Weights are odd, so that no change of one coordinate goes unseen, and follow no pattern of places, so that no exchange of
    some does. The sum has the same value in any order.
    """
    bits = bits_of(points).flatten(1)
    place = (torch.arange(1, bits.shape[1] + 1, device=points.device) ^ START) * STEP
    return (((place ^ (place >> 32)) | 1) * bits).sum(1)


def bits_of(points: Tensor) -> Tensor:
    """Coordinates as integers; half precision as float32 has it, which is as many different numbers."""
    points = points.detach()
    return points.view(torch.int64) if points.dtype == torch.float64 else points.float().view(torch.int32)
