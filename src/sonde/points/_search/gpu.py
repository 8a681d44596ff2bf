"""What the operators' passes on a GPU share: operands in the order that they are walked in, and the problems that they pose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import jit
from ...op.dtypes import accumulator
from ...op.plan import Determinism, Kernel
from . import gpu_ball as balls
from . import gpu_nearest as neighbours
from . import gpu_pairs as pairs
from .gpu_walk import MOST_F, halves, nodes_of
from .index.gpu_kernels import sorting

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do


class Sides(NamedTuple):
    """Queries and points, each sorted along the curve with boxes, or as they came, without."""

    queries: Tensor
    qorder: Tensor | None
    qboxes: Tensor | None
    points: Tensor
    order: Tensor | None
    boxes: Tensor | None
    query_offsets: Tensor | None
    point_offsets: Tensor | None

    @property
    def segments(self) -> int:
        return 0 if self.query_offsets is None else self.query_offsets.shape[0] - 1

    def walk(self, columns: bool = False) -> tuple[Tensor | None, ...]:
        """The first tensors of a kernel: rows, what comes by, its boxes, offsets of both."""
        if columns:
            return self.points, self.order, self.queries, self.qorder, self.qboxes, self.point_offsets, self.query_offsets
        return self.queries, self.qorder, self.points, self.order, self.boxes, self.query_offsets, self.point_offsets


def sides(
    queries: Tensor, points: Tensor, order: Tensor | None, ordered: Tensor | None, boxes: Tensor | None, qorder: Tensor | None,
    qordered: Tensor | None, qboxes: Tensor | None, query_offsets: Tensor | None, point_offsets: Tensor | None,
) -> Sides:  # fmt: skip
    given = (queries, None, None, points, None, None) if ordered is None else (qordered, qorder, qboxes, ordered, order, boxes)
    return Sides(*dense(*given, query_offsets, point_offsets))


def dense(*tensors: Any) -> list[Any]:
    """As kernels read them; what torch.vmap does not map comes as one row that stands for all."""
    return [None if t is None else t.contiguous() for t in tensors]


def nearest(
    of: Sides, k: int, radius: float | None = None, features: Tensor | None = None, sigma: Tensor | None = None, width: float = 0.0
) -> tuple[Tensor, ...]:
    """distances, indices ``[B, M, k]``; with a radius, how many more there are; with features, their weighted sums."""
    problem = nearest_problem(of, k, radius, features, sigma, width)
    new, (B, M, _) = of.queries.new_empty, of.queries.shape
    distances, indices = new(B, M, k), new(B, M, k, dtype=torch.int64)
    truncated = None if radius is None else new(B, M, dtype=torch.int64)
    out = None if features is None else features.new_empty(B, M, features.shape[2])
    if features is None or not features.shape[2]:  # nothing to sum
        neighbours.nearest(problem, *of.walk(), None, None, distances, indices, truncated, None)
    else:
        neighbours.nearest(problem, *of.walk(), *dense(features, sigma), distances, indices, truncated, out)
    return tuple(t for t in (distances, indices, truncated, out) if t is not None)


def plan_nearest(
    of: Sides, k: int, radius: float | None = None, features: Tensor | None = None, sigma: Tensor | None = None, width: float = 0.0
) -> list[Kernel]:
    problem = nearest_problem(of, k, radius, features, sigma, width)
    about = chosen(neighbours.nearest, problem, of.queries)
    return [Kernel(neighbours.nearest.title, ("out",), problem.wide, Determinism.BATCH_INVARIANT, 0, "forward", *about)]


def chosen(kernel: jit.Tunable, problem: Any, queries: Tensor) -> tuple:
    """For a plan: the configuration that it runs in, and what else is known of it."""
    config, *about = kernel.choose(problem, str(queries.dtype), queries.device)
    return str(config), *about


def nearest_problem(
    of: Sides, k: int, radius: float | None, features: Tensor | None, sigma: Tensor | None, width: float
) -> neighbours.Problem:
    (B, M, D), N = of.queries.shape, of.points.shape[1]
    F = 0 if features is None else features.shape[2]
    square = halves(0.0 if radius is None else radius * radius)
    wide = accumulator(of.queries, features, sigma)
    return neighbours.Problem(
        B, M, N, of.segments, nodes_of(of.boxes), D, k, F, square, halves(width), radius is not None,
        of.queries.dtype, wide, FORCE_INT64 or N * max(F, D) >= 2**31,
    )  # fmt: skip


def ball(of: Sides, features: Tensor, sigma: Tensor | None, width: float, radius: float) -> tuple[Tensor, Tensor]:
    """out ``[B, M, F]``, and what weighs: a distance n close to the nearest's and 1/Σ exp((n − d)/σ) ``[B, M, 2]``."""
    problem = ball_problem(of, features, sigma, width, radius)
    B, M, _ = of.queries.shape
    out, levels = features.new_empty(B, M, features.shape[2]), features.new_empty(B, M, 2, dtype=problem.wide)
    balls.ball(problem, *of.walk(), *dense(features, sigma), out, levels)
    return out, levels


def plan_ball(
    of: Sides, features: Tensor, sigma: Tensor | None, width: float, radius: float, needs: Sequence[bool]
) -> list[Kernel]:
    problem = ball_problem(of, features, sigma, width, radius)
    invariant, wide, (B, M, _) = Determinism.BATCH_INVARIANT, problem.wide, of.queries.shape
    found = [Kernel(balls.ball.title, ("out",), wide, invariant, 0, "forward", *chosen(balls.ball, problem, of.queries))]
    queries, points, of_features, of_sigma = needs
    room = (points + of_sigma) * B * M * wide.itemsize
    title = balls.ball_gradients.title

    def add(problem: balls.Problem, **writes: bool) -> None:
        about = chosen(balls.ball_gradients, problem, of.queries)
        names = tuple(name for name, need in writes.items() if need)
        found.append(Kernel(title, names, wide, invariant, room, "backward", *about))

    if queries or points or of_sigma:
        add(problem._replace(coordinates=True), queries=queries)
        if of_sigma:
            found.append(Kernel("torch.sum", ("sigma",), wide, Determinism.RUN_TO_RUN, room, "backward"))
    for coordinates, values in columns_of(points, of_features, problem.F):
        columns = ball_problem(of, features, sigma, width, radius, columns=True)
        add(columns._replace(coordinates=coordinates, features=values), points=coordinates, features=values)
    return found


def columns_of(points: bool, features: bool, F: int) -> list[tuple[bool, bool]]:
    """Which gradients each pass over columns computes: together as long as a program holds all features."""
    passes = [(points, features)] if F <= MOST_F else [(points, False), (False, features)]
    return [wanted for wanted in passes if any(wanted)]


def ball_problem(
    of: Sides, features: Tensor, sigma: Tensor | None, width: float, radius: float, columns: bool = False
) -> balls.Problem:
    rows, _, others, _, boxes, _, _ = of.walk(columns)
    assert rows is not None
    assert others is not None
    (B, M, D), N, F = rows.shape, others.shape[1], features.shape[2]
    return balls.Problem(
        B, M, N, of.segments, nodes_of(boxes), D, F, halves(radius * radius), halves(width), rows.dtype,
        accumulator(rows, features, sigma), FORCE_INT64 or max(M, N) * max(F, D) >= 2**31, columns,
    )  # fmt: skip


def ball_gradients(
    grad: Tensor,
    of: Sides,
    features: Tensor,
    sigma: Tensor | None,
    width: float,
    radius: float,
    levels: Tensor,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Of queries, points, features and σ, as far as they are needed."""
    queries, points, of_features, of_sigma = needs
    (grad, features, sigma, levels), delta = dense(grad, features, sigma, levels), None
    found: list[Tensor | None] = [None] * 4
    if queries or points or of_sigma:
        rows = ball_problem(of, features, sigma, width, radius)._replace(coordinates=True)
        found[0] = torch.empty_like(of.queries) if queries else None
        spread = levels.new_empty(levels.shape[:2]) if of_sigma else None
        delta = levels.new_empty(levels.shape[:2]) if points else None
        balls.ball_gradients(rows, *of.walk(), grad, features, sigma, levels, delta, found[0], spread, None)
        if of_sigma:
            found[3] = spread.sum(1).to(sigma.dtype)  # type: ignore[union-attr]
    if points or of_features:
        columns = ball_problem(of, features, sigma, width, radius, columns=True)
        found[1] = torch.empty_like(of.points) if points else None
        found[2] = torch.empty_like(features) if of_features else None
        for coordinates, values in columns_of(points, of_features, features.shape[2]):
            balls.ball_gradients(
                columns._replace(coordinates=coordinates, features=values), *of.walk(columns=True), features, grad, sigma, levels,
                delta if coordinates else levels, found[1] if coordinates else None, None, found[2] if values else None,
            )  # fmt: skip
    return [t for t in found if t is not None]


def nearest_gradients(
    grad: Tensor, queries: Tensor, points: Tensor, distances: Tensor, indices: Tensor, needs: Sequence[bool],
    features: Tensor | None = None, sigma: Tensor | None = None, width: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """Of queries and points; with features, of these and σ. `grad` is that of the sums, or, without features, of the distances."""
    of_queries, of_points, of_features, of_sigma = (*needs, False, False)[:4]
    problem = pairs_problem(queries, points, indices, features, sigma, width)
    queries, points, grad, distances, indices, features, sigma = dense(queries, points, grad, distances, indices, features, sigma)
    wide, targets = problem.wide, points.shape[0] * points.shape[1]

    def values(wanted: bool) -> Tensor | None:
        return queries.new_empty(indices.shape, dtype=wide) if wanted else None

    weights, slopes = values(of_features), values(of_points)
    keys = None
    if of_points or of_features:
        keys = torch.empty(indices.shape, dtype=torch.int64 if targets >= 2**31 else torch.int32, device=queries.device)
    d_queries = torch.empty_like(queries) if of_queries else None
    d_sigma = queries.new_empty(queries.shape[:2], dtype=wide) if of_sigma else None
    pairs.pairs(
        problem, queries, points, distances, indices, grad, features, sigma, weights, slopes, keys, d_queries, d_sigma
    )  # fmt: skip
    d_points = torch.empty_like(points) if of_points else None
    d_features = torch.empty_like(features) if of_features else None  # type: ignore[arg-type]
    if keys is not None:
        runs = pairs.runs(keys, targets)
        del keys
        rows = grad.flatten(0, 1) if of_features else None
        here, there = (points.flatten(0, 1), queries.flatten(0, 1)) if of_points else (None, None)
        pairs.sums(runs, problem.k, None, weights, rows, slopes, here, there, d_features, d_points, wide)
    if d_sigma is not None:
        d_sigma = d_sigma.sum(1).to(sigma.dtype)  # type: ignore[union-attr]
    return [t for t in (d_queries, d_points, d_features, d_sigma) if t is not None]


def plan_pairs(
    queries: Tensor, points: Tensor, k: int, needs: Sequence[bool], features: Tensor | None = None, sigma: Tensor | None = None,
    width: float = 0.0,
) -> list[Kernel]:  # fmt: skip
    """What :func:`nearest_gradients` launches."""
    if not any(needs):
        return []
    of_queries, of_points, of_features, of_sigma = (*needs, False, False)[:4]
    (B, M, D), N = queries.shape, points.shape[1]
    indices = queries.new_empty(B, M, k, device="meta", dtype=torch.int64)
    problem = pairs_problem(queries, points, indices, features, sigma, width)
    wide, n, key = problem.wide, B * M * k, 8 if B * N >= 2**31 else 4
    room = (of_features + of_points) * n * wide.itemsize + of_sigma * B * M * wide.itemsize
    steps: list[tuple[str, tuple[str, ...], Determinism]] = []
    if of_points or of_features:
        part = n // pairs.CHUNK * (of_features * problem.F + of_points * D) * wide.itemsize
        room += 8 * B * N + max(n * (key + sorting(key)), n * (key + 8) + part)
        writes = tuple(name for name, need in (("points", of_points), ("features", of_features)) if need)
        names = {"torch.sort": (), "_runs": (), **({"_chunks": ()} if n >= pairs.CHUNK else {}), "_sums": writes}
        steps = [(name, writes, Determinism.RUN_TO_RUN) for name, writes in names.items()]
    if of_sigma:
        steps.append(("torch.sum", ("sigma",), Determinism.RUN_TO_RUN))
    about = chosen(pairs.pairs, problem, queries)
    first = ("queries",) if of_queries else ()
    found = [Kernel(pairs.pairs.title, first, wide, Determinism.BATCH_INVARIANT, room, "backward", *about)]
    return found + [Kernel(name, writes, wide, promise, room, "backward") for name, writes, promise in steps]


def pairs_problem(
    queries: Tensor, points: Tensor, indices: Tensor, features: Tensor | None, sigma: Tensor | None, width: float
) -> pairs.Problem:
    (B, M, D), N, k = queries.shape, points.shape[1], indices.shape[2]
    F = 0 if features is None else features.shape[2]
    int64 = FORCE_INT64 or N * max(F, D) >= 2**31
    return pairs.Problem(B, M, N, D, k, F, halves(width), accumulator(queries, features, sigma), int64)
