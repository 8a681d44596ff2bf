"""Named inputs of ``sample_sum``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._epipolar import cases as epipolar

SMALL = epipolar.SMALL
BENCH = epipolar.EPIPOLAR
TARGETS = epipolar.TARGETS


def make(**sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of ``sample_sum``."""
    made = epipolar.epipolar(**sizes)
    return made["images"], made["samples"], made["weights"]


def eager(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    """What a user of plain PyTorch writes."""
    values = epipolar.every_sample(images, samples)
    return torch.einsum("bhqd,bcqd->bhqc", weights.to(values.dtype), values).to(images.dtype)


def count(B: int, C: int, H: int, W: int, Q: int, D: int, heads: int, octaves: int = 0, **_) -> dict[str, int]:
    """Elements that must be read and written at least once, and bilinear taps (samples times channels)."""
    C += 2 * octaves
    return dict(read=B * (C * H * W + Q * D * (2 + heads)), written=B * heads * Q * C, taps=B * Q * D * C)
