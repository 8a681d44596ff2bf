"""The index on CPUs: a balanced tree of boxes, each split along its longest axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....jit.steps import Pass
from ....op.cpu import jit, part
from ....op.cpu_steps import Array, CpuPass, by_threads
from ....op.layout import outline
from .. import cpu_tree as trees
from .reference import nodes

MANY = 4096  # with more points than this, threads share the work on a tree
SUBTREES = 16  # that the threads then share, after the nodes above them were split level by level


class Built(NamedTuple):
    """Slots of an index, and the number of its boxes."""

    order: str  # [B, N]
    ordered: str  # [B, N, D]
    boxes: str  # [B, nodes, 2, D]
    nodes: int


@by_threads
def forward_pass(points: Tensor, point_offsets: Tensor | None) -> Pass:
    p = CpuPass(points.dtype, dict(points=points, point_offsets=point_offsets))
    return p.returns(*add_index(p, "points", "point_offsets", writes=["index"])[:3])


def add_index(p: CpuPass, points: str, offsets: str, writes: list[str]) -> Built:
    """Steps that build the index of the argument `points`, ragged if the argument `offsets` is given."""
    x, ends = p.given[points], p.given[offsets]
    assert x is not None
    B, N, D = x.shape
    S = 1 if ends is None else ends.shape[0] - 1
    count, segments = nodes(N, S), add_segments(p, offsets, N)
    new = p._allocator(outline(x.shape), x.dtype)
    order = p.derive("order", None, lambda: torch.arange(N, dtype=torch.int32, device="cpu").repeat(B, 1), (B, N), torch.int32)
    ordered = p.derive("sorted", points, lambda x: new().copy_(x.detach()), x.shape, x.dtype)
    boxes = p.buffer("boxes", (B, count, 2, D), x.dtype, fill=torch.inf)
    rows = Array(ordered, (B * N, D))
    args = segments, N, count, Array(order, (B * N,)), rows, Array(boxes, (B * count, 2, D))
    levels = SUBTREES.bit_length() - 1 if N > MANY else 0
    p.run(finite, B * N, [rows], grain=2**14, accumulator=x.dtype)
    for level in range(levels):
        p.run(split, B * S << level, [level, level + 1, *args], accumulator=x.dtype)
    enough = max(1, 2**11 // max(1, N >> levels))
    p.run(split, B * S << levels, [levels, 64, *args], grain=enough, writes=writes, accumulator=x.dtype)
    return Built(order, ordered, boxes, count)


def add_segments(p: CpuPass, offsets: str, N: int) -> Any:
    """Segments ``[S, 4]`` for kernels; each call reads them from the offsets of a ragged batch."""
    if p.given[offsets] is None:
        return trees.segments(None, N)
    return p.view("segments", offsets, lambda ends: trees.segments(ends, N))  # type: ignore[arg-type, return-value]


@jit
def finite(start, stop, points):  # [B*N, D]
    """Move non-finite points to infinity, where no search finds them."""
    for j in range(start, stop):
        good = True
        for d in range(points.shape[1]):
            good = good and abs(points[j, d]) < np.inf
        if not good:
            points[j] = np.inf


@jit
def split(
    start,
    stop,
    level,  # nodes of this level are split, and their children
    end,  # up to this level
    segments,  # [S, 4]
    N,
    nodes,
    order,  # [B*N]
    points,  # [B*N, D]
    boxes,  # [B*nodes, 2, D]
):
    """Compute the boxes of nodes `start` to `stop` of all trees, and partition their points into the two children."""
    stack = np.empty(128, np.int64)
    S = segments.shape[0]
    for task in range(start, stop):
        b, s, j = task >> level, 0, task & ((1 << level) - 1)
        b, s = b // S, b % S
        depth, base = segments[s, 3], b * nodes + segments[s, 2]
        if level > depth:
            continue
        first, n = b * N + segments[s, 0], segments[s, 1] - segments[s, 0]
        stack[0], top = (1 << level) - 1 + j, 1
        while top:
            top -= 1
            node = stack[top]
            at = level
            while (node + 1) >> (at + 1):
                at += 1
            j = node + 1 - (1 << at)
            low, high = first + (n * j >> at), first + (n * (j + 1) >> at)
            widest = enclose(points, low, high, boxes, base + node)
            if at < depth:
                select(points, order, low, high, first + (n * (2 * j + 1) >> (at + 1)), widest)
                if at + 1 < end:
                    stack[top], stack[top + 1] = 2 * node + 1, 2 * node + 2
                    top += 2


@part
def enclose(points, low, high, boxes, node):
    """Store the box of a node's finite points; returns its longest axis."""
    widest, width = 0, points.dtype.type(-1)
    for d in range(points.shape[1]):
        a, b = points.dtype.type(np.inf), points.dtype.type(-np.inf)
        for j in range(low, high):
            x = points[j, d]
            if x < np.inf:
                a, b = min(a, x), max(b, x)
        boxes[node, 0, d], boxes[node, 1, d] = a, b
        if b - a > width:
            widest, width = d, b - a
    return widest


@part
def select(points, order, low, high, middle, d):
    """Quickselect along axis d: partition points `low` to `high` so that the smallest come before `middle`."""
    high -= 1
    while low < high:
        a, b, c = points[low, d], points[(low + high) // 2, d], points[high, d]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while points[i, d] < pivot:
                i += 1
            while pivot < points[j, d]:
                j -= 1
            if i <= j:
                for e in range(points.shape[1]):
                    points[i, e], points[j, e] = points[j, e], points[i, e]
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if middle <= j:
            high = j
        elif middle >= i:
            low = i
        else:
            return
