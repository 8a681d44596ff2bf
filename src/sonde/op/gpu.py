"""How Triton kernels are launched: compiled once per kind of arguments, then started without Triton's own argument handling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


def launch(
    kernel, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], sizes: Sequence[int], constants: tuple, num_warps: int
) -> None:
    """Run ``kernel[grid](*tensors, *sizes, *constants)``; its sizes are declared ``do_not_specialize``.

    Of the arguments, only dtypes, alignment and constants choose the machine code, so they are the key; a launch that was
    seen before costs half of what ``kernel[grid]`` does.
    """
    if 0 in grid:
        return
    device = next(t for t in tensors if t is not None).get_device()
    key = (
        id(kernel), device, num_warps, constants, max(sizes, default=0) >> 31,
        *[t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
    )  # fmt: skip
    compiled = _compiled.get(key)
    if compiled is None:
        if not isinstance(kernel, triton.JITFunction):  # interpreted
            kernel[grid](*tensors, *sizes, *constants, num_warps=num_warps)
            return
        compiled = _compiled[key] = kernel.warmup(*tensors, *sizes, *constants, grid=grid, num_warps=num_warps)
    compiled[grid](*tensors, *sizes, *constants)


def accumulator(dtype: torch.dtype):
    """Triton's name of an accumulation dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32
