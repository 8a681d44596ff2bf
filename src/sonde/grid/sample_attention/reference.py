"""What ``sample_attention`` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.dtypes import accumulator
from .._epipolar.reference import dots_of, taps


def sample_attention(
    images: Tensor,
    samples: Tensor,
    queries: Tensor,
    depths: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    views: int = 1,
    num_octaves: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ the result, the log-sum-exp ``[B, h, Q]``, and the result before rounding (with no channels if nothing is rounded)."""
    wide = accumulator(images, samples, queries, depths, values)
    if mask is not None:  # masked samples are absent, like samples that see no pixel
        samples = torch.where(mask[..., None], samples, torch.nan)
    keys, live = taps(images, samples, wide)  # [B·V, C, Q, D], [B·V, Q, D]
    rows = queries[:, None].expand(-1, views, -1, -1, -1).flatten(0, 1)  # [B·V, h, Q, C']
    logits = over_views(scale_of(scale, queries) * dots_of(keys, live, rows, depths, num_octaves), views)  # [B, h, Q, V·D]
    there = torch.ones_like(logits[:, :1], dtype=torch.bool) if mask is None else over_views(mask[:, None], views)
    logits = torch.where(there, logits, -torch.inf)
    some = there.any(-1, keepdim=True)
    weights = torch.where(there, torch.where(some, logits, 0).softmax(-1), 0)
    seen = keys[:, : queries.shape[3]] if values is None else taps(values, samples, wide)[0]
    weights = torch.where(over_views(live[:, None], views), weights, 0)[:, :, None]  # [B, h, 1, Q, V·D]
    out = (weights * over_views(seen, views)[:, None]).sum(-1).transpose(2, 3).contiguous()  # [B, h, Q, C_v]
    rounded = out.to((images if values is None else values).dtype)
    return rounded, logits.logsumexp(-1), out if out.dtype != rounded.dtype else out[..., :0]


def over_views(x: Tensor, views: int) -> Tensor:
    """``[B·V, n, Q, D]`` → ``[B, n, Q, V·D]``: a softmax runs over the samples of all views."""
    return x.unflatten(0, (x.shape[0] // views, views)).permute(0, 2, 3, 1, 4).flatten(3)


def scale_of(scale: float | None, queries: Tensor) -> float:
    """The scale, by default C'^−½."""
    return max(1, queries.shape[3]) ** -0.5 if scale is None else scale
