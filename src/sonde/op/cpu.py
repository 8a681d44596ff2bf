"""How CPU kernels are compiled and run: Numba functions of ``(start, stop, …)`` without the GIL, on torch's OpenMP threads.

After each of torch's own loops OpenMP's threads spin for milliseconds while they wait for the next loop; other threads beside them
would get half a core each. Numba's ``prange`` is not used: its thread layers abort the process when two threads enter at once
or after a fork, and kernels take ten times as long to compile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numba.core.options import DefaultOptions
from torch import Tensor

from .cpu_cache import cache_of

njit: Callable[..., Any] = numba.njit  # Numba's stubs lack the options used here
FAST = {"contract", "reassoc", "nsz", "arcp"}  # not "nnan" and "ninf": NaN and infinities must be kept
_WITHIN = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_OWN = {"forceinline": True, "_nrt": False}  # undocumented options, which a release of Numba may drop
_INLINE = _WITHIN | {option: value for option, value in _OWN.items() if hasattr(DefaultOptions, option)}


def jit(function: Callable) -> Callable:
    """Make a kernel: compiled once for each version of our sources, and cached on disk where possible."""
    kernel = njit(nogil=True, error_model="numpy", fastmath=FAST, no_cfunc_wrapper=True)(function)
    cache = cache_of(function)
    if cache is not None and hasattr(kernel, "_cache"):  # in place of Numba's own cache
        kernel._cache = cache
    return kernel


def part(function: Callable) -> Callable:
    """Make a function that kernels call. It is inlined into each kernel and not compiled alone, which halves compile time.

    It must not create, keep or return arrays, except for temporary views: arrays are not reference-counted here, because counting
    may cost more than the work itself.
    """
    return njit(error_model="numpy", fastmath=FAST, **_INLINE)(function)


def exact_part(function: Callable) -> Callable:
    """The same with every operation rounded as written, except ``simd.fma``; for code whose exact bits matter.

    ``fastmath=False`` must be explicit: a callee inherits its caller's setting, and so do operations on lanes.
    """
    return njit(error_model="numpy", fastmath=False, **_INLINE)(function)


def array_part(function: Callable) -> Callable:
    """A part that may create or return arrays; only kernels may call it."""
    return njit(error_model="numpy", **_WITHIN)(function)


def called_part(function: Callable) -> Callable:
    """A part that is not inlined, so that the rest of a kernel does not affect the code of its inner loops."""
    return njit(error_model="numpy", fastmath=FAST, **_WITHIN)(function)


def run(kernel: Callable, size: int, *args, grain: int = 1, slices_per_thread: int = 4) -> None:
    """Call ``kernel(start, stop, *args)`` over slices of at least `grain`, which must not write the same memory."""
    threads = min(torch.get_num_threads(), -(-size // grain))
    if threads <= 1:
        if size:
            kernel(0, size, *args)
        return
    step = max(grain, -(-size // (threads * slices_per_thread)))
    starts = iter(range(0, size, step))  # next() is atomic, so this is a queue that all threads share
    held = [args]  # cleared at the end, since a thread of the pool may keep `work` alive for longer
    problems: list[BaseException] = []

    def work(_=None) -> None:
        try:
            for start in starts:
                kernel(start, min(size, start + step), *held[0])
        except BaseException as problem:  # it cannot propagate through C
            problems.append(problem)

    if _openmp is not None:
        _openmp(_Work(work), None, threads, 0)
    else:
        others = [_pool(torch.get_num_threads() - 1).submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            if not other.cancel():  # one that has not started is not needed: it may be queued behind other work
                other.result()
    held.clear()
    if problems:
        raise problems[0]


class _Memory(ctypes.c_char * (1 << 62)):  # type: ignore[misc]  # all bytes from an address on; each array uses as many as it has
    owner: Tensor


NUMPY = {getattr(torch, kind): np.dtype(kind) for kind in ("float32", "float64", "int32", "int64")}


def array(x: Tensor) -> np.ndarray:
    """The elements of `x` as a NumPy array, which keeps them alive.

    ``x.numpy()`` would make the storage of `x` impossible to resize, but FSDP resizes parameters after every use and ``out=``
    resizes results. So the array is made from the address, and the tensor stays as it is.
    """
    memory = _Memory.from_address(x.data_ptr())
    memory.owner = x
    if x.is_contiguous():
        return np.ndarray(x.shape, NUMPY[x.dtype], memory)
    return np.ndarray(x.shape, NUMPY[x.dtype], memory, strides=[step * x.itemsize for step in x.stride()])


def viewer(shape: Sequence[int], dtype: torch.dtype) -> Callable[[Tensor], np.ndarray]:
    """A faster :func:`array` for contiguous tensors of this dtype, which are seen in this shape."""
    shape, kind = tuple(shape), NUMPY[dtype]

    def view(x: Tensor) -> np.ndarray:
        memory = _Memory.from_address(x.data_ptr())
        memory.owner = x
        return np.ndarray(shape, kind, memory)

    return view


_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_openmp() -> Callable[..., None] | None:
    """``GOMP_parallel(work, data, threads, flags)`` of the OpenMP library that torch has loaded; None if it has other names."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # macOS and Windows
        return None
    found.argtypes, found.restype = [_Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


@lru_cache(1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Our own threads, where OpenMP is not available."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sonde")


def _forked() -> None:
    """After a fork: the parent's threads do not exist in the child, and OpenMP would wait for them for ever."""
    global _openmp
    _openmp = None
    _pool.cache_clear()


_openmp = _find_openmp()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
