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
