"""The dtype in which sums are accumulated."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(*operands: Tensor | None) -> torch.dtype:
    """float32, or float64 when any operand is float64."""
    for t in operands:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32
