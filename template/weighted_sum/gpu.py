"""Triton implementation of ``weighted_sum``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, cdiv
from ...jit.launch import accumulator as triton_dtype
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from .._device.long_sums import compensated, two_sum


def forward_pass(rows: Tensor, weights: Tensor) -> Pass:
    (B, Q, C), wide = rows.shape, accumulator(rows, weights)
    p = Pass(rows.device, wide, dict(rows=rows, weights=weights))
    out = p.buffer("out", (B, C), rows.dtype)
    p.launch(total, Problem(B, Q, C, wide), [p.contiguous("rows"), p.contiguous("weights"), out], writes=["out"])
    return p.returns(out).returning_one()


def backward_pass(grad: Tensor, rows: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool) -> Pass:
    (B, Q, C), wide = rows.shape, accumulator(rows, weights)
    p = Pass(rows.device, wide, dict(grad=grad, rows=rows, weights=weights))
    found = {
        name: p.buffer(f"d_{name}", t.shape, t.dtype) for name, t, need in zip(("rows", "weights"), (rows, weights), needs) if need
    }
    takes = [*map(p.contiguous, ("grad", "rows", "weights")), found.get("rows"), found.get("weights")]
    p.launch(gradients, Problem(B, Q, C, wide), takes, writes=list(found))
    return p.returns(*found.values())


class Problem(NamedTuple):
    """What a launch computes; ``Config`` says how."""

    B: int
    Q: int
    C: int
    wide: torch.dtype


class Config(NamedTuple):
    block_q: int
    block_c: int
    num_warps: int


def launch(p: Problem, config: Config) -> Launch:
    grid = (p.B * cdiv(p.C, config.block_c), 1, 1)
    return Launch(grid, (p.Q, p.C), (triton_dtype(p.wide), config.block_q, config.block_c), config.num_warps)


def launch_gradients(p: Problem, config: Config) -> Launch:
    return launch(p, config)._replace(grid=(p.B * cdiv(p.Q, config.block_q), 1, 1))


@triton.jit(do_not_specialize=["Q", "C"])
def _weighted_total(
    rows,  # [B, Q, C]
    weights,  # [B, Q]
    out,  # [B, C]
    Q,
    C,
    ACC: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks = tl.cdiv(C, BLOCK_C)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    total = tl.zeros([BLOCK_Q, BLOCK_C], ACC)
    lost = total
    for q0 in range(0, Q, BLOCK_Q):
        q = q0 + tl.arange(0, BLOCK_Q)[:, None]
        w = tl.load(weights + b * Q + q, mask=q < Q, other=0).to(ACC)
        x = tl.load(rows + (b * Q + q) * C + c, mask=(q < Q) & (c < C), other=0).to(ACC)
        total, lost = two_sum(total, lost, w * x)
    total = tl.sum(compensated(total, lost), 0, keep_dims=True)
    tl.store(out + b * C + c, total.to(out.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["Q", "C"])
def _weighted_gradients(
    grad,  # [B, C]
    rows,  # [B, Q, C]
    weights,  # [B, Q]
    d_rows,  # [B, Q, C]; None if not needed
    d_weights,  # [B, Q]
    Q,
    C,
    ACC: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    w = tl.load(weights + b * Q + q, mask=q < Q, other=0).to(ACC)
    total = tl.zeros([BLOCK_Q, BLOCK_C], ACC)
    lost = total
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)[None, :]
        there = (q < Q) & (c < C)
        g = tl.load(grad + b * C + c, mask=c < C, other=0).to(ACC)
        at = (b * Q + q) * C + c
        if d_rows is not None:
            tl.store(d_rows + at, (w * g).to(d_rows.dtype.element_ty), mask=there)
        if d_weights is not None:
            total, lost = two_sum(total, lost, g * tl.load(rows + at, mask=there, other=0).to(ACC))
    if d_weights is not None:
        total = tl.sum(compensated(total, lost), 1, keep_dims=True)
        tl.store(d_weights + b * Q + q, total.to(d_weights.dtype.element_ty), mask=q < Q)


total = jit.kernel(_weighted_total, "grid.weighted_sum", default=lambda p: Config(16, 32, 4), launch=launch)
gradients = jit.kernel(
    _weighted_gradients, "grid.weighted_sum_gradients", default=lambda p: Config(16, 32, 4), launch=launch_gradients
)
