"""φ on CPUs: its tables as arrays, and the Numba kernels that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...op import cpu
from .basis import BLOCK, arrays
from .cpu_kernels import differentiate, expand

GRAIN = 1 << 14  # numbers of φ that are worth a thread


class CpuBasis:
    """φ of rows of one dtype, and its gradient."""

    def __init__(self, d: int, power: int, d_tile: int, scaled: bool, dtype: torch.dtype) -> None:
        (prefixes, _), (tiles, roots) = arrays(d // d_tile, power - 1), arrays(d // d_tile, power)
        self.T, self.power, self.dtype = d_tile, power, dtype
        self.D = len(tiles) * d_tile**power
        self._prefixes = prefixes
        self._roots = (roots if scaled else np.ones_like(roots)).astype(cpu.NUMPY[dtype])

    def blocks(self, rows: int) -> Iterator[slice]:
        """Blocks of rows whose φ stays in a cache."""
        step = max(1, BLOCK // max(1, self.D))
        return (slice(start, start + step) for start in range(0, rows, step))

    def phi(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, d] → [R, D], in contiguous `out` if it is given."""
        out = x.new_empty(len(x), self.D, dtype=self.dtype) if out is None else out
        self._run(expand, [x], out)
        return out

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """∂x [R, d], from ∂φ [R, D] of these rows."""
        out = x.new_empty(x.shape, dtype=self.dtype)
        self._run(differentiate, [grad, x], out)
        return out

    def _run(self, kernel: Callable[..., None], rows: Sequence[Tensor], out: Tensor) -> None:
        arrays = [cpu.array(t.contiguous()) for t in rows]
        grain = max(1, GRAIN // max(1, self.D))
        cpu.run(kernel, len(out), *arrays, self._prefixes, self._roots, self.power, self.T, cpu.array(out), grain=grain)
