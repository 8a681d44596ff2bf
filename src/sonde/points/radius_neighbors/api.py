"""Public ``radius_neighbors``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._search import arguments as shared
from .._search.checks import positive
from .._search.index.api import PointIndex
from . import reference

NAME = "radius_neighbors"


class NeighborsWithin(NamedTuple):
    """The nearest points within a radius, nearest first, and how many more were cut off."""

    distances: Tensor
    indices: Tensor
    truncated: Tensor


def _check(queries: Tensor, points: Tensor, *rest) -> dict[str, int]:
    *others, radius, k = rest
    positive(NAME, "radius", radius)
    checks.count(NAME, "k", k, 1)
    return shared.check(NAME, None, queries, points, *others)


def _fake(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    n, k = _check(queries, points, *rest), rest[-1]
    whole = queries.new_empty(0, dtype=torch.int64)
    return queries.new_empty(n["B"], n["M"], k), whole.new_empty(n["B"], n["M"], k), whole.new_empty(n["B"], n["M"])


_radius_neighbors = operator(
    f"radius_neighbors(Tensor queries, Tensor points, {shared.INDEX}, {shared.OFFSETS}, float radius, int k) "
    "-> (Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.radius_neighbors,
    check=_check,
    fake=_fake,
    differentiable=("queries", "points"),
    unbatched=shared.UNBATCHED,
    forward_only=shared.TILES,
    saved=(0, 1),
    no_grad=(1, 2),
)


def _prepare(queries, points, radius, k, index, batch, impl) -> tuple[shared.Search, float]:
    radius = positive(NAME, "radius", radius)
    return shared.prepare(NAME, queries, points, k=checks.count(NAME, "k", k, 1), index=index, batch=batch, impl=impl), radius


def arguments(queries, points, radius, k, index=None, batch=None, impl="auto") -> tuple:
    """The arguments of the registered operator, from those of the public function."""
    search, radius = _prepare(queries, points, radius, k, index, batch, impl)
    return (*search.operands(), radius, k)


def radius_neighbors(
    queries: Tensor,
    points: Tensor,
    radius: float,
    k: int,
    *,
    index: PointIndex | None = None,
    batch: shared.Batch | None = None,
    impl: Impl = "auto",
) -> NeighborsWithin:
    r"""The k nearest points within a radius of every query: truly the nearest, not the first found, and no device sync.

    $$\{\,j : d_{ij}^2 \le r^2\,\}, \quad \text{the } k \text{ least by } (d_{ij}^2,\, j)$$

    Convention:
        As in :func:`knn`; r² is rounded once, to the coordinates' dtype. Where there are fewer than k, distances are +inf and
        indices −1; where there are more, `truncated` says by how many. Distances are differentiable in queries and points.

    Args:
        queries: ``[M, D]`` or ``[B, M, D]``.
        points: ``[N, D]`` or ``[B, N, D]``.
        radius: Greater than 0.
        k: How many at most; GPU kernels support up to 64.
        index: ``PointIndex.build(points)``; changes speed and nothing else.
        batch: ``(query_offsets, point_offsets)`` of ragged batches.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``(distances, indices, truncated)``: ``[M, k]``, ``[M, k]`` and ``[M]``, or the same with a leading B.

    Example:
        >>> import torch, sonde
        >>> points = torch.tensor([[0.0], [1.0], [2.0], [9.0]])
        >>> sonde.radius_neighbors(torch.zeros(1, 1), points, 2.0, 2)
        NeighborsWithin(distances=tensor([[0., 1.]]), indices=tensor([[0, 1]]), truncated=tensor([1]))
    """
    search, radius = _prepare(queries, points, radius, k, index, batch, impl)
    return NeighborsWithin(*map(search.rows, search.call(_radius_neighbors, *search.operands(), radius, k)))
