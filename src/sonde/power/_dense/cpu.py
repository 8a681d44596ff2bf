"""Products on CPUs, by torch's BLAS. Half precision is multiplied in float32."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.plan import Determinism


def product(p: Pass, a: str, b: str, out: str, shape: tuple[int, int, int], dtype: torch.dtype, writes: str, turn: str = "") -> str:
    """Record ``a @ b`` of two slots, transposing those named in `turn` first; returns the result's slot."""
    wide = p.accumulator

    def run(x: Tensor, y: Tensor) -> Tensor:
        x, y = (x.mT if "a" in turn else x), (y.mT if "b" in turn else y)
        out = x.new_empty((x.shape[0], x.shape[1], y.shape[2]), dtype=wide)  # autocast does not touch calls with `out`
        return torch.bmm(x.detach().to(wide), y.detach().to(wide), out=out).to(dtype)

    copied = [s for s in (a, b) if p.slots[s].dtype != wide]
    scratch = sum(prod(t.shape) * wide.itemsize for s in copied if (t := p.given.get(s)) is not None)
    scratch += prod(shape) * wide.itemsize * (dtype != wide)
    (made,) = p.call(
        "torch.bmm", run, [a, b], [(out, shape, dtype)], writes=[writes], scratch=scratch, promise=Determinism.RUN_TO_RUN
    )
    return made
