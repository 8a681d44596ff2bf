"""The hash of points on GPUs: one pass over their bits. Wrapping integer sums do not depend on the order of the atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....jit.launch import Launch, cdiv
from ....jit.steps import Pass
from .reference import START, STEP, bits_of

BLOCK = 1024
_START, _STEP = tl.constexpr(START), tl.constexpr(STEP)


def forward_pass(points: Tensor) -> Pass:
    B, n = points.shape[0], points.shape[1] * points.shape[2]
    p, blocks = Pass(points.device, torch.int64, dict(points=points)), cdiv(n, BLOCK)
    own = p.contiguous("points")
    assert own is not None
    found = p.buffer("hash", [B], torch.int64, fill=0)
    bits = p.view("bits", own, bits_of)
    p.start(_hash, [bits, found], Launch((B * blocks, 1, 1), (n, blocks), (BLOCK,), 4), writes=["hash"])
    return p.returns(found).returning_one()


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
