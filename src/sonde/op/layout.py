"""Memory layout of results, and tensors that have a layout but no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def memory_format(x: Tensor, keep: bool) -> torch.memory_format:
    """The layout of the gradient of `x`, or of a result that looks like it: channels-last where `x` is, if it is to `keep` that."""
    if keep and not x.is_contiguous():
        for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if x.ndim == rank and x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


def outline(shape: Sequence[int], **how: Any) -> Tensor:
    """A tensor of this shape without memory."""
    return torch.empty(tuple(shape), device="meta", **how)


def outline_of(tensor: Tensor) -> Tensor:
    """Its shape, strides and dtype, without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
