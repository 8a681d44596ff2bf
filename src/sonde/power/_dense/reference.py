"""What the definitions share: products that autocast does not round, the dtype of rounding errors, the scale of logits."""

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


def scale_of(q: Tensor, scale: float | None) -> float:
    """The given scale, or 1/√d. Computed here, because a graph with varying sizes cannot hold it as an argument."""
    return q.shape[-1] ** -0.5 if scale is None else scale
