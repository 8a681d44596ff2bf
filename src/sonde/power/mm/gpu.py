"""Triton implementation of ``mm``: three products."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...jit.steps import Pass
from ...op.dtypes import accumulator
from .._dense.gpu import product, slab


def forward_pass(a: Tensor, b: Tensor, tf32: bool) -> Pass:
    p = Pass(a.device, accumulator(a, b), dict(a=a, b=b))
    return p.returns(product(p, slab(p, "a"), slab(p, "b"), "out", a.dtype, tf32, "out")).returning_one()


def backward_pass(grad: Tensor, a: Tensor, b: Tensor, tf32: bool, *, needs: Sequence[bool], deterministic: bool) -> Pass:
    """∂a = ∂out·bᵀ, ∂b = aᵀ·∂out; the transposed operands are read in place."""
    p = Pass(a.device, accumulator(a, b), dict(grad=grad, a=a, b=b))
    found = []
    if needs[0]:
        found.append(product(p, slab(p, "grad"), slab(p, "b").T, "d_a", a.dtype, tf32, "a"))
    if needs[1]:
        found.append(product(p, slab(p, "a").T, slab(p, "grad"), "d_b", b.dtype, tf32, "b"))
    return p.returns(*found)
