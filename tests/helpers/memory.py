"""Memory checks: those of ``sonde.testing.memory``, and a count of allocated bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.operators import tuple_of
from helpers.spies import around
from sonde.op import allocator, torch_private
from sonde.operators import Operator
from sonde.testing.memory import LAYOUTS, poisoned, redzone, restride

__all__ = ["LAYOUTS", "Allocations", "allocations", "poisoned", "redzone", "restride"]


class Allocations(TorchDispatchMode):
    """Bytes of every new storage that a function allocates, and the peak of those alive at one time.

    Storages are tracked by torch's own weak references. With torch 2.9 Python's are cleared too early: if a storage's
    Python object belongs to a reference cycle, as in Triton's interpreter, the collector clears them while the memory lives on.
    """

    def __init__(self):
        super().__init__()
        self.sizes: list[tuple[str, int]] = []
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.peak = self.returned = 0

    def __enter__(self):
        gc.freeze()  # existing objects need not be searched at every collection
        return super().__enter__()

    def __exit__(self, *problem):
        gc.unfreeze()
        return super().__exit__(*problem)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tuple_of(out):
            if not isinstance(t, Tensor) or t.is_meta:  # which has no memory: a pass is recorded with them
                continue
            if "set_" not in str(func) and t.untyped_storage().data_ptr() not in seen:
                storage = t.untyped_storage()
                gc.collect()  # the interpreter leaves its arguments to the garbage collector
                self.sizes.append((str(func), storage.nbytes()))
                self.alive = [each for each in self.alive if not each[0].expired()]
                self.alive.append((StorageWeakRef(storage), storage.nbytes()))
                self.peak = max(self.peak, sum(size for _, size in self.alive))
        return out


def allocations(monkeypatch, operator: Operator, impl: str) -> list[Allocations]:
    """Record what the kernels' launchers allocate, call by call."""
    found: list[Allocations] = []

    def watch(phase: str, run: Callable, *args, **keywords):
        with Allocations() as mode:
            out = run(*args)
            out = out if isinstance(out, Tensor) else tuple(out)
        mode.returned = sum(t.nbytes for t in tuple_of(out))
        found.append(mode)
        return out

    around(monkeypatch, operator.kernels(impl), watch)
    for device in ("cpu", "cuda"):  # a dispatch mode does not see these allocations
        monkeypatch.setattr(torch_private, f"_empty_strided_{device}", None)
    monkeypatch.setattr(allocator, "CAN_COUNT_OWNERS", False)  # nor would it see memory that is reused
    return found
