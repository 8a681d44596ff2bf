"""Allocates the results of CPU kernels: in the memory of earlier results, else on large pages where Linux grants them.

The system clears every new page before it hands it out, and a virtual machine asks its host for it. For the 45 MB gradient of a
decoder's backward pass that takes 13 of 21 ms. So recent storages are cached, at most ``ROOM`` bytes of them, and one that has no
other owner left is reused for the next result of its size. It is an ordinary storage: users may resize, share or free it, and a
storage that was changed in this way is not reused. Because storages are reused, two results at different times may have the same
storage.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .torch_private import CAN_COUNT_OWNERS, empty_strided, storage_owners

ROOM = 1 << 27
SMALLEST = 1 << 16  # bytes of a result; the C library caches smaller pieces itself
LARGE_PAGE = 1 << 21


class Kept:
    """A storage that may be reused once it has no more owners, in C++ and in Python, than before its first result."""

    def __init__(self, size: int) -> None:
        self.storage, self.size = _on_large_pages(torch.empty(size, dtype=torch.uint8, device="cpu")).untyped_storage(), size
        self.alone = self._owners()

    def _owners(self) -> tuple[int, int]:
        return storage_owners(self.storage), sys.getrefcount(self.storage)

    def is_unowned(self) -> bool:
        return self._owners() == self.alone

    def is_as_made(self) -> bool:
        """False once it was resized, shared with another process, or read by NumPy, after which it cannot be resized."""
        return self.storage.nbytes() == self.size and self.storage.resizable() and not self.storage.is_shared()


_kept: deque[Kept] = deque(maxlen=16)


def allocator_of(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """A function that allocates uninitialised tensors of this shape and these strides; the strides must leave no gaps."""
    shape, strides, size = tuple(shape), tuple(strides), prod(shape) * dtype.itemsize
    if not CAN_COUNT_OWNERS or not SMALLEST <= size <= ROOM:
        make = empty_strided("cpu") or _empty_strided
        fresh = partial(make, shape, strides, dtype)
        return fresh if size < 2 * LARGE_PAGE else lambda: _on_large_pages(fresh())

    def again() -> Tensor:
        kept = _unowned(size) or Kept(size)
        found = torch.empty(0, dtype=dtype, device="cpu").set_(kept.storage, 0, shape, strides)
        _kept.append(kept)
        while sum(one.size for one in _kept.copy()) > ROOM:
            _oldest()
        return found

    return again


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def empty(shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    strides = torch.empty(tuple(shape), device="meta", memory_format=memory_format).stride()
    return allocator_of(shape, strides, dtype)()


def zeros(shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return empty(shape, dtype, memory_format).zero_()


def dense(x: Tensor, wide: torch.dtype) -> Tensor:
    """`x` as a contiguous tensor of dtype `wide`, copied at most once. Kernels see one layout, so they compile once per dtype."""
    x = x.detach()
    return x if is_dense(x, wide) else empty(x.shape, wide).copy_(x)


def is_dense(x: Tensor, wide: torch.dtype) -> bool:
    return x.dtype == wide and x.is_contiguous()


def forget() -> None:
    """Release the storages that are kept."""
    _kept.clear()


def _unowned(size: int) -> Kept | None:
    """A kept storage of this size without owners. It leaves the queue before it is examined, so no other thread gets it."""
    for _ in range(len(_kept)):
        kept = _oldest()
        if kept is None:
            break
        if not kept.is_unowned():
            _kept.append(kept)
        elif kept.is_as_made():
            if kept.size == size:
                return kept
            _kept.append(kept)
    return None


def _oldest() -> Kept | None:
    try:
        return _kept.popleft()
    except IndexError:  # another thread took the last one
        return None


def _on_large_pages(found: Tensor) -> Tensor:
    """Ask for large pages if the tensor is large enough. Small pages take 4× as long to allocate and 10× as long to free."""
    if _madvise is not None and found.nbytes >= 2 * LARGE_PAGE:
        start = -(-found.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        stop = (found.data_ptr() + found.nbytes) // LARGE_PAGE * LARGE_PAGE
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # only advice: whether it is followed shows in the time alone
    return found


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE") or _gives_pages_back():  # only Linux has MADV_HUGEPAGE
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _gives_pages_back(order: Path = Path("/sys/module/page_reporting/parameters/page_reporting_order")) -> bool:
    """True on a virtual machine that returns free large pages to its host: getting one back takes milliseconds."""
    try:
        return 0 <= int(order.read_text()) <= 10  # order 9 is 2 MiB; other values mean that pages are not returned
    except (OSError, ValueError):
        return False


_madvise = _find_madvise()
