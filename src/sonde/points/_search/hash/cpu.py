"""The hash of points on CPUs: one pass over their bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....jit.steps import Pass
from ....op.cpu import array, jit
from ....op.cpu_steps import Array, CpuPass, by_threads
from .reference import START, STEP, bits_of

PIECE = 2**15  # coordinates per task


@by_threads
def forward_pass(points: Tensor) -> Pass:
    B, n = points.shape[0], points.shape[1] * points.shape[2]
    p, pieces = CpuPass(torch.int64, dict(points=points)), max(1, -(-n // PIECE))
    own = p.contiguous("points")
    assert own is not None
    converted = points.shape if points.dtype.itemsize < 4 else ()
    bits = p.derive("bits", own, lambda x: array(bits_of(x).view(-1)), converted, torch.int32)
    parts = p.buffer("parts", (B, pieces), torch.int64)
    args = n, pieces, np.int64(START), np.int64(STEP), bits, Array(parts, (B * pieces,))
    p.run(add, B * pieces, args, grain=32)
    gives = [("hash", (B,), torch.int64)]
    return p.returns(*p.call("torch.sum", lambda x: x.sum(1), [parts], gives, writes=["hash"])).returning_one()


@jit
def add(
    start,
    stop,
    n,
    pieces,
    seed,
    step,
    bits,  # [B*n]
    parts,  # [B*pieces]
):
    """Partial sums of pieces `start` to `stop`."""
    for piece in range(start, stop):
        b, first = piece // pieces, piece % pieces * PIECE
        total = np.int64(0)
        for i in range(first, min(n, first + PIECE)):
            place = ((i + 1) ^ seed) * step
            total += ((place ^ (place >> 32)) | 1) * bits[b * n + i]
        parts[piece] = total
