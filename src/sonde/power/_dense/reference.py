"""Products in plain PyTorch that autocast does not round."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the dtype of both."""
    kind = a.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return a @ b
    return a @ b


def residual_dtype(wide: torch.dtype, *operands: Tensor) -> torch.dtype | None:
    """The dtype of a result's rounding error, which its gradient needs; None if the result is not rounded."""
    if operands[0].dtype == wide:
        return None
    return operands[0].dtype if len({x.dtype for x in operands}) == 1 else wide
