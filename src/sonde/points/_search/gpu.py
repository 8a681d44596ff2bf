"""Passes of the point operators: searches and sums over neighbours, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...jit.launch import halves
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from ...op.plan import Determinism
from . import gpu_ball as balls
from . import gpu_nearest as neighbours
from . import gpu_pairs as pairs
from .gpu_walk import MOST_F, nodes_of

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
Given = Mapping[str, Any]


class Sides(NamedTuple):
    """Queries and points: both sorted along the curve with boxes, or both in the caller's order without."""

    queries: Tensor
    points: Tensor
    boxes: Tensor | None  # of the points
    qboxes: Tensor | None
    segments: int  # of a ragged batch
    names: tuple[str, str]  # the slots of queries and points

    @staticmethod
    def of(given: Given) -> Sides:
        queries, points = ("queries", "points") if given["sorted"] is None else ("qsorted", "sorted")
        offsets = given["query_offsets"]
        segments = 0 if offsets is None else offsets.shape[0] - 1
        return Sides(given[queries], given[points], given["boxes"], given["qboxes"], segments, (queries, points))

    def walk(self, p: Pass, columns: bool = False) -> list[str | None]:
        """The first slots of every kernel: rows, candidates, boxes of candidates, offsets of both.

        Rows are queries and candidates points, or the other way round if `columns`.
        """
        tree = self.boxes is not None
        queries, points = (p.contiguous(name) for name in self.names)
        order, boxes, qorder, qboxes = (p.contiguous(name) if tree else None for name in ("order", "boxes", "qorder", "qboxes"))
        of_queries, of_points = p.contiguous("query_offsets"), p.contiguous("point_offsets")
        if columns:
            return [points, order, queries, qorder, qboxes, of_points, of_queries]
        return [queries, qorder, points, order, boxes, of_queries, of_points]


def nearest(given: Given, k: int, radius: float | None = None, width: float = 0.0) -> tuple[Pass, dict[str, str]]:
    """The k nearest: distances and indices ``[B, M, k]``; with a radius, how many were cut off; with features, their sums."""
    of, features, sigma = Sides.of(given), given.get("features"), given.get("sigma")
    (B, M, D), N, F = of.queries.shape, of.points.shape[1], 0 if features is None else features.shape[2]
    wide, square = accumulator(of.queries, features, sigma), halves(0.0 if radius is None else radius * radius)
    problem = neighbours.Problem(
        B, M, N, of.segments, nodes_of(of.boxes), D, k, F, square, halves(width), radius is not None,
        of.queries.dtype, wide, FORCE_INT64 or N * max(F, D) >= 2**31,
    )  # fmt: skip
    p = Pass(of.queries.device, wide, given)
    found = {
        "distances": p.buffer("distances", (B, M, k), of.queries.dtype),
        "indices": p.buffer("indices", (B, M, k), torch.int64),
    }
    if radius is not None:
        found["truncated"] = p.buffer("truncated", (B, M), torch.int64)
    if features is not None:
        found["out"] = p.buffer("out", (B, M, F), features.dtype)
    sums = [p.contiguous("features"), p.contiguous("sigma")] if F else [None, None]
    results = [found["distances"], found["indices"], found.get("truncated"), found["out"] if F else None]
    p.launch(neighbours.nearest, problem, [*of.walk(p), *sums, *results], writes=["out"])
    return p, found


def nearest_gradients(given: Given, needs: Sequence[bool], width: float = 0.0) -> Pass:
    """The gradients of queries and points and, with features, of features and σ.

    ``grad`` is that of the sums or, without features, of the distances.
    """
    queries, points, indices, features = given["queries"], given["points"], given["indices"], given.get("features")
    names = ("queries", "points", "features", "sigma")
    wants = [name for name, need in zip(names, needs) if need]
    (B, M, D), N, k, sigma = queries.shape, points.shape[1], indices.shape[2], given.get("sigma")
    F, wide = 0 if features is None else features.shape[2], accumulator(queries, features, sigma)
    problem = pairs.Problem(B, M, N, D, k, F, halves(width), wide, FORCE_INT64 or N * max(F, D) >= 2**31)
    p, found = Pass(queries.device, wide, given), {}
    slots = {name: p.contiguous(name) for name in ("grad", *names, "distances", "indices")}
    for name in wants:
        if name != "sigma":
            found[name] = p.buffer(f"d_{name}", given[name].shape, given[name].dtype)
    weights = p.buffer("weights", indices.shape, wide) if "features" in wants else None
    slopes = p.buffer("slopes", indices.shape, wide) if "points" in wants else None
    keys = p.buffer("keys", indices.shape, torch.int64 if B * N >= 2**31 else torch.int32) if weights or slopes else None
    spread = p.buffer("spread", (B, M), wide) if "sigma" in wants else None
    operands = [slots[name] for name in ("queries", "points", "distances", "indices", "grad", "features", "sigma")]
    made = [weights, slopes, keys, found.get("queries"), spread]
    p.launch(pairs.pairs, problem, [*operands, *made], writes=[name for name in wants if name == "queries"])
    if keys is not None:
        runs = pairs.add_runs(p, keys, B * M * k, B * N)
        d_features = pairs.Features(weights, slots["grad"], found["features"], F) if weights else None
        d_points = pairs.Offsets(slopes, slots["points"], slots["queries"], found["points"], D) if slopes else None
        pairs.add_sums(p, runs, k, None, d_features, d_points, [name for name in wants if name in ("points", "features")])
    if spread is not None:
        assert sigma is not None
        found["sigma"] = _add_sum(p, spread, sigma)
    return p.returns(*(found[name] for name in wants))


def ball(given: Given, width: float, radius: float) -> Pass:
    """out ``[B, M, F]`` and softmax statistics ``[B, M, 2]``: a distance n close to the smallest, and 1/Σ exp((n − d)/σ)."""
    of, features = Sides.of(given), given["features"]
    problem, (B, M, _) = _ball_problem(of, given, width, radius), of.queries.shape
    p = Pass(of.queries.device, problem.wide, given)
    out, levels = p.buffer("out", (B, M, features.shape[2]), features.dtype), p.buffer("levels", (B, M, 2), problem.wide)
    p.launch(balls.ball, problem, [*of.walk(p), p.contiguous("features"), p.contiguous("sigma"), out, levels], writes=["out"])
    return p.returns(out, levels)


def ball_gradients(given: Given, width: float, radius: float, needs: Sequence[bool]) -> Pass:
    """The gradients of queries, points, features and σ that are needed: one walk over rows, and up to two over columns."""
    of, features, sigma = Sides.of(given), given["features"], given["sigma"]
    wants = [name for name, need in zip(("queries", "points", "features", "sigma"), needs) if need]
    rows, (B, M, _) = _ball_problem(of, given, width, radius), of.queries.shape
    p, found = Pass(of.queries.device, rows.wide, given), {}
    grad, values, of_sigma, levels = (p.contiguous(name) for name in ("grad", "features", "sigma", "levels"))
    for name, like in (("queries", of.queries), ("points", of.points), ("features", features)):
        if name in wants:
            found[name] = p.buffer(f"d_{name}", like.shape, like.dtype)
    delta = p.buffer("delta", (B, M), rows.wide) if "points" in wants else None
    spread = p.buffer("spread", (B, M), rows.wide) if "sigma" in wants else None
    if delta or spread or "queries" in wants:
        p.launch(
            balls.ball_gradients, rows._replace(coordinates=True),
            [*of.walk(p), grad, values, of_sigma, levels, delta, found.get("queries"), spread, None],
            writes=[name for name in wants if name == "queries"],
        )  # fmt: skip
    if spread is not None:
        found["sigma"] = _add_sum(p, spread, sigma)
    columns = _ball_problem(of, given, width, radius, columns=True)
    for some in _column_passes([name for name in wants if name in ("points", "features")], columns.F):
        coordinates, of_features = "points" in some, "features" in some
        p.launch(
            balls.ball_gradients, columns._replace(coordinates=coordinates, features=of_features),
            [*of.walk(p, columns=True), values, grad, of_sigma, levels, delta if coordinates else levels,
             found["points"] if coordinates else None, None, found["features"] if of_features else None],
            writes=some,
        )  # fmt: skip
    return p.returns(*(found[name] for name in wants))


def _column_passes(wants: list[str], F: int) -> list[list[str]]:
    """Which gradients each walk over columns computes: all of them, if a program holds all features."""
    if F > MOST_F:
        return [[name] for name in wants]
    return [wants] if wants else []


def _ball_problem(of: Sides, given: Given, width: float, radius: float, columns: bool = False) -> balls.Problem:
    rows, others, boxes = (of.points, of.queries, of.qboxes) if columns else (of.queries, of.points, of.boxes)
    (B, M, D), N, F = rows.shape, others.shape[1], given["features"].shape[2]
    return balls.Problem(
        B, M, N, of.segments, nodes_of(boxes), D, F, halves(radius * radius), halves(width), rows.dtype,
        accumulator(rows, given["features"], given["sigma"]), FORCE_INT64 or max(M, N) * max(F, D) >= 2**31, columns,
    )  # fmt: skip


def _add_sum(p: Pass, spread: str, sigma: Tensor) -> str:
    """The gradient of σ: the sum over the queries of each row."""
    dtype = sigma.dtype  # the step must not keep the tensor alive
    gives = [("d_sigma", sigma.shape, dtype)]
    total = p.call("torch.sum", lambda x: x.sum(1).to(dtype), [spread], gives, writes=["sigma"], promise=Determinism.RUN_TO_RUN)
    return total[0]
