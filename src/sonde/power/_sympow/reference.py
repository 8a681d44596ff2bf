"""What the symmetric power means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .basis import root, sequences


def power_of(x: Tensor, power: int, d_tile: int, scaled: bool) -> Tensor:
    """φ of the last dimension, in the dtype of `x`."""
    tiles = x.unflatten(-1, (x.shape[-1] // d_tile, d_tile))
    u = sequences(x.shape[-1] // d_tile, power)
    out = _picked(tiles, [s[0] for s in u])
    for i in range(1, power):
        out = (out[..., None] * _picked(tiles, [s[i] for s in u])[..., None, :]).flatten(-2)
    if scaled:
        out = out * torch.tensor([root(s) for s in u], dtype=x.dtype, device=x.device)[:, None]
    return out.flatten(-2)


def _picked(tiles: Tensor, which: list[int]) -> Tensor:
    return tiles[..., torch.tensor(which, device=tiles.device), :]
