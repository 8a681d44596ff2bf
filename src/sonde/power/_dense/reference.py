"""Products in plain PyTorch that autocast does not round."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the dtype of both."""
    kind = a.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return a @ b
    return a @ b


def residual_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """The dtype of the result's rounding error, which the gradient needs; None if the result is not rounded."""
    wide = accumulator(q, k, v)
    if q.dtype == wide:
        return None
    return q.dtype if q.dtype == k.dtype == v.dtype else wide
