"""Triton implementation of ``sympow_mm``: φ is always applied to the rows of `x`; `state` has D rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...jit.steps import Pass
from ...op.dtypes import accumulator
from .._dense.gpu import slab
from .._sympow.gpu import problem_of, record_gradient, record_product


def forward_pass(
    a: Tensor, b: Tensor, accumulate: Tensor | None, power: int, expand: str, d_tile: int, scaled: bool, alpha: float, beta: float,
    tf32: bool,
) -> Pass:  # fmt: skip
    p = Pass(a.device, accumulator(a, b, accumulate), dict(a=a, b=b, accumulate=accumulate))
    x, y = slab(p, "a"), slab(p, "b")
    x = x if expand == "k" else x.T
    z = None if accumulate is None else slab(p, "accumulate")
    problem = problem_of(x, power, d_tile, scaled, b.shape[2], p.accumulator, y, z, tf32)._replace(factors=(alpha, beta))
    return p.returns(record_product(p, x, y, z, problem, expand, "out", a.dtype, "out")).returning_one()


def backward_pass(
    grad: Tensor, a: Tensor, b: Tensor, accumulate: Tensor | None, power: int, expand: str, d_tile: int, scaled: bool, alpha: float,
    beta: float, tf32: bool, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    """∂b = φᵀ·∂out or φ·∂out; ∂φ is a product of the other operand and ∂out, one of them transposed."""
    p = Pass(a.device, accumulator(a, b, accumulate), dict(grad=grad, a=a, b=b, accumulate=accumulate))
    g, y, x, N = slab(p, "grad"), slab(p, "b"), slab(p, "a"), b.shape[2]
    x = x if expand == "k" else x.T
    rows, state = (g, y) if expand == "k" else (y, g)
    found = []
    if needs[0]:
        problem = problem_of(x, power, d_tile, scaled, N, p.accumulator, rows, state, tf32)
        found.append(
            record_gradient(p, x, rows, state, problem._replace(factors=(alpha, 0.0), straight=expand == "k"), "d_a", a, "a")
        )
    if needs[1]:
        problem = problem_of(x, power, d_tile, scaled, N, p.accumulator, g, None, tf32)._replace(factors=(alpha, 0.0))
        found.append(record_product(p, x, g, None, problem, "m" if expand == "k" else "k", "d_b", b.dtype, "b"))
    if needs[2]:
        assert accumulate is not None
        dtype = accumulate.dtype

        def scaled_gradient(grad: Tensor) -> Tensor:
            return (grad.contiguous() * beta).to(dtype)

        found += p.call("torch.mul", scaled_gradient, ["grad"], [("d_accumulate", accumulate.shape, dtype)], writes=["accumulate"])
    return p.returns(*found)
