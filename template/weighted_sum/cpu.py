"""``weighted_sum`` on CPUs: Numba kernels of ``(start, stop, …)``, each over a slice of the work that no other writes to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, jit, run
from ...op.dtypes import accumulator
from ...op.memory import dense, empty
from ...op.plan import Determinism, Kernel


def forward(rows: Tensor, weights: Tensor) -> Tensor:
    wide = accumulator(rows, weights)
    out = empty((rows.shape[0], rows.shape[2]), wide)
    run(weighted_total, rows.shape[0], *_arrays(wide, rows, weights), array(out))
    return out.to(rows.dtype)


def backward(grad: Tensor, rows: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool) -> list[Tensor]:
    wide = accumulator(rows, weights)
    d_rows, d_weights = empty(rows.shape, wide), empty(weights.shape, wide)
    run(weighted_gradients, rows.shape[0], *_arrays(wide, grad, rows, weights), array(d_rows), array(d_weights))
    found = (d_rows.to(rows.dtype), d_weights.to(weights.dtype))
    return [gradient for gradient, need in zip(found, needs) if need]


def plan(rows: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    """What the two above launch, and the bytes that they hold beyond arguments and results."""
    wide, same = accumulator(rows, weights), Determinism.BATCH_INVARIANT
    (B, Q, C), copies = rows.shape, sum(t.numel() for t in (rows, weights) if t.dtype != wide or not t.is_contiguous())
    results = B * C if rows.dtype != wide else 0
    found = [Kernel(weighted_total.__name__, ("out",), wide, same, (copies + results) * wide.itemsize)]
    if any(needs):
        writes = tuple(name for name, need in zip(("rows", "weights"), needs) if need)
        held = copies + results + B * Q * (C + 1)
        found.append(Kernel(weighted_gradients.__name__, writes, wide, same, held * wide.itemsize, "backward"))
    return found


def _arrays(wide: torch.dtype, *tensors: Tensor) -> list[np.ndarray]:
    return [array(dense(t, wide)) for t in tensors]


@jit
def weighted_total(start, stop, rows, weights, out):
    """Batches `start` to `stop`; sums run in float64, which holds any number of float32 terms."""
    for b in range(start, stop):
        for c in range(rows.shape[2]):
            total = 0.0
            for q in range(rows.shape[1]):
                total += np.float64(weights[b, q]) * rows[b, q, c]
            out[b, c] = total


@jit
def weighted_gradients(start, stop, grad, rows, weights, d_rows, d_weights):
    for b in range(start, stop):
        for q in range(rows.shape[1]):
            total = 0.0
            for c in range(rows.shape[2]):
                d_rows[b, q, c] = weights[b, q] * grad[b, c]
                total += np.float64(grad[b, c]) * rows[b, q, c]
            d_weights[b, q] = total
