"""Searches on CPUs, and the gradients of distances by queries and points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import array, jit
from ...op.cpu_steps import Array, CpuPass
from ...op.plan import Determinism
from . import cpu_tree as trees
from .cpu_rows import rates
from .cpu_segments import PIECE, gather, inverted, sums
from .index.cpu import add_index, add_segments

Given = Mapping[str, Tensor | None]
Names = Sequence[str]


def ball(radius: float, dtype: torch.dtype) -> float:
    """r², rounded once and clamped to a finite value: nothing is a neighbour at an infinite distance."""
    return min(float(torch.tensor(radius * radius, dtype=dtype, device="cpu")), torch.finfo(dtype).max)


def scalar(dtype: torch.dtype, x: float) -> Any:
    """A NumPy scalar of the kernel's dtype; a Python float would make Numba compute in float64."""
    return (np.float64 if dtype == torch.float64 else np.float32)(x)


def three(p: CpuPass, slot: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    """The slot of the coordinates, padded to three dimensions with zeros, which change no distance."""
    missing = 3 - shape[-1]
    if not missing:
        return slot

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.detach(), (0, missing))

    return p.derive(f"{slot} padded", slot, pad, (*shape[:-1], 3), dtype)


def coordinates(p: CpuPass, name: str) -> Array:
    """The argument of that name in the kernels' form: ``[rows, 3]``."""
    x = p.given[name]
    assert x is not None
    return Array(three(p, p.dense(name, x.dtype), x.shape, x.dtype), (x.shape[0] * x.shape[1], 3))


def add_tree(p: CpuPass, points: str = "points", offsets: str = "point_offsets", given: bool = True) -> list[Any]:
    """A tree's kernel arguments: points, order, boxes, segments, nodes. With `given`, the tree is the caller's index, if there is
    one; otherwise this pass builds it."""
    x = p.given[points]
    assert x is not None
    B, N, D = x.shape
    if given and p.given["order"] is not None:
        slots = [p.dense(name, p.slots[name].dtype) for name in ("order", "sorted", "boxes")]
        count = p.given["boxes"].shape[1]  # type: ignore[union-attr]
    else:
        made = add_index(p, points, offsets, writes=[])
        slots, count = list(made[:3]), made.nodes
    order, rows, boxes = slots
    rows, boxes = three(p, rows, (B, N, D), x.dtype), three(p, boxes, (B, count, 2, D), x.dtype)
    views = Array(rows, (B * N, 3)), Array(order, (B * N,)), Array(boxes, (B * count, 6))
    return [*views, add_segments(p, offsets, N), count]


def add_rows(p: CpuPass, queries: str = "queries", offsets: str = "query_offsets") -> list[Any]:
    """The queries' kernel arguments: coordinates, the order in which they are visited, and the segment of each."""
    x = p.given[queries]
    assert x is not None
    (B, M, _), rows = x.shape, coordinates(p, queries)
    if p.given.get("rows") is not None:
        by: Any = Array("rows", (B * M,))
    elif M < trees.ORDERED:
        by = p.derive("rows", None, lambda: np.arange(B * M), (B * M,), torch.int64)
    else:
        by = Array(p.buffer("rows", (B * M,), torch.int64), (B * M,))
        p.run(trees.by_cells, B, [rows, M, by], scratch=trees.sorting_bytes(M), accumulator=x.dtype)
    return [rows, by, add_mine(p, offsets, M)]


def add_mine(p: CpuPass, offsets: str, M: int) -> Any:
    if p.given[offsets] is None:
        return trees.segment_of(None, M)
    return p.derive("segment", offsets, lambda ends: trees.segment_of(ends, M), (M,), torch.int64)


def add_rates(p: CpuPass, width: float, B: int) -> Any:
    """1/σ for every row of the batch."""
    if p.given["sigma"] is None:
        return rates(None, width, B)
    return p.derive("rates", "sigma", lambda sigma: rates(sigma, width, B), (B,), torch.float64)


def search(p: CpuPass, k: int, radius: float | None = None, writes: Names = ("out",)) -> dict[str, str]:
    """Find the k nearest points (within `radius`): distances, indices and, with a radius, how many were cut off."""
    queries, points = p.given["queries"], p.given["points"]
    assert queries is not None
    assert points is not None
    (B, M, _), N, dtype = queries.shape, points.shape[1], queries.dtype
    tree, rows = add_tree(p), add_rows(p)
    found = dict(distances=p.buffer("distances", (B, M, k), dtype), indices=p.buffer("indices", (B, M, k), torch.int64))
    cut: Any = np.empty(0, np.int64)
    if radius is not None:
        found["truncated"] = p.buffer("truncated", (B, M), torch.int64)
        cut = Array(found["truncated"], (B * M,))
    bound = scalar(dtype, torch.finfo(dtype).max if radius is None else ball(radius, dtype))
    results = Array(found["distances"], (B * M, k)), Array(found["indices"], (B * M, k)), cut
    own = min(k, N) * (dtype.itemsize + 8) + (0 if radius is None else trees.leaves_bytes(N))
    args = M, N, k, bound, *rows, *tree, *results
    p.run(neighbours, B * M, args, grain=64, writes=writes, scratch=own, accumulator=dtype)
    return found


def distance_gradients(given: Given, needs: Sequence[bool]) -> Pass:
    """For neighbour lists ``[B, M, k]``: ∂q_i = Σ_j g_ij (q_i − p_j)/d_ij and ∂p_j = −Σ_i g_ij (q_i − p_j)/d_ij."""
    indices, queries = given["indices"], given["queries"]
    assert indices is not None
    assert queries is not None
    p, n, k = CpuPass(queries.dtype, given), indices.shape[0] * indices.shape[1], indices.shape[2]
    entries, total = add_entries(p, n, k), indices.numel()
    read = p.dense("grad", queries.dtype), p.dense("distances", queries.dtype), p.dense("indices", torch.int64)
    slopes = p.buffer("slopes", (total,), queries.dtype)
    return list_gradients(p, entries, [Array(slot, (total,)) for slot in (*read, slopes)], total, needs)


def add_entries(p: CpuPass, rows: int, k: int) -> str:
    """The offsets of lists that all have length k."""
    return p.derive("entries", None, lambda: np.arange(rows + 1, dtype=np.int64) * k, (rows + 1,), torch.int64)


def list_gradients(p: CpuPass, entries: Any, lists: Sequence[Array], total: int, needs: Sequence[bool]) -> Pass:
    """Like ``distance_gradients`` for lists of any length, `total` in all: that of row i is entries[i] to entries[i + 1].

    `lists` are gradients, distances, indices, and a buffer for slopes.
    """
    queries, points = p.given["queries"], p.given["points"]
    assert queries is not None
    assert points is not None
    (B, M, _), N = queries.shape, points.shape[1]
    q, x = coordinates(p, "queries"), coordinates(p, "points")
    g_queries = p.buffer("d_queries", (B, M, 3), queries.dtype)
    args = M, N, entries, q, x, *lists, Array(g_queries, (B * M, 3))
    p.run(pull, B * M, args, grain=256, writes=["queries"] if needs[0] else [])
    found = [columns(p, g_queries, queries)] if needs[0] else []
    if needs[1]:
        from_lists = lists[2].slot, entries, lists[3].slot, q.slot, x.slot
        (g_points,) = add_gather(p, from_lists, (B, M, N), total, None, None, 0, ("points",))
        found.append(columns(p, g_points, points))
    return p.returns(*found)


def columns(p: CpuPass, slot: str, of: Tensor) -> str:
    """Gradients ``[…, 3]`` without the padding, in the shape and dtype of the coordinates `of`."""
    D = of.shape[-1]
    if D == 3:
        return p.rounded(slot, of.shape, of.dtype)

    def first(x: Tensor) -> Tensor:
        return x.view(-1, 3)[:, :D].reshape(of.shape).to(of.dtype).contiguous()

    (found,) = p.call("torch.contiguous", first, [slot], [(f"{slot} cut", of.shape, of.dtype)])
    return found


def add_widths(p: CpuPass, slot: str, sigma: Tensor) -> str:
    """The gradient of σ: the sum over the queries of each row."""
    gives = [("d_sigma", sigma.shape, torch.float64)]
    promise = Determinism.RUN_TO_RUN  # how torch splits long sums depends on the batch size
    (found,) = p.call("torch.sum", lambda x: x.sum(1), [slot], gives, writes=["sigma"], promise=promise)
    return p.rounded(found, sigma.shape, sigma.dtype)


def add_gather(
    p: CpuPass, from_lists: tuple[str, Any, str, str, str], sizes: tuple[int, int, int], total: int, weights: str | None,
    grad: str | None, F: int, wants: Names,
) -> tuple[str, ...]:  # fmt: skip
    """The gradients in `wants`, of points ``[B, N, 3]`` and features ``[B, N, F]``, summed over all lists that contain a point.

    Lists are inverted and cut into pieces. The number of pieces depends on the data, so all of this is one step.
    """
    (B, M, N), (indices, entries, slopes, q, x) = sizes, from_lists
    wide, dtype = p.accumulator if weights is None else p.slots[weights].dtype, p.slots[slopes].dtype
    gives = [("d_points", (B, N, 3), dtype)] if "points" in wants else []
    gives += [("d_features", (B, N, F), wide)] if "features" in wants else []

    def sum_up(indices: Tensor, entries: Any, slopes: Tensor, q: Tensor, x: Tensor, weights: Any, grad: Any) -> list[Tensor]:
        starts = array(entries) if isinstance(entries, Tensor) else entries
        of = inverted(array(indices.view(-1)), starts, B, M, N)
        rows = slopes.new_empty(0, 0) if grad is None else grad.view(B * M, F)
        slopes, weights = slopes.view(-1), None if weights is None else weights.view(-1)
        g_points, g_features = sums(of, slopes, q.view(-1, 3), x.view(-1, 3), weights, rows, "points" in wants)
        both = dict(points=g_points, features=g_features)
        return [both[name].view(shape) for name, (_, shape, _) in zip(wants, gives)]

    pieces = B * N + total // PIECE
    parts = pieces * sum(shape[-1] * kind.itemsize for _, shape, kind in gives) if total > PIECE else 0
    own = 16 * total + 16 * (B * N + 1) + 24 * pieces + parts
    begins = entries.slot if isinstance(entries, Array) else entries
    takes = [indices, begins, slopes, q, x, weights, grad]
    return p.call(gather.__name__, sum_up, takes, gives, writes=wants, scratch=own)


@jit
def neighbours(
    start,
    stop,
    M,
    N,
    k,
    bound,
    queries,  # [B*M, 3]
    rows,  # [B*M] the order in which queries are visited
    mine,  # [M] the segment of each query; empty if there is only one
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    distances,  # [B*M, k]
    indices,  # [B*M, k]
    truncated,  # [B*M]; empty without a radius
):
    """Find the neighbours of queries ``rows[start:stop]``."""
    best, which = np.empty(min(k, N), distances.dtype), np.empty(min(k, N), np.int64)
    stack, lows = np.empty(128, np.int64), np.empty(128, distances.dtype)
    leaves = np.empty(N // 8 + 1 if truncated.size else 0, np.int64)
    for at in range(start, stop):
        i = rows[at]
        b, found = i // M, 0
        s = mine[i - b * M] if mine.size else 0
        x, y, z = queries[i, 0], queries[i, 1], queries[i, 2]
        if s >= 0:
            segment = segments[s]
            base = b * nodes + segment[2]
            if truncated.size:
                whole = 0
                for n in range(trees.leaves_within(x, y, z, boxes, segment, base, bound, leaves, stack)):
                    first, last = trees.of_leaf(segment, leaves[n])
                    for j in range(b * N + first, b * N + last):
                        d2 = trees.squared(x, y, z, points, j)
                        if d2 <= bound:
                            found = trees.insert(d2, order[j], found, k, best, which)
                            whole += 1
                truncated[i] = whole - found
            else:
                found = trees.nearest(x, y, z, points, order, boxes, segment, base, b * N, k, bound, best, which, stack, lows)
        elif truncated.size:
            truncated[i] = 0
        for e in range(k):
            distances[i, e], indices[i, e] = (np.sqrt(best[e]), which[e]) if e < found else (np.inf, -1)


@jit
def pull(
    start,
    stop,
    M,
    N,
    entries,  # [B*M + 1]
    queries,  # [B*M, 3]
    points,  # [B*N, 3]
    grad,  # [entries]
    distances,  # [entries]
    indices,  # [entries]
    slopes,  # [entries]: grad/d, or 0 if d = 0
    g_queries,  # [B*M, 3]
):
    """Slopes of rows `start` to `stop`, and the gradients of their queries."""
    for i in range(start, stop):
        a, b, c = 0.0, 0.0, 0.0
        for e in range(entries[i], entries[i + 1]):
            slopes[e] = 0
            if indices[e] >= 0 and distances[e] > 0:
                j = i // M * N + indices[e]
                slope = grad[e] / distances[e]
                a += slope * (queries[i, 0] - points[j, 0])
                b += slope * (queries[i, 1] - points[j, 1])
                c += slope * (queries[i, 2] - points[j, 2])
                slopes[e] = slope
        g_queries[i, 0], g_queries[i, 1], g_queries[i, 2] = a, b, c
