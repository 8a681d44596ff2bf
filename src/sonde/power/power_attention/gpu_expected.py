"""Expected results, for the search: power attention in plain PyTorch, one chunk of one batch entry at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._sympow.basis import Basis
from .gpu_configs import Fold, Past, Problem, Strides


def _wide(common: torch.dtype) -> torch.dtype:
    return torch.float32 if common.itemsize == 2 else torch.float64


def _rows(t: Tensor, heads: int, p: Problem | Fold | Past, width: int, strides: Strides) -> Tensor:
    """[B, heads, T, width] as the kernel sees it, in a wider dtype."""
    return t.as_strided((p.B, heads, p.T, width), (*strides, 1)).to(_wide(p.common))


class _Part(NamedTuple):
    """One chunk of one batch entry; keys and values are repeated for all heads of queries."""

    at: tuple[int, slice, slice]  # batch, heads, rows
    x: Tensor  # [hq, c, d]
    y: Tensor
    z: Tensor  # [hq, c, e]
    decay: Tensor  # [hq, c, c], e^{G_i − G_j}, 0 after the query
    since: Tensor  # [hq, c, 1]
    chunk: int


def _parts(p: Problem, q: Tensor, k: Tensor, v: Tensor, high: Tensor | None, low: Tensor | None) -> Iterator[_Part]:
    x, y, z = _rows(q, p.h * p.groups, p, p.d, p.q), _rows(k, p.h, p, p.d, p.k), _rows(v, p.h, p, p.e, p.v)
    G = x.new_zeros(p.B, p.h, p.T) if high is None or low is None else high.to(x.dtype) + low.to(x.dtype)
    for b in range(p.B):
        for chunk in range(p.chunks):
            rows = slice(chunk * p.C, min(p.T, (chunk + 1) * p.C))
            keys, values, g = (t[b, :, rows].repeat_interleave(p.groups, 0) for t in (y, z, G))
            decay = (g[:, :, None] - g[:, None, :]).clamp(max=0).exp().tril()
            yield _Part((b, slice(None), rows), x[b, :, rows], keys, values, decay, g.exp()[..., None], chunk)


def _state(p: Past, states: Tensor, b: int, chunk: int, like: Tensor) -> Tensor:
    """[hq, D, …]: a state without roots, rescaled to be multiplied with a φ that has them."""
    basis = Basis(p.d, 2, p.tile, True, like.device)
    found = states[b, chunk].to(like.dtype).reshape(p.h, basis.D, -1)
    return (found * basis.roots.to(like.dtype).repeat_interleave(p.tile**2)[:, None]).repeat_interleave(p.groups, 0)


def _phi(p: Problem | Fold | Past, x: Tensor, scaled: bool = True) -> Tensor:
    return Basis(p.d, 2, p.tile, scaled, x.device).phi(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def outputs(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, high: Tensor | None, low: Tensor | None, early: Tensor | None,
    lengths: Tensor, past: Tensor | None, past_norms: Tensor | None, norms: Tensor | None, out: Tensor, rates: Tensor,
    lost: Tensor | None,
) -> dict[int, Tensor]:  # fmt: skip
    found = torch.empty_like(out)
    for part in _parts(p, q, k, v, high, low):
        (b, _, rows), x = part.at, part.x
        weights = (x @ part.y.mT) ** p.power * part.decay
        total, norm = weights @ part.z, weights.sum(-1, keepdim=True)
        if past is not None and past_norms is not None and (part.chunk > 0 or p.begun):
            total, norm = total + past[b, :, rows], norm + past_norms[b, :, rows, None]
        found[b, rows] = (total / norm).transpose(0, 1).to(out.dtype)
    return {10: found}


def query_gradients(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, high: Tensor | None, low: Tensor | None, early: Tensor | None,
    rate: Tensor, shift: Tensor, past: Tensor | None, d_q: Tensor | None, *others: Tensor | None,
) -> dict[int, Tensor]:  # fmt: skip
    if d_q is None:
        return {}
    found, grads = torch.empty_like(d_q), _rows(grad, p.h * p.groups, p, p.e, p.grad)
    for part in _parts(p, q, k, v, high, low):
        b, _, rows = part.at
        incoming, shifts = grads[part.at] * rate[part.at][..., None], shift[part.at][..., None]
        slopes = p.power * (part.x @ part.y.mT) ** (p.power - 1) * part.decay * (incoming @ part.z.mT + shifts)
        total = slopes @ part.y
        if past is not None and (part.chunk > 0 or p.begun):
            total = total + past[part.at]
        found[b, rows] = total.transpose(0, 1).to(d_q.dtype)
    return {10: found}


def key_gradients(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, high: Tensor | None, low: Tensor | None, late: Tensor | None,
    rate: Tensor, shift: Tensor, past_k: Tensor | None, past_v: Tensor | None,
    d_k: Tensor | None, d_v: Tensor | None, passed: Tensor | None,
) -> dict[int, Tensor]:  # fmt: skip
    found = {11 + i: torch.empty_like(t) for i, t in enumerate((d_k, d_v)) if t is not None}
    grads = _rows(grad, p.h * p.groups, p, p.e, p.grad)
    for part in _parts(p, q, k, v, high, low):
        b, _, rows = part.at
        incoming, shifts = grads[part.at] * rate[part.at][..., None], shift[part.at][..., None]
        products = part.x @ part.y.mT
        slopes = p.power * products ** (p.power - 1) * part.decay * (incoming @ part.z.mT + shifts)
        to_keys, to_values = ((w.mT @ x).unflatten(0, (p.h, p.groups)).sum(1) for w, x in (
            (slopes, part.x), (products**p.power * part.decay, incoming)))  # fmt: skip
        if past_k is not None and past_v is not None and (part.chunk < p.chunks - 1 or p.returned):
            to_keys, to_values = to_keys + past_k[b, :, rows], to_values + past_v[b, :, rows]
        for i, t in ((11, to_keys), (12, to_values)):
            if i in found:
                found[i][b, rows] = t.transpose(0, 1).to(found[i].dtype)
    return found


def _passes(p: Past) -> Iterator[tuple[int, int, slice]]:
    """Batch entry, chunk, and the rows of it that go through a state."""
    for b in range(p.B):
        for chunk in range(p.first, p.first + p.states):
            yield b, chunk, slice(chunk * p.C, min(p.T, (chunk + 1) * p.C))


def _unwritten(outputs: dict[int, Tensor | None]) -> dict[int, Tensor]:
    """Outputs full of NaN, as the search prepares them: chunks without a state are not written."""
    return {i: torch.full_like(t, torch.nan) for i, t in outputs.items() if t is not None}


def past_sums(
    p: Past, x: Tensor, factors: Tensor | None, states: Tensor, moments: Tensor | None, sums: Tensor, norms: Tensor | None
) -> dict[int, Tensor]:
    rows, found = _rows(x, p.h * p.groups, p, p.d, p.x), _unwritten({4: sums, 5: norms})
    for b, chunk, here in _passes(p):
        phi = _phi(p, rows[b, :, here])
        if factors is not None:
            phi = phi * factors[b, :, here, None].repeat_interleave(p.groups, 0).to(phi.dtype)
        found[4][b, :, here] = (phi @ _state(p, states, b, chunk, phi)).to(sums.dtype)
        if moments is not None and norms is not None:
            factor = 1 if factors is None else factors[b, :, here].repeat_interleave(p.groups, 0)
            found[5][b, :, here] = (_toward(p, moments, b, chunk, rows[b, :, here]) * rows[b, :, here]).sum(-1) * factor
    return found


def _toward(p: Past, moments: Tensor, b: int, chunk: int, x: Tensor) -> Tensor:
    """Rows times the matrix of moments."""
    return x @ moments[b, chunk].to(x.dtype).sum(1).repeat_interleave(p.groups, 0)


def past_gradients(
    p: Past, x: Tensor, y: Tensor, rate: Tensor | None, shift: Tensor | None, states: Tensor, moments: Tensor, d_x: Tensor
) -> dict[int, Tensor]:
    rows, vectors = _rows(x, p.h * p.groups, p, p.d, p.x), _rows(y, p.h * p.groups, p, p.e, p.y)
    found, basis = _unwritten({6: d_x})[6], Basis(p.d, 2, p.tile, True, x.device)
    for b, chunk, here in _passes(p):
        incoming, shifts = vectors[b, :, here], torch.ones_like(vectors[b, :, here, :1])
        if rate is not None and shift is not None:
            incoming, shifts = incoming * rate[b, :, here, None], shifts * shift[b, :, here, None]
        these = rows[b, :, here]
        d_phi = incoming @ _state(p, states, b, chunk, incoming).mT
        through = basis.gradient(d_phi.flatten(0, 1), these.flatten(0, 1)).view_as(these)
        found[b, :, here] = (through + 2 * shifts * _toward(p, moments, b, chunk, these)).to(found.dtype)
    return {6: found}


def fold(p: Fold, x: Tensor, y: Tensor, factors: Tensor | None, out: Tensor) -> dict[int, Tensor]:
    found, heads = torch.empty_like(out), p.h * p.members
    rows, right = _rows(x, heads, p, p.d, p.x), _rows(y, heads, p, p.e, p.y)
    if factors is not None:
        right = right * factors[..., None]
    for b in range(p.B):
        for chunk in range(p.chunks):
            here = slice((chunk + p.skipped) * p.C, min(p.T, (chunk + p.skipped + 1) * p.C))
            made = _phi(p, rows[b, :, here], False).mT @ right[b, :, here]
            found[b, :, chunk] = made.unflatten(0, (p.h, p.members)).sum(1).to(out.dtype)
    return {3: found}


def step(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor, z: Tensor, norms: Tensor, tiles: Tensor,
    roots: Tensor, out: Tensor, new_S: Tensor, new_z: Tensor, *others: Tensor | None,
) -> dict[int, Tensor]:  # fmt: skip
    x, y, values = _rows(q, p.h * p.groups, p, p.d, p.q), _rows(k, p.h, p, p.d, p.k), _rows(v, p.h, p, p.e, p.v)
    basis = Basis(p.d, p.power, p.tile, True, q.device)
    decay = x.new_ones(p.B, p.h, 1) if log_gate is None else log_gate.as_strided((p.B, p.h, 1), p.gate).to(x.dtype).exp()
    phi, seen = (basis.phi(t.flatten(0, 2)).view(p.B, p.h, -1, basis.D) for t in (y, x))
    state = S.to(x.dtype) * decay[..., None] + phi.mT @ values
    moments = z.to(x.dtype) * decay + phi[:, :, 0]
    found = (seen @ state) / (seen @ moments[..., None])
    return {9: found.view(out.shape).to(out.dtype), 10: state.to(new_S.dtype), 11: moments.to(new_z.dtype)}
