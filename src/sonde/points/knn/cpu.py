"""``knn`` on CPUs: a walk through the tree for every query."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...op.plan import Kernel
from .._search import cpu


def forward(*args) -> tuple[Tensor, Tensor]:
    *given, k = args
    return cpu.search(given, k)[:2]


def backward(grad: Tensor, *args, needs: Sequence[bool], deterministic: bool):
    *given, _k, distances, indices = args
    return cpu.distance_gradients(grad, given, distances, indices, needs)


def plan(*args, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    *given, k = args
    return cpu.search_kernels(given, k, needs)
