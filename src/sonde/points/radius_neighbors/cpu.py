"""``radius_neighbors`` on CPUs: the leaves within reach of every query, and the nearest of their points."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...op.plan import Kernel
from .._search import cpu


def forward(*args) -> tuple[Tensor, Tensor, Tensor]:
    *given, radius, k = args
    return cpu.search(given, k, radius)


def backward(grad: Tensor, *args, needs: Sequence[bool], deterministic: bool):
    *given, _radius, _k, distances, indices = args
    return cpu.distance_gradients(grad, given, distances, indices, needs)


def plan(*args, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    *given, _radius, k = args
    return cpu.search_kernels(given, k, needs)
