"""``attention`` by torch's flash kernel for CPUs, for keys and values of one width.

The kernel checks little: it takes for granted that rows are contiguous, that there are as many heads of keys as of queries, and
that some logit of each row is a number. (A row of NaN gives 0.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...op.torch_private import flash_attention, flash_attention_backward

LARGEST = 2.0**14  # logits; gradients take exp(logit − lse), and the rounding error of that difference grows with both


def applies(x: Tensor, y: Tensor, scale: float) -> bool:
    """Whether no logit can be too large, and the scale is positive: the kernel multiplies the −∞ of masked keys by it."""
    return scale > torch.finfo(torch.float32).tiny and _largest(x) * _largest(y) * x.shape[3] * scale < LARGEST


def _largest(x: Tensor) -> float:
    low, high = x.aminmax()
    return max(-low.item(), high.item())


def attend(x: Tensor, y: Tensor, z: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exp."""
    out, lse = flash_attention(*_operands(x, y, z), 0.0, causal, scale=scale)
    return out.contiguous(), lse.contiguous()


def differentiate(
    g: Tensor, x: Tensor, y: Tensor, z: Tensor, o: Tensor, level: Tensor, causal: bool, scale: float, names: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients of q, k and v; `g` is that of the result `o`, `level` its log-sum-exp."""
    d_x, d_y, d_z = flash_attention_backward(_rows(g), *_operands(x, y, z), _rows(o), level, 0.0, causal, scale=scale)
    if x.shape[1] != y.shape[1]:
        d_y, d_z = (t.unflatten(1, (y.shape[1], -1)).sum(2) for t in (d_y, d_z))
    return dict(q=d_x, k=d_y, v=d_z)


def _operands(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
    """Queries, keys and values with equal numbers of heads."""
    groups = x.shape[1] // y.shape[1]
    return [_rows(t) for t in (x, *(t if groups == 1 else t.repeat_interleave(groups, 1) for t in (y, z)))]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def scratch(q: Tensor, k: Tensor, v: Tensor, wide: torch.dtype) -> int:
    """Bytes of operands in the form that the kernel takes, and of its result."""
    return q.shape[0] * q.shape[1] * (3 * q.shape[2] + 2 * k.shape[2]) * q.shape[3] * wide.itemsize
