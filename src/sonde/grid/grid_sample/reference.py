"""What ``grid_sample`` means, in plain PyTorch."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from ...op.layout import memory_format

A = -0.75  # of the cubic kernel, as in torch


def joint_batch(*operands: Tensor) -> int:
    """The batch size of the result: operands with fewer rows repeat each of them equally often."""
    sizes = [t.shape[0] for t in operands]
    return max(sizes) if all(sizes) else 0


def grid_sample(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    wide = accumulator(input, grid)
    sizes = input.shape[2:]
    (n, C), B, points = input.shape[:2], joint_batch(input, grid), grid.shape[1:-1]
    grid = grid[:, None].expand(-1, B // max(1, grid.shape[0]), *grid.shape[1:]).flatten(0, 1)  # [B, …, 2 or 3]
    live = grid.isfinite().all(-1)
    axes = []
    for u, size in zip(torch.where(live[..., None], grid.to(wide), 0).unbind(-1), sizes[::-1]):
        taps, far = _axis(u, size, mode, padding_mode, align_corners)
        live = live & ~far
        axes.append(taps)
    # a tap outside reads an appended zero pixel: masking by a weight of zero would turn infinities into NaN
    pixels = torch.cat([input.flatten(2).to(wide), input.new_zeros(n, C, 1, dtype=wide)], -1)
    out = pixels.new_zeros(())
    for chosen in product(*axes[::-1]):  # z, y, x
        index, inside, weight = torch.zeros_like(live, dtype=torch.long), live, torch.ones((), dtype=wide, device=grid.device)
        for (i, w), size in zip(chosen, sizes):
            inside = inside & (i >= 0) & (i < size)
            index, weight = index * size + i, weight * w
        index = torch.where(inside, index, pixels.shape[-1] - 1).reshape(n, 1, -1 if n else 0)  # all grids of an image in one row
        value = pixels.gather(2, index.expand(-1, C, -1)).unflatten(2, (B // max(1, n), *points)).transpose(1, 2)
        out = out + torch.where(inside[:, None], value.flatten(0, 1) * weight[:, None], 0)  # masks the gradient, too
    return out.to(input.dtype).contiguous(memory_format=memory_format(input, True))


def _axis(u: Tensor, size: int, mode: str, padding_mode: str, align_corners: bool) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Along one axis, the taps (pixel, weight) of each sample, and which samples are too far away to have any."""
    at = u.detach()
    x = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
    rate = torch.full_like(x, (size - 1) / 2 if align_corners else size / 2)  # d x / d u
    far = torch.zeros_like(x, dtype=torch.bool)
    if mode != "bicubic":
        x, rate, far = _pad(x, rate, size, padding_mode, align_corners)
    x, far = _within(x, size, far, mode, padding_mode)
    if mode == "nearest":  # halves round to the even pixel; the grid has a gradient, which is always zero
        return [(x.round().long(), 1 + torch.where(torch.zeros_like(far), u, 0))], far
    x0 = x.floor()
    # the rate is a factor, as in torch: where it is zero, at the border, an infinite gradient becomes NaN
    t, i = x - x0 + rate * (u - at), x0.long()
    if mode == "bilinear":
        return [(i, 1 - t), (i + 1, t)], far
    weights = (_outer(t + 1), _inner(t), _inner(1 - t), _outer(2 - t))
    return [(_fold(i + k, size, padding_mode, align_corners), w) for k, w in zip((-1, 0, 1, 2), weights)], far


def _pad(x: Tensor, rate: Tensor, size: int, padding_mode: str, align_corners: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Clamp or reflect positions into the image; the derivative is zero at the border."""
    far = torch.zeros_like(x, dtype=torch.bool)
    if padding_mode == "zeros":
        return x, rate, far
    if padding_mode == "reflection":
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if span < 1:
            return 0 * x, 0 * rate, far
        before, a = x < low, (x - low).abs()
        far = a >= 2**30
        a = torch.where(far, 0, a)
        whole = a.floor()
        i = whole.long()  # an integer remainder is exact
        rest = (i % span).to(x) + (a - whole)
        back = i // span % 2 == 1
        x = torch.where(back, span - rest, rest) + low
        rate = torch.where(back ^ before, -rate, rate)
    rate = torch.where((x > 0) & (x < size - 1), rate, 0)
    return torch.where(x <= 0, 0, torch.where(x >= size - 1, size - 1, x)), rate, far


def _within(x: Tensor, size: int, far: Tensor, mode: str, padding_mode: str) -> tuple[Tensor, Tensor]:
    """Limit positions to what fits an integer; beyond all taps, a sample sees nothing, or the border, at any distance."""
    if padding_mode == "zeros" or mode != "bicubic":
        far = far | ~((x >= -3) & (x < size + 3))
    elif padding_mode == "reflection":
        far = far | ~(x.abs() < 2**30)
    else:
        x = torch.where(x < -3, -3, torch.where(x > size + 2, size + 2, x))
    return torch.where(far, 0, x), far


def _fold(i: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    """The pixel that tap `i` reads."""
    if padding_mode == "zeros" or size == 0:
        return i
    if padding_mode == "border":
        return i.clamp(0, size - 1)
    period, last = (2 * size - 2, 2 * size - 2) if align_corners else (2 * size, 2 * size - 1)
    if period == 0:
        return torch.zeros_like(i)
    i = i % period
    return torch.where(i < size, i, last - i)


def _inner(t: Tensor) -> Tensor:
    """The cubic kernel for 0 ≤ t ≤ 1."""
    return ((A + 2) * t - (A + 3)) * t * t + 1


def _outer(t: Tensor) -> Tensor:
    """The cubic kernel for 1 ≤ t ≤ 2."""
    return ((A * t - 5 * A) * t + 8 * A) * t - 4 * A
