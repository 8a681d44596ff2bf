"""φ on CPUs: its tables as arrays, and the Numba kernels that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...op import cpu
from .._dense.cpu import LONG
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

    def blocks(self, matrices: int, rows: int) -> Iterator[tuple[slice, slice]]:
        """Matrices and rows whose φ stays in a cache: some rows of one matrix, or all rows of several."""
        most = max(1, BLOCK // max(1, self.D))
        several, step = max(1, most // max(1, rows)), max(1, min(rows, most, LONG))
        for first in range(0, matrices, several):
            for start in range(0, rows, step):
                yield slice(first, min(matrices, first + several)), slice(start, min(rows, start + step))

    def phi(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[…, d] → […, D], in contiguous `out` if it is given."""
        out = x.new_empty(*x.shape[:-1], self.D, dtype=self.dtype) if out is None else out
        self._run(expand, [x], out)
        return out

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """∂x […, d], from ∂φ […, D]."""
        out = x.new_empty(x.shape, dtype=self.dtype)
        self._run(differentiate, [grad, x], out)
        return out

    def _run(self, kernel: Callable[..., None], given: Sequence[Tensor], out: Tensor) -> None:
        rows = [t.contiguous().flatten(0, -2) for t in (*given, out)]
        grain, basis = max(1, GRAIN // max(1, self.D)), (self._prefixes, self._roots, self.power, self.T)
        *arrays, made = map(cpu.array, rows)
        cpu.run(kernel, len(rows[0]), *arrays, *basis, made, grain=grain)
