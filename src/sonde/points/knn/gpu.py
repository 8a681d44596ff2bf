"""Triton implementation of ``knn``: the kernel of ``_search.gpu_nearest``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...jit.steps import Pass
from .._search.arguments import named
from .._search.gpu import nearest, nearest_gradients


def forward_pass(queries: Tensor, points: Tensor, *rest: Any) -> Pass:
    *search, k = rest
    p, found = nearest(named(queries, points, None, *search), k)
    return p.returns(*found.values())


def backward_pass(grad: Tensor, queries: Tensor, points: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool) -> Pass:
    *search, _k, distances, indices = rest
    operands = named(queries, points, None, *search, k=None)
    return nearest_gradients(dict(grad=grad, **operands, distances=distances, indices=indices), needs)
