"""The part of power attention that goes through states, by the kernels of symmetric powers: any power, any tiles, any width.

Queries and keys are copied to the accumulator's dtype, as one matrix per chunk and head of keys. A state has one column more than
the values have, for z, so the sums of weights are as exact as the sums of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...jit.steps import Pass
from .._dense.gpu import Slab
from .._sympow.gpu import problem_of, record_gradient, record_product
from .gpu_configs import Problem


def _chunked(t: Tensor, n: Problem, wide: torch.dtype) -> Tensor:
    """[B, T, heads, x] → [B · h · chunks, heads / h · C, x], padded with zeros."""
    B, T, heads, x = t.shape
    padded = torch.nn.functional.pad(t.to(wide), (0, 0, 0, 0, 0, n.chunks * n.C - T))
    parts = padded.view(B, n.chunks, n.C, n.h, heads // n.h, x).permute(0, 3, 1, 4, 2, 5)
    return parts.reshape(B * n.h * n.chunks, heads // n.h * n.C, x).contiguous()  # kernels expect rows without gaps


def _joined(t: Tensor, n: Problem) -> Tensor:
    """The inverse, heads first: [B, heads, T, x]."""
    members = t.shape[1] // n.C
    parts = t.view(n.B, n.h, n.chunks, members, n.C, t.shape[2]).permute(0, 1, 3, 2, 4, 5)
    return parts.reshape(n.B, n.h * members, n.chunks * n.C, t.shape[2])[:, :, : n.T].contiguous()


class _Matrices:
    """Slots of matrices, one for each chunk and head of keys, and products with φ."""

    def __init__(self, p: Pass, n: Problem) -> None:
        self.p, self.n, self.wide, self.count = p, n, p.accumulator, n.B * n.h * n.chunks

    def make(self, name: str, run: Any, takes: Sequence[str | None], rows: int, columns: int) -> Slab:
        shape = (self.count, rows, columns)
        (slot,) = self.p.call("copy_", run, takes, [(name, shape, self.wide)], scratch=3 * self.count * rows * columns * 8)
        return self.slab(slot, rows, columns)

    def slab(self, slot: str, rows: int, columns: int) -> Slab:
        return Slab(slot, (self.count, rows, columns), (rows * columns, columns, 1), self.wide, True)

    def rows(self, name: str, slot: str, members: int, width: int) -> Slab:
        n, wide = self.n, self.wide
        return self.make(name, lambda t: _chunked(t, n, wide), [slot], members * n.C, width)

    def product(self, x: Slab, y: Slab, expands: str, name: str) -> Slab:
        n = self.n
        problem = problem_of(x, n.power, n.tile, True, y.shape[2], self.wide, y)
        made = record_product(self.p, x, y, None, problem, expands, name, self.wide, "")
        return self.slab(made, x.shape[1] if expands == "k" else n.D, y.shape[2])

    def gradient(self, x: Slab, rows: Slab, state: Slab, name: str) -> Slab:
        n = self.n
        problem = problem_of(x, n.power, n.tile, True, rows.shape[2], self.wide, rows, state)
        like = torch.empty(x.shape, dtype=self.wide, device="meta")
        return self.slab(record_gradient(self.p, x, rows, state, problem, name, like, ""), *x.shape[1:])

    def values(self, about: dict[str, str | None], v: str) -> Slab:
        """Values and a column of ones, times the decay from each row to the end of its chunk."""
        n, wide = self.n, self.wide

        def run(v: Tensor, until: Tensor | None) -> Tensor:
            one = v.new_ones(*v.shape[:3], 1, dtype=wide)
            rows = torch.cat([v.to(wide), one], 3)
            return _chunked(rows if until is None else rows * until.mT[..., None], n, wide)

        return self.make("values and ones", run, [v, about["until"]], n.C, n.e + 1)

    def gradients(self, name: str, grad: str, past: Sequence[str | None]) -> Slab:
        """Gradients of the sums over keys; the last column is the gradient of the sums of weights."""
        n, wide = self.n, self.wide

        def run(grad: Tensor, rate: Tensor, shift: Tensor) -> Tensor:
            found = torch.cat([grad.to(wide) * rate.mT[..., None], shift.mT[..., None]], 3)
            return _chunked(found, n, wide)

        return self.make(name, run, [grad, *past], n.groups * n.C, n.e + 1)

    def scan(self, made: Slab | None, begin: Sequence[str], about: dict[str, str | None], reverse: bool) -> list[str]:
        """The states before each chunk (after it, if `reverse`) [B, h, chunks, D, e + 1], and the one after the last."""
        n, wide = self.n, self.wide
        shape, whole = (n.B, n.h, n.chunks, n.D, n.e + 1), about["whole"]

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            rest = list(given)
            added = rest.pop(0).view(shape) if made is not None else None
            decay = rest.pop(0) if whole is not None else None
            state = torch.cat([rest[0].to(wide), rest[1].to(wide)[..., None]], 3) if rest else None
            if state is None:
                device = added.device if added is not None else decay.device  # type: ignore[union-attr]
                state = torch.zeros(n.B, n.h, n.D, n.e + 1, dtype=wide, device=device)
            kept = state.new_empty(shape)
            for chunk in reversed(range(n.chunks)) if reverse else range(n.chunks):
                kept[:, :, chunk] = state
                if decay is not None:
                    state = state * decay[:, :, chunk, None, None]
                if added is not None:
                    state = state + added[:, :, chunk]
            return kept.view(self.count, n.D, n.e + 1), state

        takes = [made.slot] if made is not None else []
        takes += [whole] if whole is not None else []
        gives = [("states and moments", (self.count, n.D, n.e + 1), wide), ("last state", (n.B, n.h, n.D, n.e + 1), wide)]
        scratch = 3 * n.B * n.h * n.D * (n.e + 1) * 8
        return list(self.p.call("scan", run, [*takes, *begin], gives, scratch=scratch))


def states(
    p: Pass, n: Problem, slots: dict[str, str], about: dict[str, str | None], kept: Sequence[str] | None,
    new: Sequence[str] | None, lengths: str,
) -> Sequence[str | None]:  # fmt: skip
    """Record the states and apply queries to them: returns slots of sums [B, h · groups, T, e], and of sums of weights."""
    m = _Matrices(p, n)
    made = None
    if n.returned or n.chunks > 1:
        made = m.product(m.rows("keys", slots["k"], 1, n.d), m.values(about, slots["v"]), "m", "states of keys")
    begin = ["S", "z"] if n.begun else []
    entering, last = (None, None) if made is None and not begin else m.scan(made, begin, about, False)
    _norms(p, n, about, lengths, new)
    if new is not None and last is not None:
        _store(p, last, new[0], new[1], ["S", "z"], lambda t: t)
    if kept is not None and entering is not None:
        whole = (n.B, n.h, n.chunks, n.D, n.e + 1)
        _store(p, entering, kept[0], kept[1], [], lambda t: t.view(whole).transpose(1, 2))
    if not n.crossed or entering is None:
        return None, None
    seen = m.product(m.rows("queries", slots["q"], n.groups, n.d), m.slab(entering, n.D, n.e + 1), "k", "sums of queries")

    def faded(t: Tensor, since: Tensor | None) -> tuple[Tensor, Tensor]:
        found = _joined(t, n)
        found = found if since is None else found * since.repeat_interleave(n.groups, 1)[..., None]
        return found[..., :-1].contiguous(), found[..., -1].contiguous()

    shape = (n.B, n.h * n.groups, n.T)
    gives = [("sums of the past", (*shape, n.e), m.wide), ("norms of the past", shape, m.wide)]
    scratch = 3 * n.B * n.h * n.groups * (n.T + n.C) * (n.e + 1) * 8
    return p.call("copy_", faded, [seen.slot, about["since"]], gives, scratch=scratch)


def _store(p: Pass, found: str, S: str | None, z: str | None, writes: Sequence[str], arrange: Any) -> None:
    def run(t: Tensor, S: Tensor, z: Tensor) -> None:
        S.copy_(arrange(t)[..., :-1])
        z.copy_(arrange(t)[..., -1])

    p.call("copy_", run, [found, S, z], writes=writes)


def _norms(p: Pass, n: Problem, about: dict[str, str | None], lengths: str, new: Sequence[str] | None) -> None:
    """The norms before each chunk and after the last."""

    def run(norms: Tensor, lengths: Tensor, *rest: Tensor) -> None:
        given = list(rest)
        whole = given.pop(0) if about["whole"] is not None else None
        last = given.pop(0) if new is not None else None
        norm = given.pop(0).to(norms.dtype) if n.begun else norms.new_zeros(n.B, n.h)
        for chunk in range(n.chunks):
            lengths[:, :, chunk] = norm
            norm = (norm if whole is None else norm * whole[:, :, chunk]) + norms[:, :, chunk]
        if last is not None:
            last.copy_(norm)

    takes = [about["norms"], lengths, about["whole"], new[2] if new is not None else None, "norms" if n.begun else None]
    p.call("scan", run, [x for x in takes if x is not None], writes=["norms"] if new is not None else [])


class Queries(NamedTuple):
    """Read by both halves of a backward pass: queries, and the states before their chunks."""

    rows: Slab
    states: Slab


def query_gradients(p: Pass, n: Problem, slots: dict[str, str], past: Sequence[str | None]) -> tuple[Queries, str]:
    """Record the gradients of queries through the states, [B, h · groups, T, d]."""
    m = _Matrices(p, n)

    def entering(S: Tensor, z: Tensor) -> Tensor:
        both = torch.cat([S.to(m.wide), z.to(m.wide)[..., None]], -1)
        matrices = (both.transpose(1, 2) if n.chunks > 1 else both).reshape(-1, n.D, n.e + 1)
        return matrices[: m.count]  # none, where the sequence is empty and has only the state that it began with

    of = ["states", "moments"] if n.chunks > 1 else ["S", "z"]
    queries = Queries(m.rows("queries", slots["q"], n.groups, n.d), m.make("states before", entering, of, n.D, n.e + 1))
    found = m.gradient(queries.rows, m.gradients("gradients", slots["grad"], past), queries.states, "gradients of queries")
    return queries, _heads_first(p, n, found, n.groups, n.d)


def gradients(
    p: Pass, n: Problem, slots: dict[str, str], about: dict[str, str | None], past: Sequence[str | None], queries: Queries | None,
    end: Sequence[str | None] | None,
) -> tuple[list[str | None], str | None]:  # fmt: skip
    """Record the gradients of keys [B, h, T, d] and values [B, h, T, e] through the states, and of the state before the sequence.

    The second result is the sum of states times their gradients [B · h, chunks + 1, 1], as `_scan` computes it.
    """
    m, wide = _Matrices(p, n), p.accumulator
    made = None
    if queries is not None:
        made = m.product(queries.rows, m.gradients("balanced gradients", slots["grad"], past), "m", "gradients of states")
    after, first = m.scan(made, ["d_S", "d_z"] if n.returned else [], about, True)
    if end is not None:
        _store(p, first, end[0], end[1], [], lambda t: t)
    flows = None if queries is None else _flows(m, queries.states, after, first)
    if n.chunks == 1 and not n.returned:
        return [None, None], flows
    keys, values = m.rows("keys", slots["k"], 1, n.d), m.values(about, slots["v"])
    later = m.slab(after, n.D, n.e + 1)
    d_k = _heads_first(p, n, m.gradient(keys, values, later, "gradients of keys"), 1, n.d)
    sums = m.product(keys, later, "k", "sums of keys")

    def faded(t: Tensor, *gates: Tensor) -> Tensor:
        found = _joined(t, n)[..., :-1]
        return (found * gates[0][..., None] if gates else found).contiguous()

    takes = [sums.slot, *([about["until"]] if about["until"] else [])]
    shape = (n.B, n.h, n.T, n.e)
    scratch = 3 * n.B * n.h * (n.T + n.C) * (n.e + 1) * 8
    (d_v,) = p.call("copy_", faded, takes, [("gradients of values", shape, wide)], scratch=scratch)
    return [d_k, d_v], flows


def _flows(m: _Matrices, before: Slab, after: str, first: str) -> str:
    """Sums of states times their gradients: those before each chunk, and the one before the first."""
    n, shape = m.n, (m.n.B * m.n.h, m.n.chunks, m.n.D * (m.n.e + 1))

    def run(states: Tensor, after: Tensor, first: Tensor) -> Tensor:
        found = states.new_zeros(shape[0], n.chunks + 1, 1)
        states, after = states.view(shape), after.view(shape)
        if n.chunks:
            found[:, 0, 0] = (states[:, 0] * first.view(shape[0], shape[2])).sum(1)
        for chunk in range(1, n.chunks):
            found[:, chunk, 0] = (states[:, chunk] * after[:, chunk - 1]).sum(1)
        return found

    gives = [("flows", (shape[0], n.chunks + 1, 1), m.wide)]
    return m.p.call("flows", run, [before.slot, after, first], gives, scratch=shape[0] * shape[2] * 8)[0]


def _heads_first(p: Pass, n: Problem, found: Slab, members: int, width: int) -> str:
    shape = (n.B, n.h * members, n.T, width)
    scratch = 2 * n.B * n.h * members * (n.T + n.C) * width * 8
    gives = [(f"{found.slot} joined", shape, p.accumulator)]
    (made,) = p.call("copy_", lambda t: _joined(t, n), [found.slot], gives, scratch=scratch)
    return made
