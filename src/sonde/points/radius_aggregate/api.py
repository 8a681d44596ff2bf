"""Public ``radius_aggregate``: documentation, checks, choice of implementation."""

from __future__ import annotations

from torch import Tensor

from ...op.dtypes import accumulator
from ...op.plan import Impl
from ...op.register import operator
from .._search import arguments as shared
from .._search.checks import positive
from .._search.index.api import PointIndex
from . import reference

NAME = "radius_aggregate"


def _check(queries: Tensor, points: Tensor, features: Tensor, *rest) -> dict[str, int]:
    *others, sigma, _width, radius = rest
    positive(NAME, "radius", radius)
    n = shared.check(NAME, features, queries, points, *others, aggregates=True)
    shared.check_sigma(NAME, sigma, n["B"])
    return n


def _fake(queries: Tensor, points: Tensor, features: Tensor, *rest) -> tuple[Tensor, Tensor]:
    n = _check(queries, points, features, *rest)
    levels = queries.new_empty(n["B"], n["M"], 2, dtype=accumulator(queries, features, rest[-3]))
    return features.new_empty(n["B"], n["M"], n["F"]), levels


_radius_aggregate = operator(
    f"radius_aggregate(Tensor queries, Tensor points, Tensor features, {shared.INDEX}, {shared.OFFSETS}, Tensor? sigma, "
    "float width, float radius) -> (Tensor, Tensor)",
    package=__package__,
    reference=reference.radius_aggregate,
    check=_check,
    fake=_fake,
    differentiable=("queries", "points", "features", "sigma"),
    unbatched=shared.UNBATCHED,
    saved=(1,),
    no_grad=(1,),
)


def _prepare(queries, points, features, radius, sigma, index, batch, impl) -> tuple[shared.Search, tuple]:
    radius = positive(NAME, "radius", radius)
    search = shared.prepare(NAME, queries, points, features, index=index, batch=batch, impl=impl, aggregates=True)
    return search, (*search.operands(), *shared.widths(NAME, sigma, search), radius)


def arguments(queries, points, features, radius, sigma=0.1, index=None, batch=None, impl="auto") -> tuple:
    """The arguments of the registered operator, from those of the public function."""
    return _prepare(queries, points, features, radius, sigma, index, batch, impl)[1]


def radius_aggregate(
    queries: Tensor,
    points: Tensor,
    features: Tensor,
    radius: float,
    sigma: float | Tensor = 0.1,
    *,
    index: PointIndex | None = None,
    batch: shared.Batch | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Features of all points within a radius, weighted by a softmax of their distances.

    $$\mathrm{out}_i = \sum_{d_{ij}^2 \le r^2} w_{ij}\, f_j, \qquad w_{ij} = \mathrm{softmax}_j(-d_{ij}/\sigma)$$

    Convention:
        Distances are those of :func:`knn`; r² is rounded once, to the coordinates' dtype. The softmax has no epsilon: weights
        sum to one however small σ is, and an empty ball gives 0 and zero gradients. Coordinates and features may differ in dtype;
        sums run in float32, or in float64 if an operand is float64. Queries, points, features and, if it is a tensor, σ have
        gradients, with the neighbours held fixed: first derivatives are fused, higher ones and forward mode use the reference. At
        d = 0 the distance's subgradient is 0, and a single neighbour contributes exactly zero to the gradients of queries and
        points. All results and gradients of kernels are deterministic. More than 3 dimensions use the reference; on GPUs that
        waits for the device, and torch sums the gradients of points and features with atomics unless deterministic algorithms
        are on.

    Args:
        queries: ``[M, D]`` or ``[B, M, D]``.
        points: ``[N, D]`` or ``[B, N, D]``.
        features: ``[N, F]`` or ``[B, N, F]``.
        radius: Greater than 0.
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
        >>> sonde.radius_aggregate(torch.tensor([[0.5, 0.0], [5.0, 0.0]]), points, features, 1.0)
        tensor([[2.],
                [0.]])
    """
    search, args = _prepare(queries, points, features, radius, sigma, index, batch, impl)
    return search.rows(search.call(_radius_aggregate, *args, keeps=True)[0])
