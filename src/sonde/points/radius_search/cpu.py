"""``radius_search`` on CPUs: count, then list and sort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, jit, part, run
from ...op.plan import Kernel
from .._search import cpu
from .._search import cpu_tree as trees


def forward(queries: Tensor, points: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    order, ordered, boxes, _, _, _, query_offsets, point_offsets, radius = rest
    (B, M, _), N = queries.shape, points.shape[1]
    tree = cpu.tree_of(points, order, ordered, boxes, point_offsets)
    rows, mine = array(trees.three(queries)), trees.segment_of(query_offsets, M)
    (bound,) = cpu.scalars(queries.dtype, cpu.ball(radius, queries.dtype))
    offsets = queries.new_zeros(B * M + 1, dtype=torch.int64)
    given = M, N, bound, rows, trees.spatial_order(rows, B), mine, *tree[:4], tree.nodes, array(offsets)
    nobody = queries.new_empty(0, dtype=torch.int64), queries.new_empty(0)
    run(within, B * M, *given, *(array(x) for x in nobody), grain=64)
    offsets.cumsum_(0)
    found = int(offsets[-1])
    indices, distances = queries.new_empty(found, dtype=torch.int64), queries.new_empty(found)
    if found:
        run(within, B * M, *given, array(indices), array(distances), grain=64)
    return offsets, indices, distances


def backward(grad: Tensor, *args, needs: Sequence[bool], deterministic: bool):
    queries, points, *_rest, offsets, indices, distances = args
    return cpu.list_gradients(grad, queries, points, distances, indices, array(offsets), needs)


def plan(*args, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    """How long the lists are is not known, nor is what they take."""
    search, *gradients = cpu.search_kernels(args[:-1], 0, needs)
    passes = ("offsets",), ("indices", "distances")
    return [replace(search, name=within.__name__, writes=writes) for writes in passes] + gradients


@jit
def within(
    start,
    stop,
    M,
    N,
    bound,  # r²
    queries,  # [B*M, 3]
    rows,  # [B*M] in which order
    mine,  # [M] the segment of a query; empty where there is one only
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    offsets,  # [B*M + 1]
    indices,  # [entries]; empty where they are counted first
    distances,  # [entries]
):
    """Count the neighbours of queries `start` to `stop` of `rows`, or list them."""
    stack, leaves = np.empty(128, np.int64), np.empty(N // 8 + 1, np.int64)
    for at in range(start, stop):
        i = rows[at]
        b, found = i // M, 0
        s = mine[i - b * M] if mine.size else 0
        if s < 0:
            continue
        x, y, z, segment = queries[i, 0], queries[i, 1], queries[i, 2], segments[s]
        for n in range(trees.leaves_within(x, y, z, boxes, segment, b * nodes + segment[2], bound, leaves, stack)):
            first, last = trees.of_leaf(segment, leaves[n])
            for j in range(b * N + first, b * N + last):
                d2 = trees.squared(x, y, z, points, j)
                if d2 <= bound:
                    if indices.size:
                        distances[offsets[i] + found], indices[offsets[i] + found] = d2, order[j]
                    found += 1
        if indices.size:
            sort(distances[offsets[i] : offsets[i + 1]], indices[offsets[i] : offsets[i + 1]])
            for e in range(offsets[i], offsets[i + 1]):
                distances[e] = np.sqrt(distances[e])
        else:
            offsets[i + 1] = found


@part
def sort(d2, index):
    """A heap's sort, ascending by (d², index)."""
    n = d2.shape[0]
    for first in range(n // 2 - 1, -1, -1):
        sink(d2, index, first, n)
    for last in range(n - 1, 0, -1):
        d2[0], d2[last], index[0], index[last] = d2[last], d2[0], index[last], index[0]
        sink(d2, index, 0, last)


@part
def sink(d2, index, at, n):
    while 2 * at + 1 < n:
        child = 2 * at + 1
        if child + 1 < n and before(d2, index, child, child + 1):
            child += 1
        if not before(d2, index, at, child):
            return
        d2[at], d2[child], index[at], index[child] = d2[child], d2[at], index[child], index[at]
        at = child


@part
def before(d2, index, a, b):
    return d2[a] < d2[b] or (d2[a] == d2[b] and index[a] < index[b])
