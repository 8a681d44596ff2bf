"""``ms_deform_attn`` on CPUs: the heads of queries are the units of ``_pyramid.cpu``, their points in the levels the places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...op.plan import Kernel
from .._pyramid import cpu
from .._pyramid import levels as pyramid

Opt = Tensor | None
NAMES = ("value", "locations", "weights")


def _problem(value: Tensor, weights: Tensor, logits: bool) -> cpu.Problem:
    (B, S, h, D), (Q, L, P) = value.shape, (weights.shape[1], *weights.shape[3:])
    return cpu.Problem(B, S, Q, h, 1, D, L * P, 1, P, False, logits)


def forward(
    value: Tensor, shapes: Opt, starts: Opt, locations: Tensor, weights: Tensor, levels: Sequence[int], logits: bool
) -> Tensor:
    p = _problem(value, weights, logits)
    return cpu.forward(p, pyramid.numbers((shapes, starts, levels)), value, locations, weights).view(p.B, p.Q, p.channels)


def backward(
    grad: Tensor,
    value: Tensor,
    shapes: Opt,
    starts: Opt,
    locations: Tensor,
    weights: Tensor,
    levels: Sequence[int],
    logits: bool,
    *,
    needs: Sequence[bool],
    deterministic: bool,
):
    p = _problem(value, weights, logits)
    return cpu.backward(p, pyramid.numbers((shapes, starts, levels)), grad, value, locations, weights, needs)


def plan(
    value: Tensor,
    shapes: Opt,
    starts: Opt,
    locations: Tensor,
    weights: Tensor,
    levels: Sequence[int],
    logits: bool,
    *,
    needs: Sequence[bool],
    deterministic: bool,
) -> list[Kernel]:
    return cpu.kernels(_problem(value, weights, logits), NAMES, value, locations, weights, needs)
