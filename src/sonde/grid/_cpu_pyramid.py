"""Weighted sums of samples of feature pyramids, and their derivatives.

out[n, g, c] = Σ_{m,l} weights[n, m, l, g] · tap(level l of place m, locations[n, m])[g, c]: a unit n sums what it sees at its
places m, in one or several levels each, with a weight for each group of channels. ``deformable_aggregation`` is that with anchors
for units and cameras' views of points for places; ``ms_deform_attn`` with heads of queries, one group and one level of each place.

Two kernels: `per_unit` works unit by unit; `per_channel` owns channels of the features' gradient, so that sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..op.cpu import exact_part, jit, part, run
from ..op.dtypes import accumulator
from ..op.lanes import LANES, fma, load, prefetch, spread, store, store_some, total
from ..op.plan import Determinism, Kernel

TILE = 64  # samples of a unit in work at one time


class Problem(NamedTuple):
    """How tensors are seen: features [B·S, heads·G·D], locations [B·Q·heads, M, 2], weights [B·Q·heads, M·L, G]."""

    B: int
    S: int
    Q: int
    heads: int
    G: int
    D: int
    M: int
    L: int
    near: int  # so many places in a row see the same levels
    drop: bool
    logits: bool

    @property
    def units(self) -> int:
        return self.B * self.Q * self.heads

    @property
    def channels(self) -> int:
        return self.heads * self.G * self.D


def forward(p: Problem, levels: Sequence[int], features: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """``[units, G·D]``"""
    wide = accumulator(features, locations, weights)
    out = torch.empty(p.units, p.G * p.D, dtype=wide)
    at, by = _dense(wide, locations, weights)
    _per_unit(p, levels, features, at, by, out=out)
    return out.to(features.dtype)


def backward(
    p: Problem, levels: Sequence[int], grad: Tensor, features: Tensor, locations: Tensor, weights: Tensor, needs: Sequence[bool]
) -> list[Tensor]:
    wide = accumulator(features, locations, weights)
    at, by, grad = _dense(wide, locations, weights, grad)
    found = [_per_channel(p, levels, at, by, grad).view(features.shape).to(features.dtype)] if needs[0] else []
    if needs[1] or needs[2]:
        grads = [torch.zeros(x.shape, dtype=wide) if need else None for x, need in zip((locations, weights), needs[1:])]
        _per_unit(p, levels, features, at, by, grad, None, *grads)
        found += [g.to(x.dtype) for g, x in zip(grads, (locations, weights)) if g is not None]
    return found


def kernels(
    p: Problem, names: Sequence[str], features: Tensor, locations: Tensor, weights: Tensor, needs: Sequence[bool]
) -> list[Kernel]:
    """What the two above launch and allocate; `names` are the operator's own for features, locations and weights."""
    wide = accumulator(features, locations, weights)
    operands = features, locations, weights
    copies = [0 if _is_dense(x, wide) else x.numel() for x in operands]
    rounded = features.dtype != wide

    def kernel(function, writes: Sequence[str], elements: int, phase: Literal["forward", "backward"]) -> Kernel:
        return Kernel(function.__name__, tuple(writes), wide, Determinism.BATCH_INVARIANT, elements * wide.itemsize, phase)

    results = p.units * p.G * p.D if rounded else 0
    found = [kernel(per_unit, ["out"], sum(copies) + results, "forward")]
    if needs[0]:
        found.append(kernel(per_channel, names[:1], sum(copies[1:]) + results + rounded * features.numel(), "backward"))
    asked = [i for i in (1, 2) if needs[i]]
    if asked:
        elements = sum(copies) + results + sum(operands[i].numel() for i in asked if operands[i].dtype != wide)
        found.append(kernel(per_unit, [names[i] for i in asked], elements, "backward"))
    return found


def _per_unit(p, levels, features, at, by, grad=None, out=None, g_locations=None, g_weights=None) -> None:
    table, spare = _table(p, tuple(levels))
    (features,) = _dense(at.dtype, features)
    rows = features.view(p.B * p.S, p.channels)
    if spare >= 0:
        rows = torch.cat([rows, rows.new_zeros(1, p.channels)])
    places, weights, results = (p.units, p.M, 2), (p.units, p.M * p.L, p.G), (p.units, p.G * p.D)
    given = (at, places), (by, weights), (grad, results), (out, results), (g_locations, places), (g_weights, weights)
    views = [_nothing(at.dtype, len(shape)) if x is None else x.view(shape).numpy() for x, shape in given]
    enough = max(1, 2**15 // max(1, p.M * p.L * p.G * p.D))  # units that are worth a thread
    sizes = (p.S, p.Q, p.heads, p.D, p.drop, p.logits, spare)
    run(per_unit, p.units, *sizes, table, rows.numpy(), *views, grain=enough)


def _per_channel(p, levels, at, by, grad) -> Tensor:
    table, spare = _table(p, tuple(levels))
    found = at.new_zeros(p.B * p.S + (spare >= 0), p.channels)
    views = at.view(p.units, p.M, 2), by.view(p.units, p.M * p.L, p.G), grad.view(p.units, p.G * p.D), found
    blocks = p.G * -(-p.D // LANES)  # of a head; cut to occupy all threads, and no bit depends on it
    width = -(-blocks // max(1, min(-(-torch.get_num_threads() // max(1, p.B * p.heads)), blocks)))
    tasks = p.B * p.heads * -(-blocks // max(1, width))
    sizes = (p.S, p.Q, p.heads, p.D, p.drop, p.logits, spare, width)
    run(per_channel, tasks, *sizes, table, *[x.numpy() for x in views], slices_per_thread=tasks)
    return found[: p.B * p.S]


@lru_cache(64)
def _table(p: Problem, levels: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """(h, w, start) of the L levels of each place until they repeat; and the row that corners outside the rows read.

    Levels that nobody has checked may have such corners. Then the features get one row of zeros more; else it is −1.
    """
    table = np.repeat(np.array(levels, np.int64).reshape(-1 if levels else 0, p.L, 3), p.near, 0)
    inside = all(0 <= start <= p.S - h * w for h, w, start in zip(levels[::3], levels[1::3], levels[2::3]))
    return table, -1 if inside else p.B * p.S


@lru_cache(16)
def _nothing(dtype: torch.dtype, rank: int) -> np.ndarray:
    """In place of what is not there."""
    return torch.empty((0,) * rank, dtype=dtype).numpy()


def _is_dense(x: Tensor, wide: torch.dtype) -> bool:
    return x.dtype == wide and x.is_contiguous()


def _dense(wide: torch.dtype, *operands: Tensor) -> list[Tensor]:
    """Kernels see one dtype and one layout only, and so compile once for each dtype."""
    return [x.detach() if _is_dense(x, wide) else torch.empty(x.shape, dtype=wide).copy_(x.detach()) for x in operands]


@jit
def per_unit(
    start,
    stop,
    S,
    Q,
    heads,
    D,
    drop,
    logits,
    spare,  # a row of zeros for corners outside the rows; negative where no level reaches there
    levels,  # [places until they repeat, L, 3]
    features,  # [B*S, heads*G*D]
    locations,  # [N, M, 2]
    weights,  # [N, M*L, G]
    grad,  # [N, G*D]; empty where the results are wanted
    out,  # [N, G*D]; a result that is empty is not wanted
    g_locations,  # [N, M, 2]
    g_weights,  # [N, M*L, G]
):
    """The results of units `start` to `stop`, or the gradients of their locations and weights."""
    M, L, G = locations.shape[1], levels.shape[1], weights.shape[2]
    want_out, want_locations, want_weights = out.size > 0, g_locations.size > 0, g_weights.size > 0
    padded = -(-D // LANES) * LANES
    dtype = features.dtype
    step = max(1, TILE // max(1, L))
    tiles, room = max(1, -(-M // step)), step * L
    at, corner, factor = np.empty(2 * room, np.int64), np.empty((2 * room, 4), np.int64), np.empty((2 * room, 8), dtype)
    share = np.empty((M * L if logits else 0, 1), dtype)
    row = np.zeros((G, padded), dtype)

    coef, here, found = share, 0, 0  # `found` samples of the tile in work are listed from `here` on
    for t in range(start * tiles, stop * tiles + 1):  # while tile t − 1 is in work, the pixels of tile t are sent for
        n, m, there, coming = t // tiles, t % tiles * step, room - here, 0
        ahead = n % heads * G * D
        if n < stop:
            b = n // (Q * heads)
            coming = _locate(n, m, min(m + step, M), b * S, S, drop, spare, levels, locations, at, corner, factor, there)
        n, m = (t - 1) // tiles, (t - 1) % tiles * step
        first = n % heads * G * D
        if n >= start and m == 0:
            coef = _softmax(weights[n], share) if logits else weights[n]
            if not want_out:
                for g in range(G):
                    for k in range(D):
                        row[g, k] = grad[n, g * D + k]
        if want_out:
            _sum(found, coming, here, there, first, ahead, D, features, coef, at, corner, factor, row)
        for i in range(0 if want_out else max(found, coming)):
            if i < coming:
                _send(there + i, corner, features, ahead, ahead + G * D)
            if i < found:
                j = here + i
                s0, s1, s2, s3 = _dots(j, n, first, D, features, coef, at, corner, factor, row, g_weights, want_weights)
                if want_locations:
                    ax, bx, ay, by = factor[j, 0], factor[j, 1], factor[j, 2], factor[j, 3]
                    g_locations[n, at[j] // L, 0] += factor[j, 4] * (ay * s0 + by * s2) + factor[j, 5] * (ay * s1 + by * s3)
                    g_locations[n, at[j] // L, 1] += factor[j, 6] * (ax * s0 + bx * s1) + factor[j, 7] * (ax * s2 + bx * s3)
        if n >= start and want_out:  # by tiles, lest a sum of thousands swallow the last digits of each
            for g in range(G):
                for k in range(D):
                    out[n, g * D + k] = out[n, g * D + k] + row[g, k] if m else row[g, k]
                    row[g, k] = 0
        if n >= start and want_weights and logits and m + step >= M:
            _through_softmax(coef, g_weights[n])
        here, found = there, coming


@jit
def per_channel(
    start,
    stop,
    S,
    Q,
    heads,
    D,
    drop,
    logits,
    spare,  # as above
    width,
    levels,  # [places until they repeat, L, 3]
    locations,  # [N, M, 2]
    weights,  # [N, M*L, G]
    grad,  # [N, G*D]
    g_features,  # [B*S, heads*G*D]
):
    """Pieces `start` to `stop`, of `width` blocks of lanes each, of the features' gradient.

    Over units, samples and corners in this order always.
    """
    M, L, G = locations.shape[1], levels.shape[1], weights.shape[2]
    per_group = -(-D // LANES)
    pieces = -(-G * per_group // width)
    dtype = g_features.dtype
    step = max(1, TILE // max(1, L))
    tiles, room = max(1, -(-M // step)), step * L
    at, corner, factor = np.empty(2 * room, np.int64), np.empty((2 * room, 4), np.int64), np.empty((2 * room, 8), dtype)
    share = np.empty((M * L if logits else 0, 1), dtype)

    for task in range(start, stop):
        b, head, low = task // (heads * pieces), task // pieces % heads, task % pieces * width
        high, first = min(low + width, G * per_group), head * G * D
        groups = low // per_group, -(-high // per_group)
        begin, end = first + low * LANES, first + min(high * LANES, G * D)
        coef, here, found = share, 0, 0
        for t in range(Q * tiles + 1):  # as above
            n, m, there, coming = (b * Q + t // tiles) * heads + head, t % tiles * step, room - here, 0
            if t < Q * tiles:
                coming = _locate(n, m, min(m + step, M), b * S, S, drop, spare, levels, locations, at, corner, factor, there)
            n = (b * Q + (t - 1) // tiles) * heads + head
            if t > 0 and (t - 1) % tiles == 0:
                coef = _softmax(weights[n], share) if logits else weights[n]
            for i in range(max(found, coming)):
                if i < coming:
                    _send(there + i, corner, g_features, begin, end)
                if i < found:
                    _scatter(here + i, n, low, high, groups, per_group, first, D, coef, at, corner, factor, grad, g_features)
            here, found = there, coming


@part
def _locate(n, first, last, base, S, drop, spare, levels, locations, at, corner, factor, here):
    """List the samples that see something, from `here` on: which, their corners, what those weigh along x and y, with slopes.

    Where one corner along an axis is outside, the other takes both places, by halves. Returns how many there are.
    """
    real = locations.dtype.type
    half, one = real(0.5), real(1)
    slots, L = levels.shape[:2]
    found, slot = here, first % slots if slots else 0
    for m in range(first, last):
        now, slot = slot, slot + 1 if slot + 1 < slots else 0
        u, v = locations[n, m, 0], locations[n, m, 1]
        if drop and not (u > 0 and u < 1 and v > 0 and v < 1):
            continue
        for j in range(L):
            h, w, start = levels[now, j, 0], levels[now, j, 1], levels[now, j, 2]
            H, W = real(h), real(w)
            x, y = _position(u, W, half), _position(v, H, half)
            if h > 0 and w > 0 and x >= -one and x < W and y >= -one and y < H:
                x0, y0 = np.floor(x), np.floor(y)
                fx, fy = x - x0, y - y0
                column, line = int(x0), int(y0)
                right, ax, bx, sax, sbx = 1, one - fx, fx, -W, W
                down, ay, by, say, sby = w, one - fy, fy, -H, H
                if column < 0:
                    column, right, ax, bx, sax, sbx = 0, 0, half * fx, half * fx, half * W, half * W
                elif column + 1 == w:
                    right, ax, bx, sax, sbx = 0, half * ax, half * ax, -half * W, -half * W
                if line < 0:
                    line, down, ay, by, say, sby = 0, 0, half * fy, half * fy, half * H, half * H
                elif line + 1 == h:
                    down, ay, by, say, sby = 0, half * ay, half * ay, -half * H, -half * H
                p = start + line * w + column
                at[found] = m * L + j
                corner[found, 0], corner[found, 1] = base + p, base + p + right
                corner[found, 2], corner[found, 3] = base + p + down, base + p + down + right
                factor[found, 0], factor[found, 1], factor[found, 2], factor[found, 3] = ax, bx, ay, by
                factor[found, 4], factor[found, 5], factor[found, 6], factor[found, 7] = sax, sbx, say, sby
                if spare >= 0:
                    for c in range(4):
                        if not base <= corner[found, c] < base + S:
                            corner[found, c] = spare
                found += 1
    return found - here


@part
def _send(i, corner, features, begin, end):
    """For the pixels of sample i: they are far apart in memory, and all work would wait for them."""
    for c in range(4):
        for k in range(begin, end, LANES):
            prefetch(features, corner[i, c], k)


@exact_part
def _position(u, size, half):
    return u * size - half  # each operation rounded: the same bits as the reference


@part
def _corners(i, corner, factor):
    """The four pixels of sample i, and their weights."""
    ax, bx, ay, by = factor[i, 0], factor[i, 1], factor[i, 2], factor[i, 3]
    return corner[i, 0], corner[i, 1], corner[i, 2], corner[i, 3], ay * ax, ay * bx, by * ax, by * bx


@part
def _sum(found, coming, here, there, first, ahead, D, features, coef, at, corner, factor, row):
    """row[g] += Σ_i coef[i, g]·tap_i[g] of the samples listed from `here` on, while those from `there` on are sent for."""
    zero, n = spread(row.dtype.type(0)), row.shape[1]
    for i in range(max(found, coming)):
        if i < coming:
            _send(there + i, corner, features, ahead, ahead + row.shape[0] * D)
        if i < found:
            c0, c1, c2, c3, w0, w1, w2, w3 = _corners(here + i, corner, factor)
            for g in range(row.shape[0]):
                f, c, end = coef[at[here + i], g], first + g * D, first + (g + 1) * D
                for k in range(0, D, LANES):
                    v = fma(w1, load(features, c1, c + k, end), fma(w0, load(features, c0, c + k, end), zero))
                    v = fma(w3, load(features, c3, c + k, end), fma(w2, load(features, c2, c + k, end), v))
                    store(fma(f, v, load(row, g, k, n)), row, g, k)


@part
def _dots(i, n, first, D, features, coef, at, corner, factor, row, g_weights, want_weights):
    """Σ_g coef[i, g]·(pixel[g]·row[g]) for the four corners; on the way tap_i[g]·row[g], which is the gradient of coef[i, g]."""
    c0, c1, c2, c3, w0, w1, w2, w3 = _corners(i, corner, factor)
    nothing = row.dtype.type(0)
    zero = spread(nothing)
    s0, s1, s2, s3 = nothing, nothing, nothing, nothing
    for g in range(row.shape[0]):
        f, c, end = coef[at[i], g], first + g * D, first + (g + 1) * D
        v0, v1, v2, v3 = zero, zero, zero, zero
        for k in range(0, D, LANES):
            v = load(row, g, k, D)
            v0, v1 = fma(v, load(features, c0, c + k, end), v0), fma(v, load(features, c1, c + k, end), v1)
            v2, v3 = fma(v, load(features, c2, c + k, end), v2), fma(v, load(features, c3, c + k, end), v3)
        t0, t1, t2, t3 = total(v0), total(v1), total(v2), total(v3)
        if want_weights:
            g_weights[n, at[i], g] = w0 * t0 + w1 * t1 + w2 * t2 + w3 * t3
        s0, s1, s2, s3 = s0 + f * t0, s1 + f * t1, s2 + f * t2, s3 + f * t3
    return s0, s1, s2, s3


@part
def _scatter(i, n, low, high, groups, per_group, first, D, coef, at, corner, factor, grad, g_features):
    """g_features[p] += weight·coef[i, g]·grad[g] for the four corners p, in blocks `low` to `high`, those of `groups`."""
    c0, c1, c2, c3, w0, w1, w2, w3 = _corners(i, corner, factor)
    zero = spread(grad.dtype.type(0))
    for g in range(groups[0], groups[1]):
        begin, end = max(low - g * per_group, 0) * LANES, min((high - g * per_group) * LANES, D)
        f, c, d = coef[at[i], g], first + g * D, g * D
        for k in range(begin, end, LANES):
            v = fma(f, load(grad, n, d + k, d + D), zero)
            # two corners may be the same pixel, so one after the other
            store_some(fma(w0, v, load(g_features, c0, c + k, c + D)), g_features, c0, c + k, c + D)
            store_some(fma(w1, v, load(g_features, c1, c + k, c + D)), g_features, c1, c + k, c + D)
            store_some(fma(w2, v, load(g_features, c2, c + k, c + D)), g_features, c2, c + k, c + D)
            store_some(fma(w3, v, load(g_features, c3, c + k, c + D)), g_features, c3, c + k, c + D)


@part
def _softmax(logits, share):
    """share = the softmax of the logits of a unit."""
    most, whole = logits.dtype.type(-np.inf), logits.dtype.type(0)
    for i in range(logits.shape[0]):
        most = max(most, logits[i, 0])
    for i in range(logits.shape[0]):
        share[i, 0] = np.exp(logits[i, 0] - most)
        whole += share[i, 0]
    for i in range(logits.shape[0]):
        share[i, 0] /= whole
    return share


@part
def _through_softmax(share, g):
    """From the gradient of the shares to that of the logits."""
    mean = g.dtype.type(0)
    for i in range(share.shape[0]):
        mean += share[i, 0] * g[i, 0]
    for i in range(share.shape[0]):
        g[i, 0] = share[i, 0] * (g[i, 0] - mean)
