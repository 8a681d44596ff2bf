"""Passes for weighted sums of pyramid samples on CPUs, and their gradients.

out[n, g, c] = Σ_{m,l} weights[n, m, l, g] · tap(level l of place m, locations[n, m])[g, c]: a unit n sums samples at its places m,
each in one or several levels, with a weight for each group of channels. In ``deformable_aggregation`` units are anchors, and a
place is a point in one camera; in ``ms_deform_attn`` units are heads of queries, with one group, and one level per place.

The kernels are in ``cpu_kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import NUMPY
from ...op.cpu_steps import Array, ByThreads, CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.simd import LANES
from .._scatter.cpu_sums import BLOCK, LENGTH, spill_bytes
from .cpu_kernels import per_channel, per_unit
from .levels import ReadLevels

LEVELS = 8  # most levels that kernels process at once


class Problem(NamedTuple):
    """Sizes of features [B·S, heads·G·D], locations [B·Q·heads, M, 2] and weights [B·Q·heads, M·L, G]."""

    B: int
    S: int
    Q: int
    heads: int
    G: int
    D: int
    M: int
    L: int
    near: int  # number of consecutive places with the same levels
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


class Member(NamedTuple):
    """What one pyramid operator supplies."""

    names: tuple[str, str, str]  # of features, locations and weights, in a plan
    problem: Callable[[Tensor, Tensor, bool], Problem]  # (features, weights, option) → problem


def forward_pass(op: Member, *args: Any) -> ByThreads | ReadLevels:
    """The pass that takes features, shapes and starts of the levels, locations, weights, levels as numbers, and an option."""
    record = partial(_forward, op)
    return record(*args) if args[1] is None else ReadLevels(record, args, 1)


def backward_pass(op: Member, *args: Any, needs: Sequence[bool]) -> ByThreads | ReadLevels:
    """The pass that takes the gradient of the result and the arguments of the forward pass, and returns the needed gradients."""
    record = partial(_backward, op, needs=needs)
    return record(*args) if args[2] is None else ReadLevels(record, args, 2)


@by_threads
def _forward(
    op: Member, features: Tensor, shapes: Tensor | None, starts: Tensor | None, locations: Tensor, weights: Tensor,
    levels: tuple[int, ...], option: bool,
) -> Pass:  # fmt: skip
    wide, problem = accumulator(features, locations, weights), op.problem(features, weights, option)
    p = CpuPass(wide, dict(features=features, shapes=shapes, starts=starts, locations=locations, weights=weights))
    places, cuts, shape = p.dense("locations", wide), _cuts(problem.L, LEVELS), (problem.B, problem.Q, problem.channels)
    sums = [p.buffer("out", shape, wide) for _ in cuts]
    for (low, high), out in zip(cuts, sums):
        some, few = _of_levels(problem, levels, low, high)
        views = _Views(p, some, few, (low, high, 0, problem.G, 0, problem.D), problem, places)
        views.per_unit(results=out, writes=["out"] if high == problem.L else [])
    if len(sums) > 1:
        elements = len(sums) * problem.units * problem.G * problem.D
        stacked = elements * (wide.itemsize + (0 if wide == torch.float64 else 8))  # torch converts them before it adds
        sums = list(p.call("torch.sum", _sum, sums, [("out", shape, torch.float64)], scratch=stacked))
    return p.returns(p.rounded(sums[0], shape, features.dtype)).returning_one()


def _sum(*sums: Tensor) -> Tensor:
    return torch.stack(sums).sum(0, dtype=torch.float64)


@by_threads
def _backward(
    op: Member, grad: Tensor, features: Tensor, shapes: Tensor | None, starts: Tensor | None, locations: Tensor, weights: Tensor,
    levels: tuple[int, ...], option: bool, *, needs: Sequence[bool],
) -> Pass:  # fmt: skip
    wide, problem = accumulator(features, locations, weights), op.problem(features, weights, option)
    given = dict(grad=grad, features=features, shapes=shapes, starts=starts, locations=locations, weights=weights)
    p, parts, operands = CpuPass(wide, given), _parts(problem), (features, locations, weights)
    places = p.dense("locations", wide)
    if len(parts) == 1:
        views = _Views(p, problem, levels, parts[0], problem, places)
        found = views.gradients([x.shape for x in operands], needs, op.names)
    else:
        found = _add_parts(p, problem, parts, levels, places, operands, needs, op.names)
    rounded = [p.rounded(slot, x.shape, x.dtype) for slot, x in zip(found, operands) if slot is not None]
    return p.returns(*rounded)


Part = tuple[int, int, int, int, int, int]  # ranges of levels, of groups and of channels of a group


def _parts(p: Problem) -> list[Part]:
    """Kernels process a limited number of levels, groups and channels at once; larger problems are split into these parts."""
    return [(*l, *g, *d) for l, g, d in product(_cuts(p.L, LEVELS), _cuts(p.G, BLOCK), _cuts(p.D, LENGTH))]  # noqa: E741


def _cuts(n: int, most: int) -> list[tuple[int, int]]:
    return [(i, min(i + most, n)) for i in range(0, max(1, n), most)]


def _of_levels(p: Problem, levels: tuple[int, ...], low: int, high: int) -> tuple[Problem, tuple[int, ...]]:
    """The problem with levels `low` to `high` only, and these levels."""
    if high - low == p.L:
        return p, levels
    some = np.array(levels, np.int64).reshape(-1, p.L, 3)[:, low:high].flatten().tolist()
    return p._replace(L=high - low), tuple(some)


def _add_parts(
    p: CpuPass, problem: Problem, parts: Sequence[Part], levels: tuple[int, ...], places: str, operands: Sequence[Tensor],
    needs: Sequence[bool], names: Sequence[str],
) -> list[str | None]:  # fmt: skip
    """Gradients as float64 sums over parts; this includes the gradient through the softmax, which is linear."""
    sums = [p.buffer("sums", x.shape, torch.float64, fill=0) if need else None for x, need in zip(operands, needs)]
    B, S, heads, G, D = problem.B, problem.S, problem.heads, problem.G, problem.D
    for part in parts:
        l0, l1, g0, g1, d0, d1 = part
        some, few = _of_levels(problem, levels, l0, l1)
        some = some._replace(G=g1 - g0, D=d1 - d0)
        shapes = (B * S, heads, g1 - g0, d1 - d0), operands[1].shape, (problem.units * problem.M, l1 - l0, g1 - g0)
        views = _Views(p, some, few, part, problem, places)
        found = views.gradients(shapes, needs, names if part == parts[-1] else ())
        whole = (B * S, heads, G, D), operands[1].shape, (problem.units * problem.M, problem.L, G)
        where = (slice(None), slice(None), slice(g0, g1), slice(d0, d1)), (...,), (slice(None), slice(l0, l1), slice(g0, g1))
        for total, shape, place, slot in zip(sums, whole, where, found):
            if total is not None and slot is not None:
                p.call("torch.add_", partial(_add_to, shape, place), [total, slot])
    return list(sums)


def _add_to(shape: Sequence[int], place: tuple, total: Tensor, found: Tensor) -> None:
    there = total.view(shape)[place]
    there += found.view(there.shape)


class _Views:
    """The operands of one part of a problem in the kernels' form, and the steps that use them."""

    def __init__(
        self, p: CpuPass, problem: Problem, levels: tuple[int, ...], part: Part, whole: Problem, places: str
    ) -> None:  # fmt: skip
        self.p, self.problem, self.whole, self.part = p, problem, whole, part
        self.table, self.sizes, self.spare = _table(problem, levels, p.accumulator)
        l0, l1, g0, g1, d0, d1 = part
        all_weights = (l1 - l0, g1 - g0) == (whole.L, whole.G)
        self.all_channels = (g1 - g0, d1 - d0) == (whole.G, whole.D)
        self.places, wide = places, p.accumulator
        self.weights = p.dense("weights", wide, None if all_weights else lambda x: x[..., l0:l1, g0:g1])
        self.grad = None
        if "grad" in p.given:
            split = whole.heads, whole.G, whole.D
            some = None if self.all_channels else lambda x: x.unflatten(-1, split)[..., g0:g1, d0:d1]
            self.grad = p.dense("grad", wide, some)
        self.features: str | None = None

    def rows(self) -> str:
        """The slot of the features; if levels may have corners outside of them, with a row of zeros at the end."""
        p, problem, whole, (_, _, g0, g1, d0, d1) = self.p, self.problem, self.whole, self.part
        shape = whole.B, whole.S, whole.heads, whole.G, whole.D
        if self.features is not None:
            return self.features
        if self.spare < 0:
            some = None if self.all_channels else lambda x: x.view(shape)[..., g0:g1, d0:d1]
            self.features = p.dense("features", p.accumulator, some)
            return self.features
        n = problem.B * problem.S

        def padded(x: Tensor) -> Tensor:
            rows = x.new_empty(n + 1, problem.channels, dtype=p.accumulator)
            rows[:n].view(*shape[:3], g1 - g0, d1 - d0).copy_(x.detach().view(shape)[..., g0:g1, d0:d1])
            rows[n:] = 0
            return rows

        self.features = p.derive("features padded", "features", padded, (n + 1, problem.channels), p.accumulator)
        return self.features

    def see(self, **slots: str | None) -> list[Any]:
        """Slots as arrays of the shape that their kind has in kernels; None becomes an empty array."""
        p = self.problem
        shapes = dict(
            rows=(1, (p.B * p.S + (self.spare >= 0)) * p.channels), places=(p.units, p.M * 2),
            weights=(p.units * p.M * p.L, p.G), results=(p.units, p.G * p.D),
        )  # fmt: skip
        return [_nothing(self.p.accumulator) if x is None else Array(x, shapes[kind]) for kind, x in slots.items()]

    def per_unit(
        self, *, results: str | None = None, d_places: str | None = None, d_weights: str | None = None, writes: Sequence[str]
    ) -> None:  # fmt: skip
        p = self.problem
        given = self.see(rows=self.rows(), places=self.places, weights=self.weights, results=self.grad)
        found = self.see(results=results, places=d_places, weights=d_weights)
        enough = max(1, 2**15 // max(1, p.M * p.L * p.G * p.D))  # the fewest units that are worth a thread
        args = *p.numbers, self.spare, self.table, self.sizes, *given, *found
        self.p.run(per_unit, p.units, args, grain=enough, writes=writes)

    def per_channel(
        self, cut: tuple[int, int, int], reads: bool, *, d_rows: str, d_places: str | None, d_weights: str | None,
        writes: Sequence[str],
    ) -> None:  # fmt: skip
        p, (many, pieces, width) = self.problem, cut
        given = self.see(places=self.places, weights=self.weights, results=self.grad)
        found = self.see(rows=self.rows() if reads else None, places=d_places, weights=d_weights)
        tasks = p.B * -(-p.heads // many) * pieces
        enough = max(1, 2**15 // max(1, p.Q * p.M * p.L * many * width * LANES))  # the fewest tasks worth a thread
        args = *p.numbers, self.spare, many, width, self.table, self.sizes, *given, *found, *self.see(rows=d_rows)
        own = spill_bytes((p.S + 1) * many)
        self.p.run(per_channel, tasks, args, grain=enough, slices_per_thread=tasks, writes=writes, scratch=own)

    def gradients(self, shapes: Sequence[Sequence[int]], needs: Sequence[bool], names: Sequence[str]) -> list[str | None]:
        """Gradients of features, locations and weights, if needed; `names` are their names in a plan."""
        p, problem = self.p, self.problem
        rest = [p.buffer("gradient", n, p.accumulator, fill=0) if need else None for n, need in zip(shapes[1:], needs[1:])]
        written = [name for name, need in zip(names, needs) if need]
        cut = _pieces(problem, p.threads)
        fused = needs[0] and any(needs[1:]) and cut[1] == 1  # all gradients in one step, if tasks have whole heads
        d_features = None
        if needs[0]:
            n = problem.B * problem.S
            d_features = p.buffer("d_features", (n + (self.spare >= 0), problem.channels), p.accumulator, fill=0)
            places, weights = rest if fused else (None, None)
            writes = written if fused else written[:1]
            self.per_channel(cut, fused, d_rows=d_features, d_places=places, d_weights=weights, writes=writes)
            d_features = p.view("d_features", d_features, lambda x: x[:n].view(tuple(shapes[0])))
        if any(needs[1:]) and not fused:
            self.per_unit(d_places=rest[0], d_weights=rest[1], writes=written[needs[0] :])
        return [d_features, *rest]


@lru_cache(64)
def _pieces(p: Problem, threads: int) -> tuple[int, int, int]:
    """How the gradient of features is split into tasks: heads per task, pieces of these heads, SIMD blocks per piece.

    A task has several heads if there are enough for all threads, since the heads of a query read the same pages, or a part of
    one if there are few. The result does not depend on it.
    """
    blocks = p.G * -(-p.D // LANES)
    width = -(-blocks // max(1, min(-(-threads // max(1, p.B * p.heads)), blocks)))

    def takes(many: int) -> int:  # heads of the busiest thread
        return -(-p.B * -(-p.heads // many) // threads) * many

    return min(range(p.heads, 0, -1), key=takes, default=1), -(-blocks // max(1, width)), width


@lru_cache(64)
def _table(p: Problem, levels: tuple[int, ...], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, int]:
    """Levels for kernels: (width, start) as integers, (width, height) as floats, ``[2·L, places]`` each, and the spare row.

    Columns are places, up to where their levels repeat; they wrap around at the end so that a SIMD load may start anywhere. The
    spare row is a row of zeros after the features that corners outside of them read; −1 if all levels are inside.
    """
    table = np.repeat(np.array(levels, np.int64).reshape(-1 if levels else 0, p.L, 3), p.near, 0)
    along = np.pad(table, ((0, LANES - 1 if len(table) else 0), (0, 0), (0, 0)), "wrap").transpose(1, 2, 0)  # [L, 3, places]
    whole, real = (np.ascontiguousarray(along[:, of]).reshape(2 * p.L, along.shape[2]) for of in ((1, 2), (1, 0)))
    inside = all(0 <= start <= p.S - h * w for h, w, start in zip(levels[::3], levels[1::3], levels[2::3]))
    return whole, real.astype(NUMPY[dtype]), -1 if inside else p.B * p.S


@lru_cache(16)
def _nothing(dtype: torch.dtype) -> np.ndarray:
    return np.empty((0, 0), NUMPY[dtype])
