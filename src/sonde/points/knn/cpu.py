"""``knn`` on CPUs: one tree traversal per query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from .._search import cpu
from .._search.arguments import named


@by_threads
def forward_pass(queries: Tensor, points: Tensor, *rest: Any) -> Pass:
    *search, k = rest
    p = CpuPass(queries.dtype, named(queries, points, None, *search))
    return p.returns(*cpu.search(p, k).values())


@by_threads
def backward_pass(grad: Tensor, queries: Tensor, points: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool) -> Pass:
    *search, _k, distances, indices = rest
    operands = named(queries, points, None, *search, k=None)
    return cpu.distance_gradients(dict(grad=grad, **operands, distances=distances, indices=indices), needs)
