"""Where results of CPU kernels lie: in the memory of earlier ones, else on large pages where Linux gives them.

A page that the system has just handed out is cleared by it first, and on virtual machines asked of the host: of the gradient of
45 MB that a decoder's backward pass makes, that takes thirteen of twenty-one milliseconds. So the storages of late results are
kept, ``ROOM`` bytes at most, and one that has no other owner left becomes that of the next result of its size. It is an ordinary
storage that can be resized, shared or freed by whoever has the result; what is no longer as it was made is not used again.
Since storages come back, the identity of a storage does not tell one result from a later one.
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
SMALLEST = 1 << 16  # bytes of a result; the C library keeps smaller pieces itself
LARGE_PAGE = 1 << 21


class Kept:
    """A storage that may be used again, once it has no more owners, in C++ and in Python, than before its first result."""

    def __init__(self, size: int) -> None:
        self.storage, self.size = _on_large_pages(torch.empty(size, dtype=torch.uint8, device="cpu")).untyped_storage(), size
        self.alone = self._owners()

    def _owners(self) -> tuple[int, int]:
        return storage_owners(self.storage), sys.getrefcount(self.storage)

    def is_unowned(self) -> bool:
        return self._owners() == self.alone

    def is_as_made(self) -> bool:
        """False once it was resized, shared with another process, or read by NumPy, after which nobody can resize it."""
        return self.storage.nbytes() == self.size and self.storage.resizable() and not self.storage.is_shared()


_kept: deque[Kept] = deque(maxlen=16)


def allocator_of(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """What allocates uninitialised tensors of this shape and these strides, which leave no gaps."""
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
    """Kernels see one dtype and one layout only, and so compile once for each dtype. By one copy at most."""
    x = x.detach()
    return x if is_dense(x, wide) else empty(x.shape, wide).copy_(x)


def is_dense(x: Tensor, wide: torch.dtype) -> bool:
    return x.dtype == wide and x.is_contiguous()


def forget() -> None:
    """Give back what is kept."""
    _kept.clear()


def _unowned(size: int) -> Kept | None:
    """One of this size that nobody has. It is taken out before it is looked at, so that no other thread has it."""
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
    except IndexError:  # other threads were quicker
        return None


def _on_large_pages(found: Tensor) -> Tensor:
    """If there are any: small ones take four times as long to come, and ten to go."""
    if _madvise is not None and found.nbytes >= 2 * LARGE_PAGE:
        start = -(-found.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        stop = (found.data_ptr() + found.nbytes) // LARGE_PAGE * LARGE_PAGE
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # advice: whether it is taken is seen in the time alone
    return found


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE") or _gives_pages_back():  # the former: elsewhere than on Linux
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _gives_pages_back(order: Path = Path("/sys/module/page_reporting/parameters/page_reporting_order")) -> bool:
    """Whether this is a virtual machine that hands free large pages to its host, and waits milliseconds for each to come back."""
    try:
        return 0 <= int(order.read_text()) <= 10  # 9 is that of 2 MiB; out of bounds where nothing asks for them
    except (OSError, ValueError):
        return False


_madvise = _find_madvise()
