"""Triton implementation of ``knn_aggregate``: search, softmax and sum in the kernel of ``_search.gpu_nearest``."""

from __future__ import annotations

from torch import Tensor

from ...op.plan import Kernel
from .._search import gpu as passes


def forward(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *index, sigma, width, k = rest
    distances, indices, out = passes.nearest(passes.sides(queries, points, *index), k, None, features, sigma, width)
    return out, distances, indices


def backward(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest, needs: list[bool], deterministic: bool
) -> list[Tensor]:
    *_, sigma, width, _k, distances, indices = rest
    return passes.nearest_gradients(grad, queries, points, distances, indices, needs, features, sigma, width)


def plan(queries: Tensor, points: Tensor, features: Tensor, *rest, needs: list[bool], deterministic: bool) -> list[Kernel]:
    *index, sigma, width, k = rest
    forward = passes.plan_nearest(passes.sides(queries, points, *index), k, None, features, sigma, width)
    return forward + passes.plan_pairs(queries, points, k, needs, features, sigma, width)
