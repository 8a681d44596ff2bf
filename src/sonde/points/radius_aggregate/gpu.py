"""Triton implementation of ``radius_aggregate``: the kernels of ``_search.gpu_ball``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...jit.steps import Pass
from .._search.arguments import named
from .._search.gpu import ball, ball_gradients


def forward_pass(queries: Tensor, points: Tensor, features: Tensor, *rest: Any) -> Pass:
    *search, sigma, width, radius = rest
    return ball(named(queries, points, features, *search, sigma=sigma), width, radius)


def backward_pass(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool
) -> Pass:
    *search, sigma, width, radius, levels = rest
    operands = named(queries, points, features, *search, sigma=sigma, width=None, radius=None)
    return ball_gradients(dict(grad=grad, **operands, levels=levels), width, radius, needs)
