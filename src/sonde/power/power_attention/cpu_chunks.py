"""Chunks of ``power_attention`` on CPUs, of several heads at a time: what their rows see, each other and states.

Products of matrices are torch's BLAS; Numba kernels make weights of products, gradients of weights, and φ of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...op import cpu
from .._dense.cpu import LONG, multiply
from .._sympow.basis import BLOCK
from .._sympow.cpu import CpuBasis
from . import cpu_kernels
from .reference import LEAST_GATE, is_rounding, length

ROWS = 128  # of weights at a time; a multiple of the kernels' blocks
WEIGHTS = 1 << 18  # at a time, if a head has fewer, so that they stay in a cache
GRAIN = 1 << 15  # weights that are worth a thread


class Heads(NamedTuple):
    """Heads of keys and values, and the `groups` heads of queries that share each of them, in the accumulation dtype."""

    x: Tensor  # [n, groups, T, d]
    k: Tensor  # [n, T, d]
    v: Tensor  # [n, T, e]
    gates: Tensor | None  # [n, T], float64

    def some(self, part: slice) -> Heads:
        return Heads(self.x[part], self.k[part], self.v[part], None if self.gates is None else self.gates[part])

    def bundles(self, size: int, D: int) -> Iterator[slice]:
        """Heads that are computed together, in chunks of `size` rows: one if it has many weights, or a long φ."""
        n, groups, T, _ = self.x.shape
        weights = groups * min(ROWS, T) * min(size, T)
        step = max(1, min(WEIGHTS // max(1, weights), BLOCK // max(1, groups * D)))
        return (slice(start, min(n, start + step)) for start in range(0, n, step))


def heads_of(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, wide: torch.dtype) -> Heads:
    x, y, z = (heads_first(t.detach().to(wide)) for t in (q, k, v))
    gates = None if log_gate is None else heads_first(log_gate.detach().double().clamp(min=LEAST_GATE))
    return Heads(x.unflatten(0, (len(y), q.shape[2] // k.shape[2])), y, z, gates)


def heads_first(x: Tensor) -> Tensor:
    """[B, T, h, …] → [B · h, T, …], contiguous."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def heads_last(x: Tensor, B: int, h: int) -> Tensor:
    """[B · h, T, …] → [B, T, h, …], a view."""
    return x.unflatten(0, (B, h)).transpose(1, 2)


class State(NamedTuple):
    """The state before a chunk, or its gradient."""

    S: Tensor  # [n, D, e]
    z: Tensor  # [n, D]


def chunks_of(heads: Heads, size: int, basis: CpuBasis) -> list[Chunk]:
    T = heads.k.shape[1]
    return [Chunk(heads, slice(start, min(start + size, T)), basis) for start in range(0, T, size)]


class Chunk:
    """Rows of some heads that see each other through weights, and earlier rows through a state."""

    def __init__(self, heads: Heads, rows: slice, basis: CpuBasis) -> None:
        self.rows, self.basis = rows, basis
        self.x, self.k, self.v = heads.x[:, :, rows], heads.k[:, rows], heads.v[:, rows]
        self.n, self.groups, self.count, _ = self.x.shape
        self.G = None if heads.gates is None else heads.gates[:, rows].cumsum(1)

    def blocks(self) -> Iterator[slice]:
        """Rows whose weights are computed at a time."""
        return (slice(start, min(start + ROWS, self.count)) for start in range(0, self.count, ROWS))

    def pieces(self, rows: slice, groups: int = 1) -> Iterator[slice]:
        """Rows whose φ stays in a cache."""
        step = max(1, min(LONG, BLOCK // max(1, self.n * groups * self.basis.D)))
        return (slice(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step))

    def since(self, root: int = 1) -> Tensor:
        """[n, rows], the decay since the chunk's beginning, or this root of it."""
        return self._decay(None if self.G is None else self.G / root)

    def until(self, root: int = 1) -> Tensor:
        """[n, rows], the decay until the chunk's end, or this root of it."""
        return self._decay(None if self.G is None else (self.G[:, -1:] - self.G) / root)

    def _decay(self, G: Tensor | None) -> Tensor:
        return self.k.new_ones(1, 1).expand(self.n, self.count) if G is None else G.to(self.k.dtype).exp()

    @cached_property
    def whole(self) -> Tensor:
        """[n], the decay over all of the chunk."""
        return self.since()[:, -1]

    @cached_property
    def lengths(self) -> Tensor:
        """[n, rows], Σ ‖k_j‖^p e^{G_i − G_j} over the rows so far."""
        return self._prepared[0]

    @cached_property
    def _sums(self) -> Any:
        return cpu.array(self.k.new_empty(self.n, 0, dtype=torch.float64) if self.G is None else self.G)

    @cached_property
    def _prepared(self) -> tuple[Tensor, Any]:
        """`lengths`, and the decay from each row to the end of its block of the kernels."""
        lengths = self.k.new_empty(self.n, self.count)
        early = cpu.array(self.k.new_empty(self.n, 0 if self.G is None else self.count))
        arrays = cpu.array(self.k.contiguous()), self._sums, self.basis.power, early, cpu.array(lengths)
        cpu.run(cpu_kernels.prepare, self.n, *arrays)
        return lengths, early

    def weights(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Weights [n, groups · R, S] of these rows and the keys up to the last of them, and their sums [n, groups, R]."""
        made = self._products(self.x, self.k, rows)
        norms = made.new_empty(self.n, self.groups, rows.stop - rows.start)
        self._run(cpu_kernels.weigh, rows, [made], [self.basis.power, rows.start, cpu.array(norms)])
        return made, norms

    def slopes(self, rows: slice, incoming: Tensor, rates: Tensor, shifts: Tensor, flows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients of products, and weights times rates, both [n, groups · R, S].

        ∂w is ⟨incoming, v⟩ · rate + shift. Each w ∂w is added to `flows` [n, rows], for the gates between its key and its query.
        """
        products, toward = self._products(self.x, self.k, rows), self._products(incoming, self.v, rows)
        few = (0, 0, 0) if flows is None else (self.n, rows.stop - rows.start, rows.stop)
        changes, factors = products.new_empty(few), [cpu.array(t[:, :, rows].contiguous()) for t in (rates, shifts)]
        self._run(cpu_kernels.differentiate, rows, [products, toward], [*factors, self.basis.power, rows.start, cpu.array(changes)])
        if flows is not None:
            cpu.run(cpu_kernels.flow, self.n, cpu.array(changes), rows.start, cpu.array(flows))
        return products, toward

    def _products(self, x: Tensor, y: Tensor, rows: slice) -> Tensor:
        return torch.bmm(x[:, :, rows].flatten(1, 2), y[:, : rows.stop].mT)

    def _run(self, kernel: Any, rows: slice, matrices: list[Tensor], rest: list[Any]) -> None:
        R = rows.stop - rows.start
        grain = max(1, GRAIN // max(1, self.groups * cpu_kernels.BLOCK * rows.stop))
        seen = [cpu.array(x.unflatten(1, (self.groups, R))) for x in matrices]
        cpu.run(kernel, self.n * -(-R // cpu_kernels.BLOCK), *seen, self._sums, self._prepared[1], *rest, grain=grain)

    def phi(self, x: Tensor) -> Tensor:
        """[n, …, d] → [n, ·, D]."""
        return self.basis.phi(x).flatten(1, -2)


def outputs(chunk: Chunk, rows: slice, past: State | None, norms: Tensor | None, least: float) -> tuple[Tensor, Tensor]:
    """The results [n, groups, R, e] of R rows of a chunk, and one over their sums of weights, 0 where these are only rounding.

    `norms` [n] are the sums of ‖k‖^p before the chunk.
    """
    weights, norm = chunk.weights(rows)
    total = multiply(weights, chunk.v[:, : rows.stop]).unflatten(1, norm.shape[1:])
    most = chunk.lengths[:, rows]
    if past is not None and norms is not None:
        x = chunk.x[:, :, rows] * chunk.since(chunk.basis.power)[:, None, rows, None]
        for here in chunk.pieces(slice(0, x.shape[2]), chunk.groups):
            phi = chunk.phi(x[:, :, here])
            total[:, :, here] += multiply(phi, past.S).view_as(total[:, :, here])
            norm[:, :, here] += multiply(phi, past.z[..., None]).view_as(norm[:, :, here])
        most = most + chunk.since()[:, rows] * norms[:, None]
    most = most[:, None] * length(chunk.x[:, :, rows], chunk.basis.power)
    dead = is_rounding(norm, most, least)
    rate = torch.where(dead, 0, 1 / norm)
    return torch.where(dead[..., None], 0, total * rate[..., None]), rate


def fold(chunk: Chunk, past: State | None, out: State | None) -> State:
    """The state after a chunk, in `out` if it is given."""
    sizes = (chunk.n, chunk.basis.D, chunk.v.shape[2]), (chunk.n, chunk.basis.D)
    out = out or State(*(chunk.k.new_empty(size) for size in sizes))
    S, z = out
    if past is None:
        S.zero_()
        z.zero_()
    else:
        torch.mul(past.S, chunk.whole[:, None, None], out=S)
        torch.mul(past.z, chunk.whole[:, None], out=z)
    keys = chunk.k * chunk.until(chunk.basis.power)[..., None]
    for piece in chunk.pieces(slice(0, chunk.count)):
        phi = chunk.phi(keys[:, piece])
        S.baddbmm_(phi.mT, chunk.v[:, piece])
        z += phi.sum(1)
    return out
