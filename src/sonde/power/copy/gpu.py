"""Triton implementation of ``copy``: dimensions are merged where they can be, and two of the rest make the tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...jit.launch import vector_of
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from .gpu_kernels import Problem
from .gpu_kernels import copy as kernel

FORCE_INT64 = False
MOST = 7  # dimensions that do not merge; more of them go to torch


def forward_pass(x: Tensor) -> Pass:
    p = Pass(x.device, accumulator(x), dict(x=x))
    return p.returns(copied(p, "x", "out", "out")).returning_one()


def backward_pass(grad: Tensor, x: Tensor, *, needs: Sequence[bool], deterministic: bool) -> Pass:
    p = Pass(x.device, accumulator(x), dict(grad=grad, x=x))
    return p.returns(copied(p, "grad", "d_x", "x"))


def copied(p: Pass, name: str, out: str, writes: str) -> str:
    """Record a copy of an argument; returns its slot."""
    x = p.given[name]
    assert x is not None
    problem = problem_of(x)
    if problem is None:
        return p.call("torch.clone", _contiguous, [name], [(out, x.shape, x.dtype)], writes=[writes])[0]
    made = p.buffer(out, x.shape, x.dtype)
    p.launch(kernel, problem, [name, made], writes=[writes])
    return made


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def problem_of(x: Tensor) -> Problem | None:
    """Sizes and strides with as few dimensions as possible; None if there are too many left."""
    sizes, strides = merged(x)
    if len(sizes) > MOST:
        return None
    out = [1]
    for n in sizes[:0:-1]:
        out.insert(0, out[0] * n)
    last = len(sizes) - 1
    near = min(range(last + 1), key=lambda d: (abs(strides[d]) if sizes[d] > 1 and strides[d] else 2**62, -d))
    m = near if near != last else last - 1  # tiles are squares if the input's contiguous dimension is another
    order = [d for d in range(last + 1) if d not in (m, last)]
    blank = [1] * (5 - len(order))
    rows = (sizes[m], strides[m], out[m]) if m >= 0 else (1, 0, 0)
    M, N = rows[0], sizes[last]
    units = (
        vector_of(16, M), vector_of(16, N), 0 if rows[1] == 1 else vector_of(16, rows[1]),
        0 if strides[last] == 1 else vector_of(16, strides[last]), 0 if rows[2] == 1 else vector_of(16, rows[2]),
        vector_of(16, *(strides[d] for d in order)), vector_of(16, *(out[d] for d in order)),
    )  # fmt: skip
    outer = (*blank, *(sizes[d] for d in order))
    within = (M - 1) * abs(rows[1]) + (N - 1) * abs(strides[last]), (M - 1) * rows[2] + N
    zeros = [0] * len(blank)
    return Problem(
        outer, M, N, (*zeros, *(strides[d] for d in order), rows[1], strides[last]),  # type: ignore[arg-type]
        (*zeros, *(out[d] for d in order), rows[2]), units, FORCE_INT64 or max(within) >= 2**31,
    )  # fmt: skip


def merged(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides without dimensions of size 1, with dimensions merged that are adjacent in memory."""
    sizes: list[int] = []
    strides: list[int] = []
    for n, s in zip(x.shape, x.stride()):
        if n == 1:
            continue
        if sizes and strides[-1] == n * s:
            sizes[-1] *= n
            strides[-1] = s
        else:
            sizes.append(n)
            strides.append(s)
    return sizes or [1], strides or [1]
