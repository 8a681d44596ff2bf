"""Public ``knn``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._search import arguments as shared
from .._search.index.api import PointIndex
from . import reference

NAME = "knn"


class Neighbors(NamedTuple):
    """The nearest points of every query, nearest first; +inf and −1 where there are fewer."""

    distances: Tensor
    indices: Tensor


def _check(queries: Tensor, points: Tensor, *rest) -> dict[str, int]:
    *others, k = rest
    checks.count(NAME, "k", k, 1)
    return shared.check(NAME, None, queries, points, *others)


def _fake(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor]:
    n, k = _check(queries, points, *rest), rest[-1]
    return queries.new_empty(n["B"], n["M"], k), queries.new_empty(n["B"], n["M"], k, dtype=torch.int64)


_knn = operator(
    f"knn(Tensor queries, Tensor points, {shared.INDEX}, {shared.OFFSETS}, int k) -> (Tensor, Tensor)",
    package=__package__,
    reference=reference.knn,
    check=_check,
    fake=_fake,
    differentiable=("queries", "points"),
    unbatched=shared.UNBATCHED,
    forward_only=shared.TILES,
    saved=(0, 1),
    no_grad=(1,),
)


def arguments(queries, points, k, index=None, batch=None, impl="auto") -> tuple:
    """Of the schema, from those of the public function."""
    search = shared.prepare(NAME, queries, points, k=checks.count(NAME, "k", k, 1), index=index, batch=batch, impl=impl)
    return (*search.operands(), k)


def knn(
    queries: Tensor,
    points: Tensor,
    k: int,
    *,
    index: PointIndex | None = None,
    batch: shared.Batch | None = None,
    impl: Impl = "auto",
) -> Neighbors:
    r"""The k nearest points of every query, exactly.

    $$d_{ij}^2 = (q_{ix} - p_{jx})^2 + (q_{iy} - p_{jy})^2 + (q_{iz} - p_{jz})^2, \quad
      \text{the } k \text{ least by } (d_{ij}^2,\, j)$$

    Convention:
        Distances are those of differences, in float32 or, for float64 coordinates, float64, each operation rounded, the root too:
        every implementation has the same bits and the same ties, and ties go to the lower index. A point or a query that is not
        finite has no neighbours, nor is there one at an infinite distance. Where there are fewer than k, distances are +inf
        and indices −1. Distances are differentiable in queries and points; at d = 0 the subgradient is 0. Every result
        and every gradient of a kernel is deterministic. 1 to 3 dimensions are fused, more go through the reference, and on GPUs so
        does k > 64; there torch adds the gradient of points by atomics, unless told to be deterministic.

    Args:
        queries: ``[M, D]`` or ``[B, M, D]``.
        points: ``[N, D]`` or ``[B, N, D]``.
        k: How many, at least 1, and as many as there is room for; GPU kernels have up to 64.
        index: ``PointIndex.build(points)``, where points are searched more than once; changes speed and nothing else.
        batch: Ragged batches: ``(query_offsets, point_offsets)``, each ``[S + 1]``, ascending from 0; a query sees the points
            of its own segment. Tensors on a GPU are not looked into.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``(distances, indices)``, each ``[M, k]`` or ``[B, M, k]``; indices are int64, those of a batch's row count within it.

    Example:
        >>> import torch, sonde
        >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
        >>> sonde.knn(torch.zeros(1, 2), points, 2)
        Neighbors(distances=tensor([[0., 1.]]), indices=tensor([[0, 2]]))
    """
    search = shared.prepare(NAME, queries, points, k=checks.count(NAME, "k", k, 1), index=index, batch=batch, impl=impl)
    distances, indices = search.call(_knn, *search.operands(), k)
    return Neighbors(search.rows(distances), search.rows(indices))
