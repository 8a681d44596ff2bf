"""Reading a feature pyramid in plain PyTorch, for the definitions of the operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .levels import Described


def tensors(described: Described, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Height, width and first row of every level, as integer tensors of this shape."""
    spatial_shapes, level_starts, levels = described
    if spatial_shapes is None or level_starts is None:
        h, w, start = torch.tensor(list(levels), dtype=torch.int64, device=device).reshape(*shape, 3).unbind(-1)
        return h, w, start
    h, w = spatial_shapes.to(device, torch.int64).unbind(-1)
    return h.reshape(*shape), w.reshape(*shape), level_starts.to(device, torch.int64).reshape(*shape)


def taps(
    rows: Tensor, locations: Tensor, levels: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, drop: bool
) -> tuple[Tensor, Tensor]:
    """Rows ``[N, S, C]`` sampled at `locations` ``[N, …, 2]`` in `levels` → values ``[N, …, C]``, and whether each sees a pixel.

    A corner outside its level or the rows reads an appended row of zeros: no masking by multiplication, and its gradient goes to
    that row. It is also masked out of the gradient of the locations, since inf · 0 is NaN.
    """
    (N, S, C), (H, W, start) = rows.shape, levels
    u, v = locations.to(dtype).unbind(-1)
    x, y = u * W.to(dtype) - 0.5, v * H.to(dtype) - 0.5
    live = (x >= -1) & (x < W) & (y >= -1) & (y < H) & (W > 0) & (H > 0)  # false for NaN and for infinities
    if drop:
        live = live & (u > 0) & (u < 1) & (v > 0) & (v < 1)
    x, y = torch.where(live, x, 0), torch.where(live, y, 0)
    x0, y0 = x.floor(), y.floor()
    fx, fy = (x - x0)[..., None], (y - y0)[..., None]
    x0, y0 = x0.long(), y0.long()
    pixels = torch.cat([rows.to(dtype), rows.new_zeros(N, 1, C, dtype=dtype)], 1)

    def corner(dy: int, dx: int, share: Tensor) -> Tensor:
        row, column = y0 + dy, x0 + dx
        index = start + row * W + column
        inside = live & (row >= 0) & (row < H) & (column >= 0) & (column < W) & (index >= 0) & (index < S)
        index = torch.where(inside, index, S).flatten(1)[..., None]
        value = pixels.gather(1, index.expand(-1, -1, C)).unflatten(1, x.shape[1:])
        return torch.where(inside[..., None], share * value, 0)

    top = corner(0, 0, 1 - fx) + corner(0, 1, fx)
    bottom = corner(1, 0, 1 - fx) + corner(1, 1, fx)
    upper, lower = (live & (y0 >= 0))[..., None], (live & (y0 < H - 1))[..., None]
    return torch.where(upper, (1 - fy) * top, 0) + torch.where(lower, fy * bottom, 0), live
