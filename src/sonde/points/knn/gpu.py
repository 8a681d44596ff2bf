"""Triton implementation of ``knn``: the walk of ``_search.gpu_walk``, in the kernel of ``_search.gpu_nearest``."""

from __future__ import annotations

from torch import Tensor

from ...op.plan import Kernel
from .._search import gpu as passes


def forward(*args) -> tuple[Tensor, ...]:
    *operands, k = args
    return passes.nearest(passes.sides(*operands), k)


def backward(grad: Tensor, queries: Tensor, points: Tensor, *rest, needs: list[bool], deterministic: bool) -> list[Tensor]:
    *_, distances, indices = rest
    return passes.nearest_gradients(grad, queries, points, distances, indices, needs)


def plan(*args, needs: list[bool], deterministic: bool) -> list[Kernel]:
    *operands, k = args
    return passes.plan_nearest(passes.sides(*operands), k) + passes.plan_pairs(operands[0], operands[1], k, needs)
