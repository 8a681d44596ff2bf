"""Triton implementation of ``knn_aggregate``: search, softmax and sum in the kernel of ``_search.gpu_nearest``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...jit.steps import Pass
from .._search.arguments import named
from .._search.gpu import nearest, nearest_gradients


def forward_pass(queries: Tensor, points: Tensor, features: Tensor, *rest: Any) -> Pass:
    *search, sigma, width, k = rest
    p, found = nearest(named(queries, points, features, *search, sigma=sigma), k, None, width)
    return p.returns(found["out"], found["distances"], found["indices"])


def backward_pass(
    grad: Tensor, queries: Tensor, points: Tensor, features: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool
) -> Pass:
    *search, sigma, width, _k, distances, indices = rest
    operands = named(queries, points, features, *search, sigma=sigma, width=None, k=None)
    return nearest_gradients(dict(grad=grad, **operands, distances=distances, indices=indices), needs, width)
