"""Triton implementation of ``radius_search``: one pass counts neighbours, the host reads the total, a second fills the lists.

Buffer sizes depend on the total, so these passes are recorded again for every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...jit import Unsupported
from ...jit.launch import halves
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from ...op.plan import Kernel
from .._search import gpu_lists as lists
from .._search import gpu_pairs as pairs
from .._search.arguments import named
from .._search.gpu import Sides
from .._search.gpu_walk import nodes_of
from .._search.reference import root


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *operands, radius = args
    offsets = _count(named(*operands[:2], None, *operands[2:]), radius).bind()(*operands)
    total = int(offsets[-1])
    if total >= 2**31:
        raise Unsupported(f"radius_search: impl='triton' has kernels for fewer than 2³¹ neighbours in all; got {total}")
    given = named(*operands[:2], None, *operands[2:], offsets=offsets)
    return offsets, *_fill(given, radius, total).bind()(*given.values())


def _count(given: dict[str, Any], radius: float) -> Pass:
    """The pass that computes the offsets of the lists."""
    of, p = Sides.of(given), _pass(given)
    n = of.queries.shape[0] * of.queries.shape[1] + 1
    counts = p.buffer("counts", [n], torch.int64, fill=0)
    p.launch(lists.lists, _problem(of, radius), [*of.walk(p), counts, None, None, None], writes=["offsets"])
    (offsets,) = p.call("torch.cumsum", lambda counts: counts.cumsum(0), [counts], [("offsets", [n], torch.int64)])
    return p.returns(offsets).returning_one()


def _fill(given: dict[str, Any], radius: float, total: int) -> Pass:
    """The pass that computes indices and distances, given the offsets."""
    of, p = Sides.of(given), _pass(given)
    squares = p.buffer("squares", [total], of.queries.dtype)
    indices, rows = p.buffer("indices", [total], torch.int64), p.buffer("rows", [total], torch.int64)
    p.launch(lists.lists, _problem(of, radius)._replace(writes=True), [*of.walk(p), "offsets", squares, indices, rows])
    gives = [("indices", [total], torch.int64), ("distances", [total], of.queries.dtype)]
    return p.returns(*p.call("torch.sort", _sorted, [squares, indices, rows], gives, writes=["indices", "distances"]))


def _sorted(squares: Tensor, indices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and distances, sorted by row, then d², then index."""
    if squares.dtype == torch.float32:
        order = torch.sort((squares.view(torch.int32).long() << 32) | indices)[1]
    else:
        order = torch.sort(indices)[1]
        order = order[torch.sort(squares[order], stable=True)[1]]
    order = order[torch.sort(rows[order], stable=True)[1]]
    return indices[order], root(squares[order])


def backward(
    grad: Tensor, queries: Tensor, points: Tensor, *rest: Any, needs: Sequence[bool], deterministic: bool
) -> tuple[Tensor, ...]:
    *_, offsets, indices, distances = rest
    queries, points = queries.contiguous(), points.contiguous()
    (B, M, _), N = queries.shape, points.shape[1]
    slopes = torch.where(distances > 0, grad / distances, 0)
    number = torch.arange(B * M, device=queries.device)
    rows = torch.repeat_interleave(number, offsets.diff(), output_size=indices.shape[0])
    keys = rows // max(1, M) * N + indices
    bounds = torch.stack([offsets[:-1], offsets[1:]]).int()
    given = dict(queries=queries, points=points, slopes=slopes, rows=rows, keys=keys, bounds=bounds)
    return _gradients(given, needs).bind()(*given.values())


def _gradients(given: dict[str, Tensor], needs: Sequence[bool]) -> Pass:
    """The pass that sums over the lists: by query as they are, and sorted by point."""
    queries, points, total = given["queries"], given["points"], given["keys"].shape[0]
    (B, M, D), N, found = queries.shape, points.shape[1], []
    p = Pass(queries.device, accumulator(queries), given)
    if needs[0]:
        found.append(p.buffer("d_queries", queries.shape, queries.dtype))
        runs = pairs.Runs("rows", None, "bounds", total, B * M)
        pairs.add_sums(p, runs, 1, "keys", None, pairs.Offsets("slopes", "queries", "points", found[-1], D), ["queries"])
    if needs[1]:
        found.append(p.buffer("d_points", points.shape, points.dtype))
        runs = pairs.add_runs(p, "keys", total, B * N)
        pairs.add_sums(p, runs, 1, "rows", None, pairs.Offsets("slopes", "points", "queries", found[-1], D), ["points"])
    return p.returns(*found)


def plan(*args: Any, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    """The lengths of the lists are unknown, so this is the plan of a short list, without workspace sizes."""
    *operands, radius = args
    given, total = named(*operands[:2], None, *operands[2:]), pairs.CHUNK
    (B, M, _), device = operands[0].shape, "meta"
    offsets = torch.empty(B * M + 1, dtype=torch.int64, device=device)
    found = _count(given, radius).plan("forward") + _fill(dict(given, offsets=offsets), radius, total).plan("forward")
    if any(needs):
        rows = torch.empty(total, dtype=torch.int64, device=device)
        bounds = torch.empty(2, B * M, dtype=torch.int32, device=device)
        slopes = torch.empty(total, dtype=operands[0].dtype, device=device)
        lists = dict(slopes=slopes, rows=rows, keys=rows, bounds=bounds)
        found += _gradients(dict(queries=operands[0], points=operands[1], **lists), needs).plan("backward")
    return [replace(kernel, workspace=0) for kernel in found]


def _pass(given: dict[str, Any]) -> Pass:
    queries = given["queries"]
    return Pass(queries.device, queries.dtype, given)


def _problem(of: Sides, radius: float) -> lists.Problem:
    (B, M, D), N = of.queries.shape, of.points.shape[1]
    return lists.Problem(B, M, N, of.segments, nodes_of(of.boxes), D, halves(radius * radius), of.queries.dtype, False)
