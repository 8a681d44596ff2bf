"""What ``attention`` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._dense.reference import product, residual_dtype, scale_of


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulator(q, k, v)
    groups = q.shape[1] // max(1, k.shape[1])
    keys, values = (x.to(wide).repeat_interleave(groups, 1) for x in (k, v))
    logits = scale_of(q, scale) * product(q.to(wide), keys.mT)
    if causal:
        i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        logits = logits.masked_fill(j > i[:, None], -torch.inf)
    out = product(logits.softmax(-1), values)
    rounded = out.to(q.dtype)
    dtype = residual_dtype(wide, q, k, v)
    lost = (out - rounded.to(wide)).detach().to(dtype) if dtype else rounded.detach()[..., :0]
    return rounded, logits.detach().logsumexp(-1), lost
