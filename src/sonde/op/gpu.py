"""How Triton kernels are launched: compiled once per kind of arguments, then started without Triton's own argument handling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

_launchers: dict[tuple, tuple] = {}


def launch(
    kernel, tensors: Sequence[Tensor | None], grid: tuple[int, int, int], sizes: Sequence[int], constants: tuple, num_warps: int
) -> None:
    """Run ``kernel[grid](*tensors, *sizes, *constants)``; its sizes are declared ``do_not_specialize``, its first tensor is there.

    Of the arguments, only dtypes, alignment and constants choose the machine code, so they are the key. A launch of a kind
    that was seen before costs a third of what ``kernel[grid]`` does.
    """
    if not (grid[0] and grid[1] and grid[2]):
        return
    device = tensors[0].get_device()  # type: ignore[union-attr]
    kinds = [None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    key = (id(kernel), device, num_warps, constants, max(sizes) >> 31, *kinds)
    found = _launchers.get(key)
    if found is None:
        if not isinstance(kernel, triton.JITFunction):  # interpreted
            kernel[grid](*tensors, *sizes, *constants, num_warps=num_warps)
            return
        compiled = kernel.warmup(*tensors, *sizes, *constants, grid=grid, num_warps=num_warps)
        found = _launchers[key] = compiled.run, compiled.function, compiled.packed_metadata
    run, function, metadata = found
    stream = driver.active.get_current_stream(device)
    run(*grid, stream, function, metadata, None, None, None, *tensors, *sizes, *constants)


def accumulator(dtype: torch.dtype):
    """Triton's name of an accumulation dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def cdiv(n: int, d: int) -> int:  # Triton's own is wrapped for use inside kernels, and as slow as a launch
    return -(-n // d)


def power_of_2(n: int) -> int:
    """The smallest that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
