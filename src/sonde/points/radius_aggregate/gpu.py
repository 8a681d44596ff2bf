"""Triton implementation of ``radius_aggregate``: walks over rows and columns in the kernels of ``_search.gpu_ball``."""

from __future__ import annotations

from torch import Tensor

from ...op.plan import Kernel
from .._search import gpu as passes


def forward(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor]:
    *index, sigma, width, radius = rest
    return passes.ball(passes.sides(queries, points, *index), features, sigma, width, radius)


def backward(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest, needs: list[bool], deterministic: bool
) -> list[Tensor]:
    *index, sigma, width, radius, levels = rest
    of = passes.sides(queries, points, *index)
    return passes.ball_gradients(grad, of, features, sigma, width, radius, levels, needs)


def plan(queries: Tensor, points: Tensor, features: Tensor, *rest, needs: list[bool], deterministic: bool) -> list[Kernel]:
    *index, sigma, width, radius = rest
    return passes.plan_ball(passes.sides(queries, points, *index), features, sigma, width, radius, needs)
