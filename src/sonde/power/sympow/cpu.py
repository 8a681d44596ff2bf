"""``sympow`` on CPUs, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator
from .._sympow.basis import BLOCK
from .._sympow.cpu import CpuBasis


@by_threads
def forward_pass(x: Tensor, power: int, d_tile: int, scaled: bool) -> Pass:
    (B, d), wide = x.shape, accumulator(x)
    p, basis = CpuPass(wide, dict(x=x)), CpuBasis(d, power, d_tile, scaled, wide)
    out = p.buffer("out", (B, basis.D), x.dtype)

    def run(x: Tensor, out: Tensor) -> None:
        if out.dtype == wide:
            basis.phi(x.detach(), out)
            return
        for _, rows in basis.blocks(1, B):
            out[rows] = basis.phi(x.detach()[rows].to(wide))

    p.call("sympow", run, ["x", out], writes=["out"], scratch=BLOCK * wide.itemsize * (x.dtype != wide) + x.numel() * wide.itemsize)
    return p.returns(out).returning_one()


@by_threads
def backward_pass(
    grad: Tensor, x: Tensor, power: int, d_tile: int, scaled: bool, *, needs: Sequence[bool], deterministic: bool
) -> Pass:
    (B, d), wide = x.shape, accumulator(x)
    p, basis = CpuPass(wide, dict(grad=grad, x=x)), CpuBasis(d, power, d_tile, scaled, wide)

    def run(grad: Tensor, x: Tensor) -> Tensor:
        out = x.new_empty(B, d)
        for _, rows in basis.blocks(1, B):
            out[rows] = basis.gradient(grad.detach()[rows].to(wide), x.detach()[rows].to(wide))
        return out

    gives = [("d_x", (B, d), x.dtype)]
    return p.returns(*p.call("sympow_gradient", run, ["grad", "x"], gives, writes=["x"], scratch=4 * BLOCK * wide.itemsize))
