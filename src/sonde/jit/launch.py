"""Launch Triton kernels: compile once per specialisation of the arguments, then launch without Triton's argument handling."""

from __future__ import annotations

import copy
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from . import release
from .kernel import Launch

release.attach()


_compiled: dict[tuple, tuple] = {}


def bind(kernel, tensors: Sequence[Tensor | None], launch: Launch) -> Callable[..., None]:
    """Compile for tensors like these; returns a function that launches the kernel on such tensors.

    The machine code depends on dtypes, alignment, constants and on which sizes need 64 bits, so these are the cache key. The
    first tensor must not be None. A bound launch takes a third of the time of ``kernel[grid]``.
    """
    if not launch.descriptors:
        return _bind(kernel, tensors, launch, tensors)
    blocks = dict(launch.descriptors)
    run = _bind(kernel, tensors, launch, described(tensors, blocks))
    return lambda *tensors: run(*described(tensors, blocks))


def described(tensors: Sequence[Any], blocks: dict[int, tuple[int, ...]]) -> list[Any]:
    """The tensors, those in `blocks` as descriptors, through which hardware reads and writes whole blocks of them."""
    if not blocks:
        return list(tensors)
    from triton.tools.tensor_descriptor import TensorDescriptor  # not in older Tritons

    return [TensorDescriptor.from_tensor(t, list(blocks[i])) if i in blocks else t for i, t in enumerate(tensors)]


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_descriptors(device: torch.device) -> bool:
    """Whether the device's hardware reads blocks of tensors through descriptors: NVIDIA's, from compute capability 9.0 on."""
    return find_spec("triton.tools.tensor_descriptor") is not None and _capability(device) >= 90


def has_tf32(device: torch.device) -> bool:
    """Whether matrix units multiply float32 as sums of tf32: NVIDIA's, from compute capability 8.0 on."""
    return _capability(device) >= 80


def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.x. Default configurations were measured on one; elsewhere a block may have less
    shared memory, and factors of matrix units take registers, so tiles must be smaller. Triton's interpreter runs Hopper's."""
    return interpreting() or 90 <= _capability(device) < 100


def _capability(device: torch.device) -> int:
    """NVIDIA's compute capability, 90 for 9.0; 0 for other devices, or where there is none."""
    if interpreting():
        return 0
    if device.type == "cuda":
        if torch.version.hip is not None or not torch.cuda.is_available():  # there may be no GPU while planning
            return 0
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    try:
        target = driver.active.get_current_target()  # in a process that only compiles
    except RuntimeError:  # there is no driver
        return 0
    return int(target.arch) if target.backend == "cuda" else 0


def _bind(kernel, tensors: Sequence[Tensor | None], launch: Launch, given: Sequence[Any]) -> Callable[..., None]:
    """`given` are the tensors as the kernel gets them."""
    grid, sizes, constants, *how = launch
    if not (grid[0] and grid[1] and grid[2]):
        return lambda *tensors: None
    if not isinstance(kernel, triton.JITFunction):
        options = launch.options("interpreter")
        return lambda *tensors: kernel[grid](*tensors, *sizes, *constants, **options)
    device = tensors[0].get_device()  # type: ignore[union-attr]
    kinds = [None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    wide = tuple([n >= 2**31 for n in sizes])  # each size is passed as int32 or int64
    key = (kernel, device, *how, constants, wide, *kinds)
    found = _compiled.get(key)
    if found is None:
        target = driver.active.get_current_target()
        name = f"{kernel.__module__}.{kernel.__name__} {target.arch} {[str(part) for part in key[2:]]}"
        if kernel.__module__.partition(".")[0] != "sonde":  # a release identifies Sonde's sources as a whole
            name = f"{name} {kernel.cache_key}"
        compiled = release.find(kernel, name)
        if compiled is None:
            compiled = kernel.warmup(*given, *sizes, *constants, grid=grid, **launch.options(target.backend))
        release.note(name, compiled)
        found = _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
    run, function, metadata = found
    stream = partial(driver.active.get_current_stream, device)
    return starter(run, grid, stream, (function, metadata, None, None, None), len(tensors), (*sizes, *constants))


def starter(run: Any, grid: tuple, stream: Callable[[], int], about: tuple, count: int, rest: tuple) -> Callable[..., None]:
    """A function of `count` tensors that does ``run(*grid, stream(), *about, *tensors, *rest)``.

    Triton's launcher rearranges its arguments for a C function in the same way on every launch, which takes 4 µs with cold CPU
    caches. So we record once, with placeholders, what it passes on, and then call the C function directly. If it allocates
    scratch memory, or rearranges arguments in a way that we do not recognise, we call Triton's launcher after all.
    """
    now, marks = object(), [object() for _ in range(count)]
    seen: list[tuple] = []
    with suppress(AttributeError, TypeError, ValueError):  # the launcher may choke on placeholders
        if not any(size for name, size in vars(run).items() if name.endswith("scratch_size")):
            spy = copy.copy(run)
            spy.launch = lambda *args: seen.append(args)
            spy(*grid, now, *about, *marks, *rest)
    if len(seen) == 1 and seen[0][:4] == (*grid, now):
        found, given, begin = seen[0][4:], (*marks, *rest), run.launch
        flat, packed = found[: -len(given)], found[:-1]
        if found == (*flat, *given):
            return lambda *tensors: begin(*grid, stream(), *flat, *tensors, *rest)
        if found == (*packed, given):
            return lambda *tensors: begin(*grid, stream(), *packed, (*tensors, *rest))
    return lambda *tensors: run(*grid, stream(), *about, *tensors, *rest)


def launch(
    kernel, tensors: Sequence[Tensor | None], grid: tuple[int, int, int], sizes: Sequence[int], constants: tuple, num_warps: int,
    fp_fusion: bool = True,
) -> None:  # fmt: skip
    """Bind, then launch."""
    bind(kernel, tensors, Launch(grid, tuple(sizes), constants, num_warps, fp_fusion=fp_fusion))(*tensors)


def accumulator(dtype: torch.dtype):
    """The accumulation dtype as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def cdiv(n: int, d: int) -> int:  # triton.cdiv is wrapped for use inside kernels and takes as long as a launch
    return -(-n // d)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def vector_of(most: int, *numbers: int) -> int:
    """The largest power of two up to `most` that divides all numbers."""
    while most > 1 and any(n % most for n in numbers):
        most //= 2
    return most


def halves(x: float) -> tuple[int, int]:
    """A float64 as two integers, which a kernel takes without losing bits and without recompilation; see :func:`number`."""
    low, high = struct.unpack("<ii", struct.pack("<d", x))
    return high, low


def from_halves(high: int, low: int) -> float:
    return float(struct.unpack("<d", struct.pack("<ii", low, high))[0])


@triton.jit
def number(HIGH, LOW):
    """The float64 whose :func:`halves` these are."""
    bits = (HIGH.to(tl.int64) << 32) | (LOW.to(tl.int64) & 0xFFFFFFFF)
    return bits.to(tl.float64, bitcast=True)
