"""The memory layout of results, and tensors with a layout but without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def memory_format(x: Tensor, keep: bool) -> torch.memory_format:
    """The layout for the gradient of `x` or a result like it: channels-last if `x` is and `keep` asks for it, else contiguous."""
    if keep and not x.is_contiguous():
        for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if x.ndim == rank and x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


def outline(shape: Sequence[int], **how: Any) -> Tensor:
    """A meta tensor of this shape."""
    return torch.empty(tuple(shape), device="meta", **how)


def outline_of(tensor: Tensor) -> Tensor:
    """A meta tensor of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
