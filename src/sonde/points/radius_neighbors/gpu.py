"""Triton implementation of ``radius_neighbors``: the walk of ``_search.gpu_walk``, in the kernel of ``_search.gpu_nearest``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...jit.steps import Pass
from .._search.arguments import named
from .._search.gpu import nearest, nearest_gradients


def forward_pass(queries: Tensor, points: Tensor, *rest: Any) -> Pass:
    *search, radius, k = rest
    p, found = nearest(named(queries, points, None, *search), k, radius)
    return p.returns(*found.values())


def backward_pass(grad: Tensor, queries: Tensor, points: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool) -> Pass:
    *search, _radius, _k, distances, indices = rest
    values = dict(radius=None, k=None)
    given = dict(grad=grad, **named(queries, points, None, *search), **values, distances=distances, indices=indices)
    return nearest_gradients(given, needs)
