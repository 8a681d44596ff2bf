"""``attention`` by blocks of queries and torch's BLAS, where ``cpu_flash`` does not apply: e ≠ d, scale ≤ 0, empty, huge inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 20  # logits at a time


def attend(x: Tensor, y: Tensor, z: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exp."""
    out, lse = x.new_empty(*x.shape[:3], z.shape[3]), x.new_empty(x.shape[:3])
    for b in range(len(x)):
        for block, seen, hidden in _blocks(x, y, causal):
            logits = _logits(x[b, :, block], y[b, :, :seen], hidden, scale)
            lse[b, :, block] = logits.logsumexp(-1)
            weights = _grouped(logits.softmax(-1), y.shape[1])
            out[b, :, block] = _multiplied(weights, z[b, :, :seen]).view(*logits.shape[:2], z.shape[3])
    return out, lse


def differentiate(
    g: Tensor, x: Tensor, y: Tensor, z: Tensor, o: Tensor, level: Tensor, causal: bool, scale: float, names: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients in `names`; weights are computed anew from the log-sum-exp."""
    h = y.shape[1]
    found = {name: torch.zeros_like(t) for name, t in zip("qkv", (x, y, z)) if name in names}
    for b in range(len(x)):
        for block, seen, hidden in _blocks(x, y, causal):
            keys, values, queries, incoming = y[b, :, :seen], z[b, :, :seen], x[b, :, block], g[b, :, block]
            weights = (_logits(queries, keys, hidden, scale) - level[b, :, block, None]).exp_()
            if "v" in found:
                found["v"][b, :, :seen] += _multiplied(_grouped(weights, h).mT, _grouped(incoming, h))
            if "q" in found or "k" in found:
                toward = _multiplied(_grouped(incoming, h), values.mT).view(weights.shape)
                dots = (incoming * o[b, :, block]).sum(-1, keepdim=True)
                weights = weights.mul_(toward.sub_(dots)).mul_(scale)
            if "q" in found:
                found["q"][b, :, block] = _multiplied(_grouped(weights, h), keys).view(queries.shape)
            if "k" in found:
                found["k"][b, :, :seen] += _multiplied(_grouped(weights, h).mT, _grouped(queries, h))
    return found


def scratch(q: Tensor, k: Tensor, v: Tensor, wide: torch.dtype) -> int:
    """Bytes of logits and weights, and of the result."""
    return (3 * BLOCK + q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3]) * wide.itemsize


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Batched ``a @ b``; autocast does not touch calls with `out`."""
    return torch.bmm(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def _blocks(x: Tensor, y: Tensor, causal: bool) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Blocks of query rows, the number of keys that a block may see, and a mask of those that are hidden from each row."""
    T, S = x.shape[2], y.shape[2]
    step = max(1, min(256, BLOCK // max(1, S * x.shape[1])))
    keys = torch.arange(max(T, S), device=x.device)
    for start in range(0, T, step):
        rows = slice(start, min(T, start + step))
        seen = min(S, rows.stop) if causal else S
        hidden = keys[:seen] > keys[rows, None] if causal else None
        yield rows, seen, hidden


def _grouped(x: Tensor, h: int) -> Tensor:
    """[hq, rows, d] → [h, groups · rows, d]: heads that share keys are put together."""
    return x.reshape(h, len(x) // max(1, h) * x.shape[1], x.shape[2])


def _logits(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Logits [hq, rows, S] of queries [hq, rows, d] and keys [h, S, d]."""
    out = _multiplied(_grouped(q, len(k)), k.mT).mul_(scale).view(len(q), q.shape[1], k.shape[1])
    return out if hidden is None else out.masked_fill_(hidden, -torch.inf)
