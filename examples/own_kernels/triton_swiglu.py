"""Triton: silu(x) · gate in one pass, and both gradients in another. ``sonde.jit.kernel`` lets a search choose the block."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import sonde
from sonde import jit


class Problem(NamedTuple):
    n: int


class Config(NamedTuple):
    block: int
    num_warps: int


@triton.jit(do_not_specialize=["N"])
def _forward(x, gate, out, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, i < N, 0.0).to(tl.float32)
    tl.store(out + i, a * tl.sigmoid(a) * tl.load(gate + i, i < N, 0.0), i < N)


@triton.jit(do_not_specialize=["N"])
def _backward(grad, x, gate, d_x, d_gate, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + i, i < N, 0.0).to(tl.float32)
    a = tl.load(x + i, i < N, 0.0).to(tl.float32)
    s = tl.sigmoid(a)
    if d_x is not None:
        tl.store(d_x + i, g * tl.load(gate + i, i < N, 0.0) * (s + a * s * (1 - s)), i < N)
    if d_gate is not None:
        tl.store(d_gate + i, g * a * s, i < N)


def tuned(function, name: str, **more) -> jit.Tunable:
    return jit.kernel(
        function,
        name,
        default=lambda p: Config(1024, 4),
        candidates=lambda p: [Config(1024, 4), Config(4096, 8), Config(512, 2), Config(256, 1)],
        launch=lambda p, c: jit.Launch((-(-p.n // c.block), 1, 1), (p.n,), (c.block,), c.num_warps),
        sizes=("n",),
        **more,
    )


forward = tuned(_forward, "external.swiglu", writes=(2,), expected=lambda p, x, gate, out: {2: reference(x, gate)})
backward = tuned(_backward, "external.swiglu_backward")


def reference(x: Tensor, gate: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide) * gate).to(torch.promote_types(x.dtype, gate.dtype)).contiguous()


@sonde.operator("external::swiglu", reference=reference, batched=True)
def swiglu(x: Tensor, gate: Tensor) -> Tensor: ...


@swiglu.register("triton", deterministic=True)
def _(x, gate):
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, gate.dtype), device=x.device)
    if out.numel():
        forward(Problem(out.numel()), x, gate, out)
    return out


@swiglu.register_backward("triton", deterministic=True)
def _(grad, x, gate, *, needs):
    grad, x, gate = grad.contiguous(), x.contiguous(), gate.contiguous()
    d_x, d_gate = (torch.empty_like(t) if need else None for t, need in ((x, needs.x), (gate, needs.gate)))
    if grad.numel():
        backward(Problem(grad.numel()), grad, x, gate, d_x, d_gate)
    return d_x, d_gate


def for_a_release() -> None:
    """What ``sonde build --arch sm_90 --call own_kernels.triton_swiglu:for_a_release`` compiles ahead of time."""
    for dtype in (torch.float32, torch.bfloat16):
        x, gate = (torch.empty(1024, dtype=dtype, requires_grad=True) for _ in range(2))
        swiglu(x, gate, impl="triton").sum().backward()
