"""``sympow_mm`` on CPUs: φ of a block of rows at a time, and torch's BLAS."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.plan import Determinism
from .._dense.cpu import multiply
from .._sympow.basis import BLOCK
from .._sympow.cpu import CpuBasis

FEW = 16  # blocks of rows that are added in float32


def times(basis: CpuBasis, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """out [B, R, N] = φ(x) @ y."""
    for part, rows in basis.blocks(*x.shape[:2]):
        multiply(basis.phi(x[part, rows]), y[part], out[part, rows])
    return out


def sums(basis: CpuBasis, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """out [B, D, N] = φ(x)ᵀ @ y, in blocks that are added in order; if there are many, in float64."""
    blocks = list(basis.blocks(*x.shape[:2]))
    total = out.zero_() if len(blocks) <= FEW * len(out) else torch.zeros_like(out, dtype=torch.float64)
    for part, rows in blocks:
        phi = basis.phi(x[part, rows]).mT
        if total is out:
            torch.baddbmm(out[part], phi, y[part, rows], out=out[part])
        else:
            total[part] += multiply(phi, y[part, rows])
    return out if total is out else out.copy_(total)


def gradient(basis: CpuBasis, x: Tensor, y: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """∂x [B, R, d], in `out`; ∂φ is the product of y and the transposed state."""
    for part, rows in basis.blocks(*x.shape[:2]):
        d_phi = x.new_empty(*x[part, rows].shape[:2], basis.D)
        out[part, rows] = basis.gradient(multiply(y[part, rows], state[part].mT, d_phi), x[part, rows])
    return out


@by_threads
def forward_pass(
    a: Tensor, b: Tensor, accumulate: Tensor | None, power: int, expand: str, d_tile: int, scaled: bool, alpha: float, beta: float,
    tf32: bool,
) -> Pass:  # fmt: skip
    B, wide, N = a.shape[0], accumulator(a, b, accumulate), b.shape[2]
    p = CpuPass(wide, dict(a=a, b=b, accumulate=accumulate))
    basis = CpuBasis(a.shape[2] if expand == "k" else a.shape[1], power, d_tile, scaled, wide)
    shape, dtype = (B, a.shape[1] if expand == "k" else basis.D, N), a.dtype

    allocate = p.allocator(shape, wide)

    def run(a: Tensor, b: Tensor, accumulate: Tensor | None) -> Tensor:
        x, y, out = a.detach().to(wide), b.detach().to(wide), allocate()
        times(basis, x, y, out) if expand == "k" else sums(basis, x.mT, y, out)
        out *= alpha
        if accumulate is not None:
            out += beta * accumulate.detach().to(wide)
        return out.to(dtype)

    takes = ["a", "b", "accumulate" if accumulate is not None else None]
    scratch = 3 * BLOCK * wide.itemsize
    return p.returns(
        *p.call("sympow_mm", run, takes, [("out", shape, dtype)], writes=["out"], scratch=scratch, promise=Determinism.RUN_TO_RUN)
    ).returning_one()


@by_threads
def backward_pass(
    grad: Tensor, a: Tensor, b: Tensor, accumulate: Tensor | None, power: int, expand: str, d_tile: int, scaled: bool, alpha: float,
    beta: float, tf32: bool, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    wide = accumulator(a, b, accumulate)
    p = CpuPass(wide, dict(grad=grad, a=a, b=b, accumulate=accumulate))
    basis = CpuBasis(a.shape[2] if expand == "k" else a.shape[1], power, d_tile, scaled, wide)
    of_a, of_b = (a.shape, a.dtype), (b.shape, b.dtype)
    new_a, new_b = p.allocator(a.shape, wide), p.allocator(b.shape, wide)
    found: list[str] = []
    about = dict(scratch=5 * BLOCK * wide.itemsize, promise=Determinism.RUN_TO_RUN)

    def d_a(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
        g, x, y = grad.detach().to(wide), a.detach().to(wide), b.detach().to(wide)
        out = new_a()
        gradient(basis, x, g, y, out) if expand == "k" else gradient(basis, x.mT, y, g, out.mT)
        return out.mul_(alpha).to(of_a[1])

    def d_b(grad: Tensor, a: Tensor) -> Tensor:
        g, x = grad.detach().to(wide), a.detach().to(wide)
        out = new_b()
        sums(basis, x, g, out) if expand == "k" else times(basis, x.mT, g, out)
        return out.mul_(alpha).to(of_b[1])

    if needs[0]:
        found += p.call("sympow_mm_gradient", d_a, ["grad", "a", "b"], [("d_a", *of_a)], writes=["a"], **about)  # type: ignore[arg-type]
    if needs[1]:
        found += p.call("sympow_mm", d_b, ["grad", "a"], [("d_b", *of_b)], writes=["b"], **about)  # type: ignore[arg-type]
    if needs[2]:
        assert accumulate is not None
        shape, dtype = accumulate.shape, accumulate.dtype
        found += p.call(
            "torch.mul", lambda grad: (grad.detach().contiguous() * beta).to(dtype), ["grad"], [("d_accumulate", shape, dtype)],
            writes=["accumulate"],
        )  # fmt: skip
    return p.returns(*found)
