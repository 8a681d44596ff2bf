"""``attention`` by blocks of queries and torch's BLAS, where ``cpu_flash`` does not apply: e ≠ d, scale ≤ 0, empty, huge inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._dense.cpu import multiply

BLOCK = 1 << 20  # logits at a time
FEW = 64  # blocks that are added in float32


def attend(x: Tensor, y: Tensor, z: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exp."""
    out, lse = x.new_empty(*x.shape[:3], z.shape[3]), x.new_empty(x.shape[:3])
    for part, block, seen, hidden in _blocks(x, y, causal):
        queries, keys, values = (t.flatten(0, 1) for t in (x[part, :, block], y[part, :, :seen], z[part, :, :seen]))
        logits = _logits(queries, keys, hidden, scale)
        lse[part, :, block] = logits.logsumexp(-1).view_as(lse[part, :, block])
        weights = _grouped(logits.softmax(-1), len(keys))
        out[part, :, block] = multiply(weights, values).view_as(out[part, :, block])
    return out, lse


def differentiate(
    g: Tensor, x: Tensor, y: Tensor, z: Tensor, o: Tensor, level: Tensor, causal: bool, scale: float, names: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients in `names`; weights are computed anew from the log-sum-exp."""
    wide = torch.float64 if x.shape[2] > FEW * _rows_at_a_time(x, y) else x.dtype  # of sums over blocks
    dtypes = dict(q=x.dtype, k=wide, v=wide)
    found = {name: torch.zeros_like(t, dtype=dtypes[name]) for name, t in zip("qkv", (x, y, z)) if name in names}
    for part, block, seen, hidden in _blocks(x, y, causal):
        keys, values = (t[part, :, :seen].flatten(0, 1) for t in (y, z))
        queries, incoming, result, lse = (t[part, :, block].flatten(0, 1) for t in (x, g, o, level))
        h, of_keys = len(keys), y[part, :, :seen].shape[:3]
        weights = (_logits(queries, keys, hidden, scale) - lse[..., None]).exp_()
        if "v" in found:
            found["v"][part, :, :seen] += multiply(_grouped(weights, h).mT, _grouped(incoming, h)).unflatten(0, of_keys[:2])
        if "q" in found or "k" in found:
            toward = multiply(_grouped(incoming, h), values.mT).view(weights.shape)
            dots = (incoming * result).sum(-1, keepdim=True)
            weights = weights.mul_(toward.sub_(dots)).mul_(scale)
        if "q" in found:
            found["q"][part, :, block] = multiply(_grouped(weights, h), keys).view_as(x[part, :, block])
        if "k" in found:
            found["k"][part, :, :seen] += multiply(_grouped(weights, h).mT, _grouped(queries, h)).unflatten(0, of_keys[:2])
    return found


def scratch(q: Tensor, k: Tensor, v: Tensor, wide: torch.dtype) -> int:
    """Bytes of logits and weights, and of the result."""
    return (3 * BLOCK + q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3]) * wide.itemsize


def _blocks(x: Tensor, y: Tensor, causal: bool) -> Iterator[tuple[slice, slice, int, Tensor | None]]:
    """Some of the batch and some of its query rows, the number of keys that these see, and a mask of those hidden from each."""
    B, hq, T, _ = x.shape
    S, step = y.shape[2], _rows_at_a_time(x, y)
    several = max(1, BLOCK // max(1, S * hq * step))
    keys = torch.arange(max(T, S), device=x.device)
    for start in range(0, T, step):
        rows = slice(start, min(T, start + step))
        seen = min(S, rows.stop) if causal else S
        hidden = keys[:seen] > keys[rows, None] if causal else None
        for first in range(0, B, several):
            yield slice(first, min(B, first + several)), rows, seen, hidden


def _rows_at_a_time(x: Tensor, y: Tensor) -> int:
    return max(1, min(256, x.shape[2], BLOCK // max(1, x.shape[1] * y.shape[2])))


def _grouped(x: Tensor, h: int) -> Tensor:
    """[hq, rows, d] → [h, groups · rows, d]: heads that share keys are put together."""
    return x.reshape(h, len(x) // max(1, h) * x.shape[1], x.shape[2])


def _logits(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Logits [hq, rows, S] of queries [hq, rows, d] and keys [h, S, d]."""
    out = multiply(_grouped(q, len(k)), k.mT).mul_(scale).view(len(q), q.shape[1], k.shape[1])
    return out if hidden is None else out.masked_fill_(hidden, -torch.inf)
