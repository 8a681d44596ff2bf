"""How CPU kernels are compiled and run: Numba functions of ``(start, stop, …)`` without the GIL, on torch's threads.

Those are OpenMP's. After each of torch's own loops they wait for the next one without sleep, for milliseconds; threads beside them
would get half a core each. Numba's own ``prange`` is not used: its thread layers abort the process when two threads enter at once
or after a fork, and it makes kernels ten times slower to compile.
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

njit: Callable[..., Any] = numba.njit  # the stubs lack what is used here
FAST = {"contract", "reassoc", "nsz", "arcp"}
_WITHIN = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_OWN = {"forceinline": True, "_nrt": False}  # Numba's own affair, so it may come to have none of them
_INLINE = _WITHIN | {option: value for option, value in _OWN.items() if hasattr(DefaultOptions, option)}


def jit(function: Callable) -> Callable:
    """A kernel, compiled once per state of our sources and cached on disk where that is possible."""
    kernel = njit(nogil=True, error_model="numpy", fastmath=FAST, no_cfunc_wrapper=True)(function)
    cache = cache_of(function)
    if cache is not None and hasattr(kernel, "_cache"):  # where Numba would put its own
        kernel._cache = cache
    return kernel


def part(function: Callable) -> Callable:
    """What kernels call: compiled into each of them, and not for itself, which halves the time that takes.

    It must not make, keep or return arrays, but for views while it runs: nobody counts here who holds them, which may cost more
    than what is done with them.
    """
    return njit(error_model="numpy", fastmath=FAST, **_INLINE)(function)


def exact_part(function: Callable) -> Callable:
    """The same with every operation rounded as it is written, but for ``simd.fma``; where it matters where a sum ends up.

    Said aloud, since a callee inherits its caller's ``fastmath``; and operators of lanes have that of the part they are in.
    """
    return njit(error_model="numpy", fastmath=False, **_INLINE)(function)


def array_part(function: Callable) -> Callable:
    """A part that does make or return arrays; for kernels alone to call."""
    return njit(error_model="numpy", **_WITHIN)(function)


def called_part(function: Callable) -> Callable:
    """A part with a function of its own: what else a kernel does then leaves the code of its inner loops alone."""
    return njit(error_model="numpy", fastmath=FAST, **_WITHIN)(function)


def run(kernel: Callable, size: int, *args, grain: int = 1, slices_per_thread: int = 4) -> None:
    """Call ``kernel(start, stop, *args)`` over slices of ``range(size)`` of at least `grain`; slices must write apart."""
    threads = min(torch.get_num_threads(), -(-size // grain))
    if threads <= 1:
        if size:
            kernel(0, size, *args)
        return
    step = max(grain, -(-size // (threads * slices_per_thread)))
    starts = iter(range(0, size, step))  # next() is atomic, so this is a queue that all threads share
    held = [args]  # and dropped at the end: a thread of the pool may remember `work` for longer
    problems: list[BaseException] = []

    def work(_=None) -> None:
        try:
            for start in starts:
                kernel(start, min(size, start + step), *held[0])
        except BaseException as problem:  # which C would not hand on
            problems.append(problem)

    if _openmp is not None:
        _openmp(_Work(work), None, threads, 0)
    else:
        others = [_pool(torch.get_num_threads() - 1).submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            if not other.cancel():  # one that has not begun has nothing left to do, and may wait for strangers' work
                other.result()
    held.clear()
    if problems:
        raise problems[0]


class _Memory(ctypes.c_char * (1 << 62)):  # type: ignore[misc]  # bytes from an address on; arrays cut off what is theirs
    owner: Tensor


NUMPY = {getattr(torch, kind): np.dtype(kind) for kind in ("float32", "float64", "int32", "int64")}


def array(x: Tensor) -> np.ndarray:
    """The elements of `x`, as kernels see them; the array keeps them alive.

    ``x.numpy()`` would make the storage of `x` one that can never be resized, which FSDP does to parameters after every use and
    ``out=`` to results. So the memory is read by its address, and nothing of the tensor changes.
    """
    memory = _Memory.from_address(x.data_ptr())
    memory.owner = x
    if x.is_contiguous():
        return np.ndarray(x.shape, NUMPY[x.dtype], memory)
    return np.ndarray(x.shape, NUMPY[x.dtype], memory, strides=[step * x.itemsize for step in x.stride()])


def viewer(shape: Sequence[int], dtype: torch.dtype) -> Callable[[Tensor], np.ndarray]:
    """:func:`array` of contiguous tensors that have as many elements of this dtype as `shape` has."""
    shape, kind = tuple(shape), NUMPY[dtype]

    def view(x: Tensor) -> np.ndarray:
        memory = _Memory.from_address(x.data_ptr())
        memory.owner = x
        return np.ndarray(shape, kind, memory)

    return view


_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_openmp() -> Callable[..., None] | None:
    """``GOMP_parallel(work, data, threads, flags)`` of the OpenMP that torch has loaded, GNU's or one that has its names."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # macOS and Windows
        return None
    found.argtypes, found.restype = [_Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


@lru_cache(1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads of our own, where OpenMP is not to be had."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sonde")


def _forked() -> None:
    """The parent's threads do not exist in a child, and OpenMP would wait for them for ever."""
    global _openmp
    _openmp = None
    _pool.cache_clear()


_openmp = _find_openmp()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
