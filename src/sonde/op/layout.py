"""In which order results lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_format(x: Tensor, keep: bool) -> torch.memory_format:
    """The layout of the gradient of `x`, or of a result that looks like it: channels-last where `x` is, if it is to `keep` that."""
    if keep and not x.is_contiguous():
        for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if x.ndim == rank and x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format
