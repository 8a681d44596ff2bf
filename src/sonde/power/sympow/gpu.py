"""Triton implementation of ``sympow``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...jit.steps import Pass
from ...op.dtypes import accumulator
from .._dense.gpu import Slab, is_aligned
from .._sympow.gpu import basis, expand, problem_of, record_gradient


def _rows(name: str, x: Tensor) -> Slab:
    """All rows as one matrix of a batch of one."""
    return Slab(name, (1, *x.shape), (0, *x.stride()), x.dtype, is_aligned(x))


def forward_pass(x: Tensor, power: int, d_tile: int, scaled: bool) -> Pass:
    p = Pass(x.device, accumulator(x), dict(x=x))
    problem = problem_of(_rows("x", x), power, d_tile, scaled, 0, p.accumulator)
    out = p.buffer("out", (problem.R, problem.D), x.dtype)
    p.launch(expand, problem, ["x", *basis(p, problem.d // d_tile, power), out], writes=["out"])
    return p.returns(out).returning_one()


def backward_pass(
    grad: Tensor, x: Tensor, power: int, d_tile: int, scaled: bool, *, needs: Sequence[bool], deterministic: bool
) -> Pass:
    p = Pass(x.device, accumulator(x), dict(grad=grad, x=x))
    rows, g = _rows("x", x), _rows("grad", grad)
    problem = problem_of(rows, power, d_tile, scaled, 0, p.accumulator, g)
    return p.returns(record_gradient(p, rows, g, None, problem, "d_x", x, "x"))
