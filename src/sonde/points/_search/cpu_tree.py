"""Trees of bounding boxes on CPUs, and their traversal.

Every segment of every batch row has its own tree over consecutive sorted points. It is balanced: node j of level l covers points
n·j/2ˡ to n·(j+1)/2ˡ of n, so that only boxes are stored, level by level. The distance to a box uses the same operations in the same
order as the distance to a point; since rounding is monotone, no point of a box is closer than the box, to the last bit.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...op.cpu import array, exact_part, jit, part

LEAF = 16  # most points of a leaf
ORDERED = 4096  # sorting pays off from this many queries on
CELLS = 32  # queries are sorted into CELLS³ cells


def segments(offsets: Tensor | None, N: int) -> np.ndarray:
    """``[S, 4]``: first point, end, first box and depth of each segment; wrong offsets are clamped to N points."""
    ends = np.array([0, N]) if offsets is None else np.clip(np.maximum.accumulate(array(offsets)), 0, N)
    first, last = ends[:-1], ends[1:]
    leaves = np.maximum(1, -(-(last - first) // LEAF))
    depth = np.ceil(np.log2(leaves)).astype(np.int64)
    return np.stack([first, last, first // 4 + np.arange(len(first)), depth], 1)


def segment_of(offsets: Tensor | None, M: int) -> np.ndarray:
    """The segment of each of M rows, −1 for none; empty if there is only one."""
    if offsets is None:
        return np.empty(0, np.int64)
    ends = np.clip(np.maximum.accumulate(array(offsets)), 0, M)
    found = np.searchsorted(ends, np.arange(M), side="right") - 1
    return np.where(found < len(ends) - 1, found, -1)


def leaves_bytes(N: int) -> int:
    """Bytes of the list that ``leaves_within`` fills."""
    return (N // 8 + 1) * 8


def sorting_bytes(M: int) -> int:
    """Bytes that ``by_cells`` needs: the cell of each query, and the count of each cell."""
    return 4 * M + 8 * (CELLS**3 + 1)


@jit
def by_cells(
    start,
    stop,
    queries,  # [B*M, 3]
    M,
    found,  # [B*M]
):
    """Sort the queries of batch rows `start` to `stop` by cell, in Morton order."""
    low, high, code = np.empty(3), np.empty(3), np.empty(M, np.int32)
    for b in range(start, stop):
        low[:], high[:] = np.inf, -np.inf
        for i in range(b * M, b * M + M):
            for d in range(3):
                x = queries[i, d]
                if abs(x) < np.inf:
                    low[d], high[d] = min(low[d], x), max(high[d], x)
        count = np.zeros(CELLS**3 + 1, np.int64)
        for i in range(M):
            c = 0
            for d in range(3):
                x, width = queries[b * M + i, d], high[d] - low[d]
                cell = int((x - low[d]) / width * CELLS) if width > 0 and abs(x) < np.inf else 0
                cell = min(max(cell, 0), CELLS - 1)
                for bit in range(5):
                    c |= ((cell >> bit) & 1) << (3 * bit + d)
            code[i] = c
            count[c + 1] += 1
        for c in range(CELLS**3):
            count[c + 1] += count[c]
        for i in range(M):
            found[b * M + count[code[i]]] = b * M + i
            count[code[i]] += 1


@exact_part
def squared(x, y, z, points, j):
    """d² to point j, with every operation rounded."""
    dx, dy, dz = x - points[j, 0], y - points[j, 1], z - points[j, 2]
    return (dx * dx + dy * dy) + dz * dz


@exact_part
def squared_to_box(x, y, z, boxes, node):
    zero = x - x
    dx = max(max(boxes[node, 0] - x, x - boxes[node, 3]), zero)
    dy = max(max(boxes[node, 1] - y, y - boxes[node, 4]), zero)
    dz = max(max(boxes[node, 2] - z, z - boxes[node, 5]), zero)
    return (dx * dx + dy * dy) + dz * dz


@part
def leaves_within(x, y, z, boxes, segment, base, bound, leaves, stack):
    """List the leaves of a segment whose box is within `bound`, in tree order; returns how many."""
    depth, found = segment[3], 0
    if not (abs(x) < np.inf and abs(y) < np.inf and abs(z) < np.inf):
        return found
    stack[0], top = 0, 1
    while top:
        top -= 1
        node = stack[top]
        if squared_to_box(x, y, z, boxes, base + node) <= bound:
            if node + 1 >> depth:  # the last level
                leaves[found] = node + 1 - (1 << depth)
                found += 1
            else:
                stack[top], stack[top + 1] = 2 * node + 2, 2 * node + 1
                top += 2
    return found


@part
def of_leaf(segment, leaf):
    """The range of a leaf's points."""
    first, n, depth = segment[0], segment[1] - segment[0], segment[3]
    return first + (n * leaf >> depth), first + (n * (leaf + 1) >> depth)


@part
def nearest(x, y, z, points, order, boxes, segment, base, row, k, bound, best, which, stack, lows):
    """Find the k nearest within `bound`, ascending by (d², index), into `best` and `which`; returns how many there are.

    Visits the closer child first. A box is skipped only if it is farther than the k-th: at the same distance a lower index wins.
    """
    depth, found = segment[3], 0
    if not (abs(x) < np.inf and abs(y) < np.inf and abs(z) < np.inf):
        return found
    worst = bound
    stack[0], lows[0], top = 0, squared_to_box(x, y, z, boxes, base), 1
    while top:
        top -= 1
        node = stack[top]
        if not lows[top] <= worst:
            continue
        inside = True
        while not (node + 1 >> depth):
            near, far = 2 * node + 1, 2 * node + 2
            a, b = squared_to_box(x, y, z, boxes, base + near), squared_to_box(x, y, z, boxes, base + far)
            if b < a:
                near, far, a, b = far, near, b, a
            if b <= worst:
                stack[top], lows[top] = far, b
                top += 1
            if not a <= worst:
                inside = False
                break
            node = near
        if inside:
            first, last = of_leaf(segment, node + 1 - (1 << depth))
            for j in range(row + first, row + last):
                d2 = squared(x, y, z, points, j)
                if d2 <= worst:
                    found = insert(d2, order[j], found, k, best, which)
                    if found == k:
                        worst = best[k - 1]
    return found


@part
def insert(d2, index, found, k, best, which):
    """Insert into the sorted list of the k smallest by (d², index); returns its length."""
    if found == k:
        if not (d2 < best[k - 1] or (d2 == best[k - 1] and index < which[k - 1])):
            return found
        at = k - 1
    else:
        at = found
        found += 1
    while at > 0 and (best[at - 1] > d2 or (best[at - 1] == d2 and which[at - 1] > index)):
        best[at], which[at] = best[at - 1], which[at - 1]
        at -= 1
    best[at], which[at] = d2, index
    return found
