"""The hash of points on CPUs: a pass over their bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....op.cpu import array, jit, run
from ....op.plan import Determinism, Kernel
from .reference import START, STEP, bits_of

PIECE = 2**15  # coordinates


def forward(points: Tensor) -> Tensor:
    B, n = points.shape[0], points.shape[1] * points.shape[2]
    pieces = max(1, -(-n // PIECE))
    parts = torch.empty(B * pieces, dtype=torch.int64, device=points.device)
    bits = bits_of(points.contiguous()).view(-1)
    run(add, B * pieces, n, pieces, np.int64(START), np.int64(STEP), array(bits), array(parts), grain=32)
    return parts.view(B, pieces).sum(1)


def backward(*_args, needs: Sequence[bool], deterministic: bool) -> tuple:
    return ()


def plan(points: Tensor, *, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    return [Kernel(add.__name__, ("hash",), torch.int64, Determinism.BATCH_INVARIANT)]


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
    """Pieces `start` to `stop`."""
    for piece in range(start, stop):
        b, first = piece // pieces, piece % pieces * PIECE
        total = np.int64(0)
        for i in range(first, min(n, first + PIECE)):
            place = ((i + 1) ^ seed) * step
            total += ((place ^ (place >> 32)) | 1) * bits[b * n + i]
        parts[piece] = total
