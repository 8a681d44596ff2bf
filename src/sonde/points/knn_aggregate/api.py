"""Public ``knn_aggregate``: documentation, checks, choice of implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._search import arguments as shared
from .._search.index.api import PointIndex
from . import reference

NAME = "knn_aggregate"


def _check(queries: Tensor, points: Tensor, features: Tensor, *rest) -> dict[str, int]:
    *others, sigma, _width, k = rest
    checks.count(NAME, "k", k, 1)
    n = shared.check(NAME, features, queries, points, *others, aggregates=True)
    shared.check_sigma(NAME, sigma, n["B"])
    return n


def _fake(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    n, k = _check(queries, points, features, *rest), rest[-1]
    indices = queries.new_empty(n["B"], n["M"], k, dtype=torch.int64)
    return features.new_empty(n["B"], n["M"], n["F"]), queries.new_empty(n["B"], n["M"], k), indices


_knn_aggregate = operator(
    f"knn_aggregate(Tensor queries, Tensor points, Tensor features, {shared.INDEX}, {shared.OFFSETS}, Tensor? sigma, float width, "
    "int k) -> (Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.knn_aggregate,
    check=_check,
    fake=_fake,
    differentiable=("queries", "points", "features", "sigma"),
    unbatched=shared.UNBATCHED,
    forward_only=shared.TILES,
    saved=(1, 2),
    no_grad=(1, 2),
)


def _prepare(queries, points, features, k, sigma, index, batch, impl) -> tuple[shared.Search, tuple]:
    checks.count(NAME, "k", k, 1)
    search = shared.prepare(NAME, queries, points, features, k=k, index=index, batch=batch, impl=impl, aggregates=True)
    return search, (*search.operands(), *shared.widths(NAME, sigma, search), k)


def arguments(queries, points, features, k=3, sigma=0.1, index=None, batch=None, impl="auto") -> tuple:
    """The arguments of the registered operator, from those of the public function."""
    return _prepare(queries, points, features, k, sigma, index, batch, impl)[1]


def knn_aggregate(
    queries: Tensor,
    points: Tensor,
    features: Tensor,
    k: int = 3,
    sigma: float | Tensor = 0.1,
    *,
    index: PointIndex | None = None,
    batch: shared.Batch | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Features of the k nearest points, weighted by a softmax of their distances.

    $$\mathrm{out}_i = \sum_{j \in \mathrm{knn}(i)} w_{ij}\, f_j, \qquad w_{ij} = \mathrm{softmax}_j(-d_{ij}/\sigma)$$

    Convention:
        Neighbours are those of :func:`knn`: exact, ties to the lower index. A query without neighbours gives 0. Coordinates and
        features may differ in dtype; sums run in float32, or in float64 if an operand is float64. Queries, points, features and,
        if it is a tensor, σ have gradients, with the neighbours held fixed: first derivatives are fused, higher ones and forward
        mode use the reference. At d = 0 the distance's subgradient is 0, and a single neighbour contributes exactly zero to the
        gradients of queries and points. All results and gradients of kernels are deterministic. More than 3 dimensions and, on
        GPUs, k > 64 use the reference, where torch sums the gradients of points and features with atomics unless deterministic
        algorithms are on.

    Args:
        queries: ``[M, D]`` or ``[B, M, D]``.
        points: ``[N, D]`` or ``[B, N, D]``.
        features: ``[N, F]`` or ``[B, N, F]``.
        k: How many neighbours, at least 1; GPU kernels support up to 64.
        sigma: σ > 0, however small or large; infinity makes all weights equal. A number, a tensor ``[]`` or, for batches,
            ``[B]``; all segments of a ragged batch share one.
        index: ``PointIndex.build(points)``, for points that are searched more than once; changes speed and nothing else.
        batch: ``(query_offsets, point_offsets)`` of ragged batches, each ``[S + 1]``.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[M, F]`` or ``[B, M, F]`` in the dtype of `features`.

    Example:
        >>> import torch, sonde
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 9.0]])
        >>> features = torch.tensor([[1.0], [3.0], [100.0]])
        >>> sonde.knn_aggregate(torch.tensor([[0.5, 0.0]]), points, features, k=2)
        tensor([[2.]])
    """
    search, args = _prepare(queries, points, features, k, sigma, index, batch, impl)
    return search.rows(search.call(_knn_aggregate, *args)[0])
