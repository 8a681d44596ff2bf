"""``weighted_sum`` on CPUs: Numba kernels of ``(start, stop, …)``, each on a slice of the work; slices write to disjoint memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import jit
from ...op.cpu_steps import Array, CpuPass, by_threads
from ...op.dtypes import accumulator


@by_threads
def forward_pass(rows: Tensor, weights: Tensor) -> Pass:
    (B, Q, C), wide = rows.shape, accumulator(rows, weights)
    p = CpuPass(wide, dict(rows=rows, weights=weights))
    out = p.buffer("out", (B, C), wide)
    operands = [Array(p.dense("rows", wide), (B, Q, C)), Array(p.dense("weights", wide), (B, Q))]
    p.run(weighted_total, B, [*operands, Array(out, (B, C))], writes=["out"])
    return p.returns(p.rounded(out, (B, C), rows.dtype)).returning_one()


@by_threads
def backward_pass(grad: Tensor, rows: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool) -> Pass:
    (B, Q, C), wide = rows.shape, accumulator(rows, weights)
    p = CpuPass(wide, dict(grad=grad, rows=rows, weights=weights))
    shapes = dict(grad=(B, C), rows=(B, Q, C), weights=(B, Q))
    operands = [Array(p.dense(name, wide), shape) for name, shape in shapes.items()]
    found = [p.buffer(f"d_{name}", shapes[name], wide) for name in ("rows", "weights")]
    results = [Array(found[0], (B, Q, C)), Array(found[1], (B, Q))]
    writes = [name for name, need in zip(("rows", "weights"), needs) if need]
    p.run(weighted_gradients, B, [*operands, *results], writes=writes)
    rounded = [p.rounded(slot, t.shape, t.dtype) for slot, t, need in zip(found, (rows, weights), needs) if need]
    return p.returns(*rounded)


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
