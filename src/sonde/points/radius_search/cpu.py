"""``radius_search`` on CPUs: one pass counts neighbours, then lists are allocated, and a second pass fills and sorts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.allocator import dense
from ...op.cache import CallCache
from ...op.calls import plain
from ...op.cpu import NUMPY, jit, part
from ...op.cpu_steps import Array, ByThreads, CpuPass, by_threads
from ...op.plan import Kernel
from .._search import cpu
from .._search import cpu_tree as trees
from .._search.arguments import named

_passes: CallCache[Callable] = CallCache()


def _prepared(record: Callable[..., ByThreads], key: tuple | None, *args: Any, **how: Any) -> Callable[..., Any]:
    """The bound pass that `record` makes of these arguments, cached by `key`; the key leaves out sizes that depend on the data."""
    if key is None:
        return record(*args, **how).bind()
    key = record.__name__, *how.values(), key
    return _passes.get(key) or _passes.put(key, record(*args, **how).bind())


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    (*operands, _), queries, key = args, args[0], plain(args)
    offsets, *rows = _prepared(_count, key, *args)(*operands)
    total = int(offsets[-1])
    lists = queries.new_empty(total, dtype=torch.int64), queries.new_empty(total)
    if total:
        given = offsets, *lists, rows[0] if rows else None
        _prepared(_fill, key, *args, *given)(*operands, None, *given)
    return offsets, *lists


@by_threads
def _count(*args: Any) -> Pass:
    """The pass that computes the offsets of the lists and, if it sorts the queries, their order."""
    *operands, radius = args
    (B, M, _), dtype = operands[0].shape, operands[0].dtype
    p = CpuPass(dtype, named(*operands[:2], None, *operands[2:]))
    offsets = p.buffer("offsets", (B * M + 1,), torch.int64, fill=0)
    no_lists = np.empty(0, np.int64), np.empty(0, NUMPY[dtype])
    rows = _add_within(p, radius, [Array(offsets, (B * M + 1,)), *no_lists], ["offsets"])
    p.call("torch.cumsum", lambda counts: counts.cumsum_(0), [offsets])
    return p.returns(offsets, *([rows.slot] if isinstance(rows, Array) else []))


@by_threads
def _fill(*args: Any) -> Pass:
    """The pass that writes indices and distances."""
    *operands, radius, offsets, indices, distances, rows = args
    lists = dict(radius=None, offsets=offsets, indices=indices, distances=distances, rows=rows)
    p = CpuPass(operands[0].dtype, named(*operands[:2], None, *operands[2:], **lists))
    results = [Array("offsets", tuple(offsets.shape)), Array("indices", None), Array("distances", None)]
    _add_within(p, radius, results, ["indices", "distances"])
    return p


def _add_within(p: CpuPass, radius: float, results: Sequence[Any], writes: Sequence[str]) -> Any:
    """Launch ``within``; returns the order in which it visits the queries."""
    queries, points = p.given["queries"], p.given["points"]
    assert queries is not None
    assert points is not None
    (B, M, _), N, bound = queries.shape, points.shape[1], cpu.scalar(queries.dtype, cpu.ball(radius, queries.dtype))
    tree, rows = cpu.add_tree(p), cpu.add_rows(p)
    p.run(within, B * M, [M, N, bound, *rows, *tree, *results], grain=64, writes=writes, scratch=trees.leaves_bytes(N))
    return rows[1]


def backward(grad: Tensor, *args: Any, needs: Sequence[bool], deterministic: bool) -> tuple[Tensor, ...]:
    queries, points, *_rest, offsets, indices, distances = args
    grad = dense(grad, queries.dtype)
    given = queries, points, offsets.contiguous(), grad, distances.contiguous(), indices.contiguous(), torch.empty_like(grad)
    return _prepared(_gradients, plain(given[:3]), *given, needs=tuple(needs))(*given)


@by_threads
def _gradients(*args: Tensor, needs: Sequence[bool]) -> Pass:
    given = dict(zip(("queries", "points", "offsets", "grad", "distances", "indices", "slopes"), args))
    p, lists = CpuPass(args[0].dtype, given), [Array(name, None) for name in ("grad", "distances", "indices", "slopes")]
    return cpu.list_gradients(p, Array("offsets", tuple(args[2].shape)), lists, 0, needs)


def plan(*args: Any, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    """The lengths of the lists are unknown, so this is the plan of empty lists."""
    queries, points = args[:2]
    B, M, _ = queries.shape
    offsets, indices = (torch.empty(n, dtype=torch.int64, device="meta") for n in (B * M + 1, 0))
    distances, rows = torch.empty(0, dtype=queries.dtype, device="meta"), torch.empty(B * M, dtype=torch.int64, device="meta")
    lists = offsets, indices, distances, rows if M >= trees.ORDERED else None
    found = _count(*args).plan("forward") + _fill(*args, *lists).plan("forward")
    if any(needs):
        found += _gradients(queries, points, offsets, distances, distances, indices, distances, needs=needs).plan("backward")
    return found


@jit
def within(
    start,
    stop,
    M,
    N,
    bound,  # r²
    queries,  # [B*M, 3]
    rows,  # [B*M] the order in which queries are visited
    mine,  # [M] the segment of each query; empty if there is only one
    points,  # [B*N, 3]
    order,  # [B*N]
    boxes,  # [B*nodes, 6]
    segments,  # [S, 4]
    nodes,
    offsets,  # [B*M + 1]
    indices,  # [entries]; empty in the counting pass
    distances,  # [entries]
):
    """Count or list the neighbours of queries ``rows[start:stop]``."""
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
    """Heapsort, ascending by (d², index)."""
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
