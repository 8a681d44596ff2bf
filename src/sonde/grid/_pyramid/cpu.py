"""Weighted sums of samples of feature pyramids, and their derivatives.

out[n, g, c] = Σ_{m,l} weights[n, m, l, g] · tap(level l of place m, locations[n, m])[g, c]: a unit n sums what it sees at its
places m, in one or several levels each, with a weight for each group of channels. ``deformable_aggregation`` is that with anchors
for units and cameras' views of points for places; ``ms_deform_attn`` with heads of queries, one group and one level of each place.

The kernels are in ``cpu_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import NUMPY, array, run
from ...op.dtypes import accumulator
from ...op.lanes import LANES
from ...op.memory import dense, empty, is_dense, zeros
from ...op.plan import Determinism, Kernel
from .._scatter.cpu_sums import BLOCK, LENGTH
from .cpu_kernels import per_channel, per_unit

LEVELS = 8  # of sixteen places, that kernels add up in one go


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
    def numbers(self) -> tuple[int, ...]:
        return self.S, self.Q, self.heads, self.D, self.drop, self.logits

    @property
    def channels(self) -> int:
        return self.heads * self.G * self.D


def forward(p: Problem, levels: Sequence[int], features: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """``[units, G·D]``"""
    wide = accumulator(features, locations, weights)
    at, by = dense(locations, wide), dense(weights, wide)
    sums = []
    for low, high in _cuts(p.L, LEVELS):
        some, few, chosen = _of_levels(p, levels, by, low, high)
        sums.append(empty((p.units, p.G * p.D), wide))
        _per_unit(some, few, features, at, chosen, out=sums[-1])
    return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.float64)).to(features.dtype)


def backward(
    p: Problem, levels: Sequence[int], grad: Tensor, features: Tensor, locations: Tensor, weights: Tensor, needs: Sequence[bool]
) -> list[Tensor]:
    wide = accumulator(features, locations, weights)
    at, by, grad = (dense(x, wide) for x in (locations, weights, grad))
    parts = _parts(p)
    if len(parts) == 1:
        found = _backward(p, levels, grad, features, at, by, needs)
    else:
        found = _backward_by_parts(p, parts, levels, grad, features, at, by, needs)
    return [g.view(x.shape).to(x.dtype) for g, x in zip(found, (features, locations, weights)) if g is not None]


def _backward(
    p: Problem, levels: Sequence[int], grad: Tensor, features: Tensor, at: Tensor, by: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    rest = [zeros(x.shape, at.dtype) if need else None for x, need in zip((at, by), needs[1:])]
    cut = _pieces(p, torch.get_num_threads())  # once: someone may change the number of threads meanwhile
    at_once, of_features = _at_once(cut, needs), None
    if needs[0]:
        others = (features, *rest) if at_once else (None, None, None)
        of_features = _per_channel(p, cut, levels, at, by, grad, *others)
    if any(needs[1:]) and not at_once:
        _per_unit(p, levels, features, at, by, grad, None, *rest)
    return [of_features, *rest]


Part = tuple[int, int, int, int, int, int]  # levels, groups and channels of a group, from and to


def _parts(p: Problem) -> list[Part]:
    """Kernels add up levels, groups and channels of a group in one go; where those are many, some at a time, and the parts here."""
    return [(*l, *g, *d) for l, g, d in product(_cuts(p.L, LEVELS), _cuts(p.G, BLOCK), _cuts(p.D, LENGTH))]  # noqa: E741


def _cuts(n: int, most: int) -> list[tuple[int, int]]:
    return [(i, min(i + most, n)) for i in range(0, max(1, n), most)]


def _of_levels(p: Problem, levels: Sequence[int], by: Tensor, low: int, high: int) -> tuple[Problem, Sequence[int], Tensor]:
    """The problem with some of the levels, what they are, and their weights."""
    if high - low == p.L:
        return p, levels, by
    some = np.array(levels, np.int64).reshape(-1, p.L, 3)[:, low:high].flatten().tolist()
    return p._replace(L=high - low), some, by.view(-1, p.L, p.G)[:, low:high].contiguous()


def _backward_by_parts(
    p: Problem, parts: Sequence[Part], levels: Sequence[int], grad: Tensor, features: Tensor, at: Tensor, by: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Sums of parts in float64; the softmax's derivative is linear, so that it, too, is a sum of parts."""
    shapes = (p.B * p.S, p.heads, p.G, p.D), at.shape, (p.units * p.M, p.L, p.G)
    sums = [at.new_zeros(shape, dtype=torch.float64) if need else None for shape, need in zip(shapes, needs)]
    rows, of_result = features.reshape(-1, p.heads, p.G, p.D), grad.view(p.units, p.G, p.D)
    for l0, l1, g0, g1, d0, d1 in parts:
        some, few, chosen = _of_levels(p, levels, by, l0, l1)
        chosen = chosen.view(-1, l1 - l0, p.G)[..., g0:g1].contiguous()
        some = some._replace(G=g1 - g0, D=d1 - d0)
        given = of_result[:, g0:g1, d0:d1].contiguous(), rows[:, :, g0:g1, d0:d1].contiguous(), at, chosen
        where = (slice(None), slice(None), slice(g0, g1), slice(d0, d1)), (...,), (slice(None), slice(l0, l1), slice(g0, g1))
        for total, place, found in zip(sums, where, _backward(some, few, *given, needs)):
            if total is not None and found is not None:
                total[place] += found.view(total[place].shape)
    return sums


def kernels(
    p: Problem, names: Sequence[str], features: Tensor, locations: Tensor, weights: Tensor, needs: Sequence[bool]
) -> list[Kernel]:
    """What the two above launch and allocate; `names` are the operator's own for features, locations and weights."""
    wide = accumulator(features, locations, weights)
    operands = features, locations, weights
    copies = [0 if is_dense(x, wide) else x.numel() for x in operands]
    rounded = features.dtype != wide

    def kernel(function, writes: Sequence[str], elements: int, phase: Literal["forward", "backward"]) -> Kernel:
        return Kernel(function.__name__, tuple(writes), wide, Determinism.BATCH_INVARIANT, elements * wide.itemsize, phase)

    results = p.units * p.G * p.D if rounded else 0
    found = [kernel(per_unit, ["out"], sum(copies) + results, "forward")]
    written = [i for i in range(3) if needs[i]]
    first = written if _at_once(_pieces(p, torch.get_num_threads()), needs) else written[: needs[0]]
    for function, those in (per_channel, first), (per_unit, written[len(first) :]):
        if those:
            copied = copies[1:] if those == [0] else copies  # the features' gradient alone does not read them
            elements = sum(copied) + results + sum(operands[i].numel() for i in those if operands[i].dtype != wide)
            found.append(kernel(function, [names[i] for i in those], elements, "backward"))
    return found


def _per_unit(p, levels, features, at, by, grad=None, out=None, g_locations=None, g_weights=None) -> None:
    table, sizes, spare = _table(p, tuple(levels), at.dtype)
    rows = _rows(p, features, at.dtype, spare)
    views = _views(p, at.dtype, rows=rows, places=at, weights=by, results=grad)
    results = _views(p, at.dtype, results=out, places=g_locations, weights=g_weights)
    enough = max(1, 2**15 // max(1, p.M * p.L * p.G * p.D))  # units that are worth a thread
    run(per_unit, p.units, *p.numbers, spare, table, sizes, *views, *results, grain=enough)


def _per_channel(p, cut, levels, at, by, grad, features=None, g_locations=None, g_weights=None) -> Tensor:
    table, sizes, spare = _table(p, tuple(levels), at.dtype)
    found = zeros((p.B * p.S + (spare >= 0), p.channels), at.dtype)
    rows = None if features is None else _rows(p, features, at.dtype, spare)
    views = _views(p, at.dtype, places=at, weights=by, results=grad)
    results = _views(p, at.dtype, rows=rows, places=g_locations, weights=g_weights)
    many, pieces, width = cut
    tasks = p.B * -(-p.heads // many) * pieces
    enough = max(1, 2**15 // max(1, p.Q * p.M * p.L * many * width * LANES))  # tasks that are worth a thread
    given = (*p.numbers, spare, many, width, table, sizes, *views, *results, array(found.view(1, -1)))
    run(per_channel, tasks, *given, grain=enough, slices_per_thread=tasks)
    return found[: p.B * p.S]


def _views(p: Problem, dtype: torch.dtype, **given: Tensor | None) -> list[np.ndarray]:
    """Tensors as kernels see them, by what they are; empty in place of what is not there."""
    shapes = dict(rows=(1, -1), places=(p.units, p.M * 2), weights=(p.units * p.M * p.L, p.G), results=(p.units, p.G * p.D))
    return [_nothing(dtype) if x is None else array(x).reshape(shapes[kind]) for kind, x in given.items()]


def _rows(p: Problem, features: Tensor, wide: torch.dtype, spare: int) -> Tensor:
    rows = dense(features, wide).view(p.B * p.S, p.channels)
    return rows if spare < 0 else torch.cat([rows, rows.new_zeros(1, p.channels)])


@lru_cache(64)
def _pieces(p: Problem, threads: int) -> tuple[int, int, int]:
    """How many heads of the features' gradient are one task's, into how many pieces they are cut, and blocks of lanes in a piece.

    Several heads, as many as leave no thread without work, since those of a query look at the same pages; or a part of one, where
    there are few. No bit depends on it.
    """
    blocks = p.G * -(-p.D // LANES)
    width = -(-blocks // max(1, min(-(-threads // max(1, p.B * p.heads)), blocks)))

    def takes(many: int) -> int:  # heads that the last thread has done
        return -(-p.B * -(-p.heads // many) // threads) * many

    return min(range(p.heads, 0, -1), key=takes, default=1), -(-blocks // max(1, width)), width


def _at_once(cut: tuple[int, int, int], needs: Sequence[bool]) -> bool:
    """Whether the features' gradient comes with the others: where heads are not cut."""
    return needs[0] and any(needs[1:]) and cut[1] == 1


@lru_cache(64)
def _table(p: Problem, levels: tuple[int, ...], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, int]:
    """Of the L levels of each place until they repeat, (width, start) and (width, height) as real numbers, a row for each; and the
    row of features that corners outside of them read.

    Places follow each other along the rows, which begin anew at the end so that all lanes can be loaded from everywhere.
    Levels that nobody has checked may have corners outside. Then the features get one row of zeros more; else it is −1.
    """
    table = np.repeat(np.array(levels, np.int64).reshape(-1 if levels else 0, p.L, 3), p.near, 0)
    along = np.pad(table, ((0, LANES - 1 if len(table) else 0), (0, 0), (0, 0)), "wrap").transpose(1, 2, 0)  # [L, 3, places]
    whole, real = (np.ascontiguousarray(along[:, of]).reshape(2 * p.L, along.shape[2]) for of in ((1, 2), (1, 0)))
    inside = all(0 <= start <= p.S - h * w for h, w, start in zip(levels[::3], levels[1::3], levels[2::3]))
    return whole, real.astype(NUMPY[dtype]), -1 if inside else p.B * p.S


@lru_cache(16)
def _nothing(dtype: torch.dtype) -> np.ndarray:
    return np.empty((0, 0), NUMPY[dtype])
