"""Bounds checks for interpreted kernels: every address that a kernel reads or writes must lie in a tensor that it was given.

On a GPU such a read usually finds another tensor's memory, so results stay right and only a sanitizer notices. A kernel that leaves
one of its tensors and lands in another of them is not found.
"""

from __future__ import annotations

import numpy as np
import torch


def check_bounds() -> None:
    """Let the interpreter raise an ``IndexError`` at the first access outside a launch's tensors, masked lanes excepted."""
    from triton.runtime import interpreter

    plain, begin = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
    launched = Launched()

    def begin_launch(self, args, keywords):
        given = begin(self, args, keywords)
        launched.begin(self.fn.__name__, given)
        return given

    class Checked:
        """The interpreter's memory accesses, each checked before it is made."""

        def load(self, pointers, mask, other, dtype):
            launched.check("reads", pointers, mask, np.dtype(dtype).itemsize)
            return plain.load(pointers, mask, other, dtype)

        def store(self, pointers, value, mask):
            launched.check("writes", pointers, mask, value.dtype.itemsize)
            return plain.store(pointers, value, mask)

        def atomic_rmw(self, operation, pointers, value, mask, order):
            launched.check("updates", pointers, mask, value.dtype.itemsize)
            return plain.atomic_rmw(operation, pointers, value, mask, order)

        def __getattr__(self, name):
            return getattr(plain, name)

    interpreter.GridExecutor._init_args_hst = begin_launch
    interpreter._interpreter = Checked()


class Launched:
    """The kernel that runs now, and where its tensors begin and end in memory."""

    def begin(self, kernel: str, given: object) -> None:
        self.kernel = kernel
        places = {extent(tensor) for tensor in tensors_of(given)}
        self.places = sorted((first, last) for first, last in places if first < last)

    def check(self, does: str, pointers: np.ndarray, mask: np.ndarray, width: int) -> None:
        mask = np.asarray(mask).astype(bool, copy=False)
        found = pointers if mask.all() else pointers[np.broadcast_to(mask, pointers.shape)]
        if not found.size:
            return
        low, high = int(found.min()), int(found.max()) + width
        if any(first <= low and high <= last for first, last in self.places):
            return
        inside = np.zeros(found.shape, bool)
        for first, last in self.places:
            inside |= (first <= found) & (found + np.uint64(width) <= last)
        if not inside.all():
            raise IndexError(f"{self.kernel} {does} outside its tensors: {(~inside).sum()} of {found.size} addresses")


def tensors_of(given: object) -> list:
    """All tensors among a kernel's arguments, those behind descriptors too."""
    if isinstance(given, dict):
        given = tuple(given.values())
    if isinstance(given, (tuple, list)):
        return [tensor for each in given for tensor in tensors_of(each)]
    if hasattr(given, "block_shape"):
        given = given.base
    return [given] if hasattr(given, "data_ptr") else []


def extent(tensor) -> tuple[int, int]:
    storage: torch.UntypedStorage = getattr(tensor, "base", tensor).untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
