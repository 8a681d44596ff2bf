"""Products on CPUs, by torch's BLAS. Half precision is multiplied in float32."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.plan import Determinism

LONG = 2304  # terms that are added in float32; a state of d = 64 has as many rows
NARROW = 16  # rows and columns from which on BLAS itself adds terms in blocks


def is_long(terms: int, rows: int, columns: int) -> bool:
    """Whether BLAS would add many terms one after another, which loses digits: one part in 10⁵ of 100,000 terms."""
    return terms > LONG and min(rows, columns) < NARROW


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of batches, in `out` if it is given. Long sums are added in blocks, and the blocks in float64."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2]) if out is None else out  # autocast does not touch calls with `out`
    if a.dtype == torch.float64 or not is_long(a.shape[2], a.shape[1], b.shape[2]):
        return torch.bmm(a, b, out=out)
    total = out.new_zeros(out.shape, dtype=torch.float64)
    for x, y in zip(a.split(LONG, 2), b.split(LONG, 1)):
        total += torch.bmm(x, y, out=torch.empty_like(out))
    return out.copy_(total)


def product(p: Pass, a: str, b: str, out: str, shape: tuple[int, int, int], dtype: torch.dtype, writes: str, turn: str = "") -> str:
    """Record ``a @ b`` of two slots, transposing those named in `turn` first; returns the result's slot."""
    wide = p.accumulator

    def run(x: Tensor, y: Tensor) -> Tensor:
        x, y = (x.mT if "a" in turn else x), (y.mT if "b" in turn else y)
        return multiply(x.detach().to(wide), y.detach().to(wide)).to(dtype)

    copied = [s for s in (a, b) if p.slots[s].dtype != wide]
    scratch = sum(prod(t.shape) * wide.itemsize for s in copied if (t := p.given.get(s)) is not None)
    scratch += prod(shape) * wide.itemsize * (dtype != wide)
    (made,) = p.call(
        "torch.bmm", run, [a, b], [(out, shape, dtype)], writes=[writes], scratch=scratch, promise=Determinism.RUN_TO_RUN
    )
    return made
