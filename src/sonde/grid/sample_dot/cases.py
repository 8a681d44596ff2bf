"""Named inputs of ``sample_dot``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._epipolar import cases as epipolar

SMALL = epipolar.SMALL
BENCH = epipolar.EPIPOLAR
TARGETS = epipolar.TARGETS


def make(octaves: int = 0, **sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Arguments of ``sample_dot``."""
    made = epipolar.epipolar(octaves=octaves, **sizes)
    return made["images"], made["samples"], made["queries"], made["depths"], octaves


def eager(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor, num_octaves: int) -> Tensor:
    """What a user of plain PyTorch writes."""
    values = epipolar.every_sample(images, samples)
    plain, encoded = values.split([queries.shape[3], 2 * num_octaves], 1)
    out = torch.einsum("bhqc,bcqd->bhqd", queries.to(values.dtype), plain)
    if num_octaves:
        frequencies = 2 * math.pi * 2.0 ** torch.arange(num_octaves, device=depths.device, dtype=depths.dtype)
        phase = frequencies[:, None, None] * depths[:, None]
        waves = torch.stack([phase.sin(), phase.cos()], 2).flatten(1, 2)
        out = out + (waves * encoded).sum(1)[:, None]
    return out.to(torch.promote_types(images.dtype, queries.dtype))


def count(B: int, C: int, H: int, W: int, Q: int, D: int, heads: int, octaves: int = 0, **_) -> dict[str, int]:
    """Elements that must be read and written at least once, and bilinear taps (samples times channels)."""
    channels = C + 2 * octaves
    read = B * (channels * H * W + Q * D * (2 + (octaves > 0)) + heads * Q * C)
    return dict(read=read, written=B * heads * Q * D, taps=B * Q * D * channels)
