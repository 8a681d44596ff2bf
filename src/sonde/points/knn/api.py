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
    """The nearest points of every query, nearest first, padded with +inf and −1."""

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
    """The arguments of the registered operator, from those of the public function."""
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
        Distances are computed from differences, in float64 for float64 coordinates and float32 otherwise, and every operation is
        rounded, the square root included: all implementations return the same bits. Ties go to the lower index. A point or query
        that is not finite has no neighbours, and nothing is a neighbour at an infinite distance. Where there are fewer than k
        neighbours, distances are +inf and indices −1. Distances are differentiable in queries and points; at d = 0 the subgradient
        is 0. All results and gradients of kernels are deterministic. Kernels support 1 to 3 dimensions and, on GPUs, k up to 64;
        everything else uses the reference, where torch sums the gradient of points with atomics unless deterministic algorithms
        are on.

    Args:
        queries: ``[M, D]`` or ``[B, M, D]``.
        points: ``[N, D]`` or ``[B, N, D]``.
        k: How many, at least 1; GPU kernels support up to 64.
        index: ``PointIndex.build(points)``, for points that are searched more than once; changes speed and nothing else.
        batch: Ragged batches: ``(query_offsets, point_offsets)``, each ``[S + 1]``, ascending from 0; a query sees the points
            of its own segment. The values of tensors on a GPU are not checked.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``(distances, indices)``, each ``[M, k]`` or ``[B, M, k]``; indices are int64 and, in a batch, count within its row.

    Example:
        >>> import torch, sonde
        >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
        >>> sonde.knn(torch.zeros(1, 2), points, 2)
        Neighbors(distances=tensor([[0., 1.]]), indices=tensor([[0, 2]]))
    """
    search = shared.prepare(NAME, queries, points, k=checks.count(NAME, "k", k, 1), index=index, batch=batch, impl=impl)
    distances, indices = search.call(_knn, *search.operands(), k)
    return Neighbors(search.rows(distances), search.rows(indices))
