"""The basis of the symmetric power: tiles of indices, their order and multiplicities; φ and its gradient, computed from these."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, product
from math import factorial, prod, sqrt
from typing import Any

import torch
from torch import Tensor

MOST = 4  # the largest power
MOST_KEPT = 1024  # tables
BLOCK = 1 << 19  # numbers of φ at a time, so that they stay in a cache
CPU = torch.device("cpu")


def tile_count(n: int, power: int) -> int:
    """The number of non-decreasing sequences of `power` indices below `n`."""
    found = 1
    for i in range(power):
        found = found * (n + i) // (i + 1)
    return found


def dimension(d: int, power: int, d_tile: int) -> int:
    """D, the number of columns of φ."""
    return tile_count(d // d_tile, power) * d_tile**power


def default_tile(d: int) -> int:
    """The largest of 8, 4, 2 and 1 that divides `d`: fast, and the basis is only a little larger than the smallest one."""
    return next(t for t in (8, 4, 2, 1) if d % t == 0)


def sequences(n: int, power: int) -> list[list[int]]:
    """All u₀ ≤ … ≤ u_{p−1} below n, the last index fastest."""
    found: list[list[int]] = [[]]
    for _ in range(power):
        found = [[*u, v] for u in found for v in range(u[-1] if u else 0, n)]
    return found


def root(u: list[int]) -> float:
    """√mult, where mult says how often the product of these indices occurs in the full tensor."""
    counts = [u.count(v) for v in sorted(set(u))]
    return sqrt(factorial(len(u)) // prod([factorial(c) for c in counts]))


@lru_cache(64)
def arrays(n: int, power: int) -> tuple[Any, Any]:
    """``sequences`` as int32 [tiles, power] and roots as float64 [tiles], with one tile, [0], for power 0."""
    import numpy as np  # imported here, because it takes as long to import as all of sonde

    u = np.zeros((1, 0), np.int32)
    for _ in range(power):
        last = u[:, -1] if u.shape[1] else np.zeros(1, np.int32)
        counts = n - last
        row = np.repeat(np.arange(len(u)), counts)
        begin = np.repeat(np.cumsum(counts) - counts, counts)
        u = np.concatenate([u[row], (last[row] + np.arange(len(row)) - begin)[:, None].astype(np.int32)], 1)
    patterns = (u[:, 1:] == u[:, :-1]) @ (1 << np.arange(max(0, power - 1))) if power else np.zeros(1, np.int64)
    roots = np.ones(len(u))
    for pattern in np.unique(patterns):
        roots[patterns == pattern] = root(list(u[np.argmax(patterns == pattern)]))
    return u if power else np.zeros((1, 1), np.int32), roots


_kept: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}  # never evicted: a captured graph may hold the addresses


def tables(n: int, power: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``sequences`` as int32 [tiles, power] and roots as float64 [tiles], kept on the device.

    Tables that are made during a graph capture belong to the graph and are not kept.
    """
    key = n, power, device
    found = _kept.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a copy from the host would wait for the device
            return computed(n, power, device)
        u, roots = (torch.from_numpy(x.copy()).to(device) for x in arrays(n, power))
        found = u, roots
        if type(u) is Tensor and device.type != "meta" and len(_kept) < MOST_KEPT:  # nor are those made under a tracer
            _kept[key] = found
    return found


def computed(n: int, power: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same as ``arrays``, computed on the device, without waiting for it."""
    u = torch.zeros(1, 0, dtype=torch.int64, device=device)
    last = torch.zeros(1, dtype=torch.int64, device=device)
    for i in range(power):
        counts = n - last
        row = torch.repeat_interleave(torch.arange(len(u), device=device), counts, output_size=tile_count(n, i + 1))
        begin = counts.cumsum(0) - counts
        last = last[row] + torch.arange(len(row), device=device) - begin[row]
        u = torch.cat([u[row], last[:, None]], 1)
    roots = torch.ones(len(u), dtype=torch.float64, device=device)
    for repeated in product((False, True), repeat=max(0, power - 1)):  # which indices equal the one before
        these = torch.ones(len(u), dtype=torch.bool, device=device)
        for i, same in enumerate(repeated):
            these &= (u[:, i + 1] == u[:, i]) == same
        roots.masked_fill_(these, root([0, *accumulate(not same for same in repeated)]))
    return u.int() if power else torch.zeros(1, 1, dtype=torch.int32, device=device), roots


class Basis:
    """The tables of one basis, and the computations that use them."""

    def __init__(self, d: int, power: int, d_tile: int, scaled: bool, device: torch.device = CPU) -> None:
        self.n, self.T, self.power, self.scaled = d // d_tile, d_tile, power, scaled
        u, roots = tables(self.n, power, device)
        self.u, self.roots = [u[:, i].long() for i in range(power)], roots
        self.D = len(roots) * d_tile**power

    def blocks(self, rows: int) -> Iterator[slice]:
        step = max(1, BLOCK // max(1, self.D))
        return (slice(start, start + step) for start in range(0, rows, step))

    def factors(self, x: Tensor) -> list[Tensor]:
        """x [R, d] → one factor per index of a tile, [R, tiles, 1 …, T, … 1], with T in the index's dimension."""
        tiles = x.unflatten(-1, (self.n, self.T))
        shape = [[self.T if i == j else 1 for j in range(self.power)] for i in range(self.power)]
        return [tiles.index_select(1, u).reshape(len(x), len(u), *s) for u, s in zip(self.u, shape)]

    def weigh(self, phi: Tensor) -> Tensor:
        roots = self.roots.to(phi.dtype)
        return phi * roots.view(-1, *[1] * self.power) if self.scaled else phi

    def phi(self, x: Tensor) -> Tensor:
        """[R, d] → [R, D]."""
        first, *others = self.factors(x)
        for factor in others:
            first = first * factor
        return self.weigh(first).reshape(len(x), self.D)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """∂x [R, d], from ∂φ [R, D] of these rows; sums run in the order of the tiles."""
        grad = self.weigh(grad.reshape(len(x), len(self.roots), *[self.T] * self.power))
        factors, out = self.factors(x), x.new_zeros(len(x), self.n, self.T)
        for i, u in enumerate(self.u):
            term = grad
            for j, factor in enumerate(factors):
                term = term if j == i else term * factor
            others = [2 + j for j in range(self.power) if j != i]
            out.index_add_(1, u, term.sum(others) if others else term)
        return out.flatten(1)
