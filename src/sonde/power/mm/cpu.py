"""``mm`` on CPUs: torch's BLAS."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator
from .._dense.cpu import product


@by_threads
def forward_pass(a: Tensor, b: Tensor, tf32: bool) -> Pass:
    p = CpuPass(accumulator(a, b), dict(a=a, b=b))
    return p.returns(product(p, "a", "b", "out", (*a.shape[:2], b.shape[2]), a.dtype, "out")).returning_one()


@by_threads
def backward_pass(grad: Tensor, a: Tensor, b: Tensor, tf32: bool, *, needs: Sequence[bool], deterministic: bool) -> Pass:
    p = CpuPass(accumulator(a, b), dict(grad=grad, a=a, b=b))
    found = []
    if needs[0]:
        found.append(product(p, "grad", "b", "d_a", (a.shape[0], a.shape[1], a.shape[2]), a.dtype, "a", turn="b"))
    if needs[1]:
        found.append(product(p, "a", "grad", "d_b", (b.shape[0], b.shape[1], b.shape[2]), b.dtype, "b", turn="a"))
    return p.returns(*found)
