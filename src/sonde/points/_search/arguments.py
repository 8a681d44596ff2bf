"""Host code shared by the operators of the family: canonical arguments, checks, and the choice of algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...op import checks, plan
from .checks import columns, implementation, offsets, plain, positive
from .index.api import PointIndex, build

Batch = tuple[Tensor | Sequence[int], Tensor | Sequence[int]]

FEW = 64  # with at most this many points, each pass on a CPU builds its own tree
PAIRS, MANY = 5 * 10**7, 8192  # with at most this many pairs and points, a GPU compares all queries with all points

INDEX = "Tensor? order, Tensor? sorted, Tensor? boxes, Tensor? qorder, Tensor? qsorted, Tensor? qboxes"
OFFSETS = "Tensor? query_offsets, Tensor? point_offsets"
UNBATCHED = ("query_offsets", "point_offsets")
TILES = ("order", "sorted", "boxes", "qorder", "qsorted", "qboxes")


def named(queries: Tensor, points: Tensor, features: Tensor | None, *search: Tensor | None, **more: Any) -> dict[str, Any]:
    """A schema's tensors by name, in its order; `search` is the index of points, that of queries, and the ragged offsets."""
    optional = {} if features is None else {"features": features}
    return dict(queries=queries, points=points, **optional, **dict(zip((*TILES, *UNBATCHED), search, strict=True)), **more)


def tiled(impl: str, M: int, N: int) -> bool:
    """Whether a search uses boxes of sorted points. It depends only on sizes, so that passing an index changes no bit."""
    if impl == "numba":
        return N > FEW
    return impl == "triton" and (N > MANY or M * N > PAIRS)


class Search(NamedTuple):
    """A call in the form of the registered operators: ``[B, M, D]``, ``[B, N, D]``, ``[B, N, F]``."""

    queries: Tensor
    points: Tensor
    features: Tensor | None
    tiles: tuple[Tensor | None, ...]  # the index of points, then that of queries
    made: tuple[Tensor | None, ...]  # those of `tiles` that were built for this call
    offsets: tuple[Tensor | None, Tensor | None]
    batched: bool
    impl: str
    fresh: Tensor | None = None  # [B], whether the index matches the points, if the host could not check

    def operands(self) -> tuple:
        """The tensors that every schema begins with."""
        given = (self.queries, self.points) if self.features is None else (self.queries, self.points, self.features)
        return (*given, *self.tiles, *self.offsets)

    def call(self, operator: Callable, *args: Any, keeps: bool = False) -> Any:
        """Call a registered operator; `keeps` says that its backward pass needs the index."""
        out = operator(*args, impl=self.impl)
        plan.hold(*self.made, backward=keeps)
        return out

    def rows(self, x: Tensor) -> Tensor:
        """A result in the shape that the caller expects: without B if the arguments had none."""
        if self.fresh is not None:
            x = unless_stale(x, self.fresh.view(-1, *(1,) * (x.ndim - 1)))
        return x if self.batched else x.squeeze(0)


def unless_stale(x: Tensor, fresh: Tensor) -> Tensor:
    """`x` where the index is `fresh`; elsewhere −1, or NaN with NaN gradients."""
    if not x.is_floating_point():
        return torch.where(fresh, x, -1)
    return x * torch.where(fresh, 1.0, torch.nan).to(x.dtype)


def prepare(
    name: str,
    queries: Any,
    points: Any,
    features: Any = None,
    *,
    k: int | None = None,
    index: PointIndex | None = None,
    batch: Batch | None = None,
    impl: str = "auto",
    aggregates: bool = False,
    waits: bool = False,
) -> Search:
    """Check a public call and bring it into the form of the registered operators; builds the indexes that the search needs."""
    operands = {"queries": (queries, "M D"), "points": (points, "N D")}
    if aggregates:
        operands["features"] = (features, "N F")
    batched = any(isinstance(x, Tensor) and x.ndim == 3 for x, _ in operands.values())
    n = checks.shapes(name, **{key: (x, f"B {letters}" if batched else letters) for key, (x, letters) in operands.items()})
    if n["D"] == 0:
        raise ValueError(f"{name}: points must have at least one dimension; got {list(points.shape)}")
    if k is not None:
        columns(name, k, n.get("B", 1) * n["M"], queries)
    segments = _offsets(name, batch, batched, n["M"], n["N"], queries.device)
    impl = implementation(name, impl, queries, n["D"], k, n.get("B", 1) * n["M"])
    source, dtype = points, torch.promote_types(torch.promote_types(queries.dtype, points.dtype), torch.float32)
    if not batched:
        queries, points = _row(queries), _row(points)
        features = _row(features) if aggregates else None
    queries, points = queries.to(dtype).contiguous(), points.to(dtype).contiguous()
    fresh = None
    if index is not None:
        usable = PointIndex.checked(index, name, source, dtype, segments[1])
        fresh, index = index.fresh(name, source, waits), usable
    tensors: tuple[Tensor | None, ...] = (None,) * 6
    made: tuple[Tensor | None, ...] = ()
    if impl != "reference" and tiled(impl, n["M"], n["N"]):
        given = None if index is None or index.impl != impl else index[:3]
        if given is None:
            made = build(points.detach(), segments[1], impl)
            plan.hold(*made)
        tensors = (*(given or made), None, None, None)
        if impl == "triton":
            of_queries = build(queries.detach(), segments[0], impl)
            made, tensors = (*made, *of_queries), (*tensors[:3], *of_queries)
            plan.hold(*made)
    return Search(queries, points, features.contiguous() if aggregates else None, tensors, made, segments, batched, impl, fresh)


def _row(x: Tensor) -> Tensor:
    """Add a batch of one. A plan detaches first: autograd would query the device of a fake tensor, which may not exist."""
    if torch.compiler.is_compiling() or not plan.recording():
        return x.unsqueeze(0)
    return x.detach().unsqueeze(0).requires_grad_(x.requires_grad)


def _offsets(name: str, batch: Any, batched: bool, M: int, N: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    if batch is None:
        return None, None
    if batched:
        raise ValueError(f"{name}: batch must be None for batched points [B, N, D]; give ragged points as [N, D]")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"{name}: batch must be a pair (query_offsets, point_offsets); got {_of_length(batch)}")
    of_queries = offsets(name, "query_offsets", batch[0], M, device)
    of_points = offsets(name, "point_offsets", batch[1], N, device)
    if of_queries.shape != of_points.shape:
        raise ValueError(
            f"{name}: query_offsets and point_offsets must have the same length, one more than there are segments; "
            f"got {of_queries.shape[0]} and {of_points.shape[0]}"
        )
    return of_queries, of_points


def _of_length(batch: Any) -> str:
    kind = type(batch).__name__
    return f"a {kind} of {len(batch)}" if isinstance(batch, (tuple, list)) else kind


def widths(name: str, sigma: Any, search: Search) -> tuple[Tensor | None, float]:
    """σ in the form of the registered operators: a tensor ``[B]`` and 0, or None and a number."""
    if not isinstance(sigma, Tensor):
        return None, positive(name, "sigma", sigma)
    B = search.queries.shape[0]
    checks.dense(name, "sigma", sigma)
    if not sigma.is_floating_point():
        raise TypeError(f"{name}: sigma must be a floating-point tensor or a number; got {sigma.dtype}")
    if sigma.device != search.queries.device:
        raise ValueError(f"{name}: sigma must be on {search.queries.device}, where queries is; got {sigma.device}")
    if sigma.ndim > 1 or (sigma.ndim == 1 and sigma.shape[0] != B):
        raise ValueError(f"{name}: sigma must be a number, a tensor [] or one [B] with B={B}; got {list(sigma.shape)}")
    if sigma.device.type == "cpu" and plain(sigma) and not bool((sigma.detach() > 0).all()):
        raise ValueError(f"{name}: sigma must be > 0; got {sigma.tolist()}")
    return sigma.expand(B).contiguous(), 0.0


def check(name: str, features: Tensor | None, *args: Any, aggregates: bool = False) -> dict[str, int]:
    """Check canonical arguments, ``queries, points, *tiles, *offsets``; returns their sizes."""
    queries, points, order, ordered, boxes, qorder, qordered, qboxes, query_offsets, point_offsets = args
    operands = {"queries": (queries, "B M D"), "points": (points, "B N D")}
    if aggregates:
        operands["features"] = (features, "B N F")
    for key, x, letters in (
        ("sorted", ordered, "B N D"),
        ("boxes", boxes, "B nodes 2 D"),
        ("qsorted", qordered, "B M D"),
        ("qboxes", qboxes, "B qnodes 2 D"),
    ):
        if x is not None:
            operands[key] = (x, letters)
    n = checks.shapes(name, **operands)
    if queries.dtype != points.dtype or queries.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: queries and points must both be float32 or float64; got {queries.dtype} and {points.dtype}")
    for key, x, rows in (("order", order, n["N"]), ("qorder", qorder, n["M"])):
        if x is not None and (x.dtype != torch.int32 or x.shape != (n["B"], rows)):
            raise ValueError(f"{name}: {key} must be int32 [{n['B']}, {rows}]; got {x.dtype} {list(x.shape)}")
    if (query_offsets is None) != (point_offsets is None):
        raise ValueError(f"{name}: query_offsets and point_offsets must be given both or neither")
    if query_offsets is not None and (query_offsets.ndim != 1 or query_offsets.shape != point_offsets.shape):
        raise ValueError(f"{name}: query_offsets and point_offsets must be vectors of one length")
    return n


def check_sigma(name: str, sigma: Tensor | None, B: int) -> None:
    if sigma is not None and sigma.shape != (B,):
        raise ValueError(f"{name}: sigma must be [B] with B={B}; got {list(sigma.shape)}")
