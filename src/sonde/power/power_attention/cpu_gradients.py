"""Gradients of ``power_attention`` on CPUs, a chunk of several heads at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...op import cpu
from .._dense.cpu import multiply
from . import cpu_kernels
from .cpu_chunks import Chunk, Heads, State, heads_first


class Gradients(NamedTuple):
    """What the gradients of rows are computed from."""

    incoming: Tensor  # [n, groups, rows, e], ∂out
    rates: Tensor  # [n, groups, rows], one over the sums of weights
    shifts: Tensor  # [n, groups, rows], the gradients of these sums

    def some(self, part: slice, rows: slice) -> Gradients:
        return Gradients(*(t[part, :, rows] for t in self))


def gradients_of(heads: Heads, grad: Tensor, out: Tensor, rates: Tensor) -> Gradients:
    """From tensors [B, T, hq, …]; only `grad` and `out` have rows."""
    like = heads.x.shape[:3]
    incoming, o, rate = (heads_first(t).view(*like, *t.shape[3:]) for t in (grad, out, rates))
    return Gradients(incoming, rate, -(incoming * o).sum(-1) * rate)


class Flows(NamedTuple):
    """Parts of the gradients of a chunk's gates, in float64.

    A gate scales the weights w_ij of the keys j before it and the queries i from it on, so its gradient is the sum of w_ij ∂w_ij
    over these pairs. Only they are added: differences of longer sums would lose digits, and spread what is not finite.
    """

    gates: Tensor  # [n, rows], the sums over pairs within the chunk, and over pairs before and after it
    keys: Tensor  # [n, rows], Σ w ∂w of each key with all queries after its chunk
    queries: Tensor  # [n, rows], of each query with all keys before its chunk

    @classmethod
    def zeros(cls, chunk: Chunk) -> Flows:
        return cls(*torch.zeros(3, chunk.n, chunk.count, dtype=torch.float64, device="cpu"))

    def total(self) -> Tensor:
        """The gates' gradients. What is not finite stays so at its own place too, as in the reference."""
        before = self.keys.cumsum(1) - self.keys
        return self.gates + before + self.queries.flip(1).cumsum(1).flip(1)


def differentiate(
    chunk: Chunk, given: Gradients, past: State | None, later: State | None, d_x: Tensor, d_k: Tensor, d_v: Tensor,
    d_gates: Tensor | None,
) -> State | None:  # fmt: skip
    """Add the gradients of a chunk's queries, keys, values and gates.

    `later` is the gradient of the state after the chunk; returns that of the state before it.
    """
    gates, keys, queries = flows = (None, None, None) if d_gates is None else Flows.zeros(chunk)
    for rows in chunk.blocks():
        _within(chunk, rows, given, d_x, d_k, d_v, gates)
    if later is not None:
        _of_keys(chunk, later, d_k, d_v, keys)
        later = State(later.S * chunk.whole[:, None, None], later.z * chunk.whole[:, None])
    if past is not None:
        if gates is not None and later is not None:
            for x, y in zip(later, past):
                cpu.run(cpu_kernels.inner, chunk.n, *(cpu.array(t.flatten(1)) for t in (x, y)), cpu.array(gates))
        later = State(torch.zeros_like(past.S), torch.zeros_like(past.z)) if later is None else later
        _of_queries(chunk, past, given, later, d_x, queries)
    if isinstance(flows, Flows) and d_gates is not None:
        d_gates += flows.total()
    return later


def _within(chunk: Chunk, rows: slice, given: Gradients, d_x: Tensor, d_k: Tensor, d_v: Tensor, flows: Tensor | None) -> None:
    """Add the gradients through the weights of some rows of a chunk to those of its queries, keys and values."""
    slopes, shares = chunk.slopes(rows, *given, flows)
    x, incoming = chunk.x[:, :, rows].flatten(1, 2), given.incoming[:, :, rows].flatten(1, 2)
    d_x[:, :, rows] += multiply(slopes, chunk.k[:, : rows.stop]).view_as(d_x[:, :, rows])
    d_k[:, : rows.stop] += torch.bmm(slopes.mT, x)
    d_v[:, : rows.stop] += torch.bmm(shares.mT, incoming)


def _of_queries(chunk: Chunk, past: State, given: Gradients, d_past: State, d_x: Tensor, flows: Tensor | None) -> None:
    """Add the gradients of queries, and of the state before the chunk, through that state."""
    since = chunk.since()[:, None]
    rows_of, numbers = given.incoming * (given.rates * since)[..., None], given.shifts * since
    for piece in chunk.pieces(slice(0, chunk.count), chunk.groups):
        x, y, shift = chunk.x[:, :, piece], rows_of[:, :, piece].flatten(1, 2), numbers[:, :, piece].flatten(1, 2)
        d_queries = _of_rows(chunk, x, y, shift, past)
        d_x[:, :, piece] += d_queries
        if flows is not None:
            flows[:, piece] += (x * d_queries).sum((1, 3)) / chunk.basis.power  # by Euler's theorem
        phi = chunk.phi(x)
        d_past.S.baddbmm_(phi.mT, y)
        d_past.z.add_(torch.bmm(phi.mT, shift[..., None])[..., 0])


def _of_keys(chunk: Chunk, later: State, d_k: Tensor, d_v: Tensor, flows: Tensor | None) -> None:
    """Add the gradients of keys and values through the state after a chunk."""
    until = chunk.until()
    for piece in chunk.pieces(slice(0, chunk.count)):
        k, decays = chunk.k[:, piece], until[:, piece]
        d_keys = _of_rows(chunk, k, chunk.v[:, piece] * decays[..., None], decays, later)
        d_k[:, piece] += d_keys
        if flows is not None:
            flows[:, piece] += (k * d_keys).sum(2) / chunk.basis.power
        d_v[:, piece] += multiply(chunk.phi(k), later.S) * decays[..., None]


def _of_rows(chunk: Chunk, x: Tensor, y: Tensor, factors: Tensor, state: State) -> Tensor:
    """∂x of ⟨φ(x), S y + factor · z⟩; x [n, …, d], y [n, ·, e], factors [n, ·]."""
    d_phi = (factors[..., None] * state.z[:, None]).baddbmm_(y, state.S.mT)
    return chunk.basis.gradient(d_phi.view(*x.shape[:-1], chunk.basis.D), x)
