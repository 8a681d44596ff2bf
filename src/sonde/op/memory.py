"""Where results of CPU kernels lie: in the memory of earlier ones, else on large pages where Linux gives them.

A page that the system has just handed out is cleared by it first, and on virtual machines asked of the host: of the gradient of
45 MB that a decoder's backward pass makes, that takes thirteen of twenty-one milliseconds. So memory of late results is kept,
``ROOM`` bytes at most, and what has no other owner left becomes the next result of its size. A result has a storage of its own, a
slice of the one that is kept and that nobody else sees: whoever watches a storage sees it go. (It can not grow, as no slice can.)
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

ROOM = 1 << 27
SMALLEST = 1 << 16  # bytes of a result; the C library keeps smaller pieces itself
LARGE_PAGE = 1 << 21
_kept: deque[torch.UntypedStorage] = deque(maxlen=16)
_owners: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def empty(shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    size = prod(shape) * dtype.itemsize
    if _owners is None or not SMALLEST <= size <= ROOM:
        return _fresh(shape, dtype, memory_format)
    storage = _nobodys(size)
    if storage is None:
        storage = _fresh((size,), torch.uint8).untyped_storage()
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    found = torch.empty(0, dtype=dtype, device="cpu").set_(storage[:], 0, tuple(shape), strides)  # type: ignore[call-overload]
    _kept.append(storage)
    while sum(one.nbytes() for one in _kept.copy()) > ROOM:
        _oldest()
    return found


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


def _nobodys(size: int) -> torch.UntypedStorage | None:
    """What is kept, has this size and no slice. It is taken out before it is looked at, so that no other thread has it."""
    for _ in range(len(_kept)):
        storage = _oldest()
        if storage is None:
            break
        if storage.nbytes() == size and _owners(storage._cdata) == 1:  # type: ignore[misc]
            return storage
        _kept.append(storage)
    return None


def _oldest() -> torch.UntypedStorage | None:
    try:
        return _kept.popleft()
    except IndexError:  # other threads were quicker
        return None


def _fresh(shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """On large pages, if there are any: small ones take four times as long to come, and ten to go."""
    found = torch.empty(shape, dtype=dtype, memory_format=memory_format, device="cpu")
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
