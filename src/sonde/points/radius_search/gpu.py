"""Triton implementation of ``radius_search``: the one operator that waits for the device, to learn how long its lists are."""

from __future__ import annotations

import torch
from torch import Tensor

from ...jit import Unsupported
from ...op.dtypes import accumulator
from ...op.plan import Determinism, Kernel
from .._search import gpu as passes
from .._search import gpu_lists as lists
from .._search import gpu_pairs as pairs
from .._search.gpu_walk import halves, nodes_of
from .._search.reference import root


def forward(*args) -> tuple[Tensor, Tensor, Tensor]:
    *operands, radius = args
    of = passes.sides(*operands)
    (B, M, _), new = of.queries.shape, of.queries.new_empty
    problem = _problem(of, radius)
    offsets = of.queries.new_zeros(B * M + 1, dtype=torch.int64)
    lists.lists(problem, *of.walk(), offsets, None, None, None)
    offsets = offsets.cumsum(0)
    total = int(offsets[-1])
    if total >= 2**31:
        raise Unsupported(f"radius_search: impl='triton' has kernels for fewer than 2³¹ neighbours in all; got {total}")
    squares, indices, rows = new(total), new(total, dtype=torch.int64), new(total, dtype=torch.int64)
    lists.lists(problem._replace(writes=True), *of.walk(), offsets, squares, indices, rows)
    order = _order(squares, indices, rows)
    return offsets, indices[order], root(squares[order])


def _order(squares: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """By row, then d², then index."""
    if squares.dtype == torch.float32:
        order = torch.sort((squares.view(torch.int32).long() << 32) | indices)[1]
    else:
        order = torch.sort(indices)[1]
        order = order[torch.sort(squares[order], stable=True)[1]]
    return order[torch.sort(rows[order], stable=True)[1]]


def _problem(of: passes.Sides, radius: float) -> lists.Problem:
    (B, M, D), N = of.queries.shape, of.points.shape[1]
    return lists.Problem(B, M, N, of.segments, nodes_of(of.boxes), D, halves(radius * radius), of.queries.dtype, False)


def backward(grad: Tensor, queries: Tensor, points: Tensor, *rest, needs: list[bool], deterministic: bool) -> list[Tensor]:
    *_, offsets, indices, distances = rest
    queries, points = queries.contiguous(), points.contiguous()
    (B, M, _), N = queries.shape, points.shape[1]
    slopes = torch.where(distances > 0, grad / distances, 0)
    number = torch.arange(B * M, device=queries.device)
    rows = torch.repeat_interleave(number, offsets.diff(), output_size=indices.shape[0])
    keys = rows // max(1, M) * N + indices
    here, there, wide = queries.flatten(0, 1), points.flatten(0, 1), accumulator(queries)
    found = []
    if needs[0]:
        found.append(torch.empty_like(queries))
        runs = pairs.Runs(rows, None, torch.stack([offsets[:-1], offsets[1:]]).int())
        pairs.sums(runs, 1, keys, None, None, slopes, here, there, None, found[-1], wide)
    if needs[1]:
        found.append(torch.empty_like(points))
        pairs.sums(pairs.runs(keys, B * N), 1, rows, None, None, slopes, there, here, None, found[-1], wide)
    return found


def plan(*args, needs: list[bool], deterministic: bool) -> list[Kernel]:
    """How long the lists are is not known, nor is what they take."""
    *operands, radius = args
    of = passes.sides(*operands)
    steps = [("_list", ("offsets",)), ("torch.cumsum", ()), ("_list", ()), ("torch.sort", ("indices", "distances"))]
    chosen = passes.chosen(lists.lists, _problem(of, radius), of.queries)
    found = [
        Kernel(name, writes, of.queries.dtype, Determinism.BATCH_INVARIANT, 0, "forward", *(chosen if name == "_list" else ()))
        for name, writes in steps
    ]
    for name, need in zip(("queries", "points"), needs):
        if need:
            found += [
                Kernel(kernel, (name,) if kernel == "_sums" else (), accumulator(of.queries), Determinism.RUN_TO_RUN, 0, "backward")
                for kernel in (*(("torch.sort", "_runs") if name == "points" else ()), "_chunks", "_sums")
            ]
    return found
