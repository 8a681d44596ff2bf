"""``deformable_aggregation`` on CPUs: anchors are the units of ``_pyramid.cpu``, cameras' views of their points the places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...op.plan import Kernel
from .._pyramid import cpu
from .._pyramid import levels as pyramid

Opt = Tensor | None
NAMES = ("features", "locations", "weights")


def _problem(features: Tensor, weights: Tensor, drop: bool) -> cpu.Problem:
    (B, S, C), (A, P, cams, L, G) = features.shape, weights.shape[1:]
    return cpu.Problem(B, S, A, 1, G, C // max(1, G), P * cams, L, 1, drop, False)


def forward(
    features: Tensor, shapes: Opt, starts: Opt, locations: Tensor, weights: Tensor, levels: Sequence[int], drop: bool
) -> Tensor:
    p = _problem(features, weights, drop)
    return cpu.forward(p, pyramid.numbers((shapes, starts, levels)), features, locations, weights).view(p.B, p.Q, p.channels)


def backward(
    grad: Tensor,
    features: Tensor,
    shapes: Opt,
    starts: Opt,
    locations: Tensor,
    weights: Tensor,
    levels: Sequence[int],
    drop: bool,
    *,
    needs: Sequence[bool],
    deterministic: bool,
):
    p = _problem(features, weights, drop)
    return cpu.backward(p, pyramid.numbers((shapes, starts, levels)), grad, features, locations, weights, needs)


def plan(
    features: Tensor,
    shapes: Opt,
    starts: Opt,
    locations: Tensor,
    weights: Tensor,
    levels: Sequence[int],
    drop: bool,
    *,
    needs: Sequence[bool],
    deterministic: bool,
) -> list[Kernel]:
    return cpu.kernels(_problem(features, weights, drop), NAMES, features, locations, weights, needs)
