"""Bilinear taps in plain PyTorch: how the operators of the family define sampling an image."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def taps(images: Tensor, samples: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Images ``[B, C, H, W]`` at `samples` ``[B, Q, D, 2]`` → values ``[B, C, Q, D]`` and a mask of samples that see the image.

    A corner outside the image reads an appended zero pixel, whose gradient is dropped. It is masked by ``where`` and not by a
    weight of zero, because an infinite gradient times zero would give the samples a NaN.
    """
    B, C, H, W = images.shape
    x, y = (((u + 1) * size - 1) / 2 for u, size in zip(samples.to(dtype).unbind(-1), (W, H)))
    live = (x >= -1) & (x < W) & (y >= -1) & (y < H) & (H * W > 0)  # false for NaN and for infinities
    x, y = torch.where(live, x, 0), torch.where(live, y, 0)
    x0, y0 = x.floor(), y.floor()
    fx, fy = x - x0, y - y0
    x0, y0 = x0.long(), y0.long()
    pixels = torch.cat([images.flatten(2).to(dtype), images.new_zeros(B, C, 1, dtype=dtype)], -1)

    def corner(dy: int, dx: int, share: Tensor) -> Tensor:
        row, column = y0 + dy, x0 + dx
        inside = live & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        index = torch.where(inside, row * W + column, H * W).flatten(1)[:, None]
        value = pixels.gather(2, index.expand(-1, C, -1)).unflatten(2, x.shape[1:])
        return torch.where(inside[:, None], share * value, 0)

    fx, fy = fx[:, None], fy[:, None]
    top = corner(0, 0, 1 - fx) + corner(0, 1, fx)
    bottom = corner(1, 0, 1 - fx) + corner(1, 1, fx)
    upper, lower = (live & (y0 >= 0))[:, None], (live & (y0 < H - 1))[:, None]
    return torch.where(upper, (1 - fy) * top, 0) + torch.where(lower, fy * bottom, 0), live


def dots(images: Tensor, samples: Tensor, rows: Tensor, depths: Tensor | None, octaves: int, dtype: torch.dtype) -> Tensor:
    """Samples · rows ``[B, h, Q, C − 2·octaves]`` plus their last channels · the encoding of depths → ``[B, h, Q, D]``.

    This is ∂T/∂coef for the form T in ``gpu.py``.
    """
    return dots_of(*taps(images, samples, dtype), rows, depths, octaves)


def dots_of(values: Tensor, live: Tensor, rows: Tensor, depths: Tensor | None, octaves: int) -> Tensor:
    """The same of samples that were taken: values ``[B, C, Q, D]`` and which of them see the image."""
    plain, encoded = values.split([rows.shape[3], 2 * octaves], 1)
    out = (rows.to(values.dtype).transpose(2, 3)[..., None] * plain[:, None]).sum(2)  # [B, h, Q, D]
    if octaves:
        assert depths is not None
        waves = encoding(torch.where(live, depths.to(values.dtype), 0), octaves)  # [B, 2·octaves, Q, D]
        out = out + (waves * encoded).sum(1)[:, None]
    return torch.where(live[:, None], out, 0)


def encoding(depths: Tensor, octaves: int) -> Tensor:
    """Channels ``sin 2πt, cos 2πt`` for t = depth, 2·depth, 4·depth, …; t is reduced to [−½, ½] first, which is exact."""
    t = depths[:, None] * 2.0 ** torch.arange(octaves, device=depths.device, dtype=depths.dtype)[:, None, None]
    r = 2 * math.pi * (t - t.round())
    return torch.stack([r.sin(), r.cos()], 2).flatten(1, 2)
