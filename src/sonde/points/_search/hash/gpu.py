"""The hash of points on GPUs: one pass over their bits. Integers that wrap around add up to the same in any order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....op.gpu import cdiv, launch
from ....op.plan import Determinism, Kernel
from .reference import START, STEP, bits_of

BLOCK = 1024
_START, _STEP = tl.constexpr(START), tl.constexpr(STEP)


def forward(points: Tensor) -> Tensor:
    B, n = points.shape[0], points.shape[1] * points.shape[2]
    found, blocks = torch.zeros(B, dtype=torch.int64, device=points.device), cdiv(n, BLOCK)
    launch(_hash, (bits_of(points.contiguous()), found), (B * blocks, 1, 1), (n, blocks), (BLOCK,), 4)
    return found


def backward(*_args, needs: list[bool], deterministic: bool) -> list[Tensor]:
    return []


def plan(points: Tensor, *, needs: list[bool], deterministic: bool) -> list[Kernel]:
    return [Kernel("_hash", ("hash",), torch.int64, Determinism.BATCH_INVARIANT)]


@triton.jit(do_not_specialize=["N", "BLOCKS"])
def _hash(
    bits,  # [B, N]
    found,  # [B], zeros
    N,
    BLOCKS,
    BLOCK: tl.constexpr,
):
    b, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bits + b * N + i, mask=i < N, other=0).to(tl.int64)
    place = ((i + 1) ^ _START) * _STEP
    tl.atomic_add(found + b, tl.sum(((place ^ (place >> 32)) | 1) * x, 0))
