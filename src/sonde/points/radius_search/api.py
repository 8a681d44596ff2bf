"""Public ``radius_search``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...op import plan
from ...op.plan import Impl
from ...op.register import operator
from ...op.torch_private import is_batched
from .._search import arguments as shared
from .._search.checks import positive
from .._search.index.api import PointIndex
from . import reference

NAME = "radius_search"


class Ball(NamedTuple):
    """All points within a radius: query i has entries ``offsets[i]`` to ``offsets[i + 1]``, nearest first."""

    offsets: Tensor
    indices: Tensor
    distances: Tensor


def _check(queries: Tensor, points: Tensor, *rest) -> dict[str, int]:
    *others, radius = rest
    positive(NAME, "radius", radius)
    return shared.check(NAME, None, queries, points, *others)


def _fake(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    n = _check(queries, points, *rest)
    found = 0 if plan.recording() else torch.library.get_ctx().new_dynamic_size()
    whole = queries.new_empty(0, dtype=torch.int64)
    return whole.new_empty(n["B"] * n["M"] + 1), whole.new_empty(found), queries.new_empty(found)


_radius_search = operator(
    f"radius_search(Tensor queries, Tensor points, {shared.INDEX}, {shared.OFFSETS}, float radius) -> (Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.radius_search,
    check=_check,
    fake=_fake,
    differentiable=("queries", "points"),
    unbatched=shared.UNBATCHED,
    forward_only=shared.TILES,
    folds=False,
    saved=(0, 1, 2),
    no_grad=(0, 1),
)


def _prepare(queries, points, radius, index, batch, impl) -> tuple[shared.Search, float]:
    radius = positive(NAME, "radius", radius)
    search = shared.prepare(NAME, queries, points, index=index, batch=batch, impl=impl, waits=True)
    if not torch.compiler.is_compiling() and any(map(is_batched, (search.queries, search.points))):
        raise ValueError(f"{NAME}: the size of the result depends on the data, so torch.vmap cannot map it; use radius_neighbors")
    return search, radius


def arguments(queries, points, radius, index=None, batch=None, impl="auto") -> tuple:
    """The arguments of the registered operator, from those of the public function."""
    search, radius = _prepare(queries, points, radius, index, batch, impl)
    return (*search.operands(), radius)


def radius_search(
    queries: Tensor,
    points: Tensor,
    radius: float,
    *,
    index: PointIndex | None = None,
    batch: shared.Batch | None = None,
    impl: Impl = "auto",
) -> Ball:
    r"""All points within a radius of every query, as lists of any length.

    $$\{\,j : d_{ij}^2 \le r^2\,\}, \quad \text{ascending by } (d_{ij}^2,\, j)$$

    Convention:
        As in :func:`knn`; r² is rounded once, to the coordinates' dtype. The size of the result depends on the data, so this
        operator, and no other, waits for the device and cannot be captured in a CUDA graph (:func:`radius_neighbors` can).
        Distances are differentiable in queries and points.

    Args:
        queries: ``[M, D]`` or ``[B, M, D]``.
        points: ``[N, D]`` or ``[B, N, D]``.
        radius: Greater than 0.
        index: ``PointIndex.build(points)``; changes speed and nothing else.
        batch: ``(query_offsets, point_offsets)`` of ragged batches.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``(offsets, indices, distances)``: ``[M + 1]``, ``[n]`` and ``[n]`` for n neighbours in total. In a batch, offsets are
        ``[B·M + 1]``, the lists of all rows are concatenated, and indices count within their row's points.

    Example:
        >>> import torch, sonde
        >>> points = torch.tensor([[0.0], [1.0], [2.0], [9.0]])
        >>> sonde.radius_search(torch.tensor([[0.0], [9.0]]), points, 1.0)
        Ball(offsets=tensor([0, 2, 3]), indices=tensor([0, 1, 3]), distances=tensor([0., 1., 0.]))
    """
    search, radius = _prepare(queries, points, radius, index, batch, impl)
    offsets, indices, distances = search.call(_radius_search, *search.operands(), radius)
    if search.fresh is not None:  # in a compiled graph
        indices, distances = (shared.unless_stale(x, search.fresh.all()) for x in (indices, distances))
    return Ball(offsets, indices, distances)
