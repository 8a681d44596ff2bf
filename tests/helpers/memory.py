"""Memory that exposes wrong accesses: any layout, red zones around inputs, poisoned and fenced outputs; and what is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.operators import tuple_of
from helpers.spies import around
from sonde.op import allocator, torch_private
from sonde.op.cache import forget_calls
from sonde.operators import Operator

LAYOUTS = ("contiguous", "channels_last", "reversed", "sliced", "misaligned", "expanded", "padded_rows")


def restride(t: Tensor, layout: str) -> Tensor:
    """The values of `t` in another memory layout (``expanded``: those of its first row, in every row)."""
    if layout == "channels_last" and t.ndim == 4:
        return t.contiguous(memory_format=torch.channels_last)
    if layout == "reversed":
        return t.permute(*range(t.ndim)[::-1]).contiguous().permute(*range(t.ndim)[::-1])
    if layout == "sliced":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan, dtype=t.dtype, device=t.device)
        return wide[..., 1::2].copy_(t)
    if layout == "misaligned":
        flat = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
        return flat[1:].view(t.shape).copy_(t)
    if layout == "expanded":
        return t[:1].expand(t.shape) if t.shape[0] else t
    if layout == "padded_rows" and t.ndim > 1:
        wide = torch.full((*t.shape[:-2], t.shape[-2] + 1, t.shape[-1] + 3), torch.nan, dtype=t.dtype, device=t.device)
        return wide[..., 1:, 2 : 2 + t.shape[-1]].copy_(t)
    return t.contiguous()


def redzone(t: Any, pad: int = 64) -> Any:
    """The same values and strides in the middle of a NaN buffer, so that a stray read poisons the result."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    buffer = torch.full((span + 2 * pad,), torch.nan, dtype=t.dtype, device=t.device)
    if span:
        buffer[pad : pad + span] = t.as_strided((span,), (1,))  # gaps and all, since elements may share memory
    return buffer.as_strided(t.shape, t.stride(), pad)


@contextmanager
def poisoned(pad: int = 64) -> Iterator[None]:
    """Uninitialised memory is NaN (or an absurd integer) and fenced: reading it shows in results, writing past it is an error."""
    fences = []

    def fence(t: Tensor) -> Tensor:
        if t.device.type == "meta" or t.layout is not torch.strided or type(t) is not Tensor:
            return t
        bad = (
            torch.nan
            if t.is_floating_point() or t.is_complex()
            else (True if t.dtype is torch.bool else torch.iinfo(t.dtype).max // 2)
        )
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
        buffer = torch.full((span + 2 * pad,), bad, dtype=t.dtype, device=t.device)
        fences.append((buffer, span, bad))
        return buffer.as_strided(t.shape, t.stride(), pad)

    forget_calls()  # what was decided has found its functions
    reused, allocator.CAN_COUNT_OWNERS = allocator.CAN_COUNT_OWNERS, False
    owners: list[tuple] = [(torch, n) for n in ("empty", "empty_like", "empty_strided")]
    owners += [(Tensor, n) for n in ("new_empty", "new_empty_strided")]
    owners += [(torch_private, n) for n in ("_empty_strided_cpu", "_empty_strided_cuda") if getattr(torch_private, n)]
    before = [(owner, n, n in vars(owner), getattr(owner, n)) for owner, n in owners]
    for owner, n, _, real in before:
        setattr(owner, n, lambda *a, _real=real, **k: fence(_real(*a, **k)))
    try:
        yield
    finally:
        for owner, n, own, real in before:
            if own:
                setattr(owner, n, real)
            else:
                delattr(owner, n)
        allocator.CAN_COUNT_OWNERS = reused
        forget_calls()
    for buffer, span, bad in fences:
        edges = torch.cat([buffer[:pad], buffer[pad + span :]])
        intact = edges.isnan() if bad != bad else edges == bad
        assert intact.all(), f"wrote outside a tensor of {span} elements"


class Allocations(TorchDispatchMode):
    """Bytes of every new storage that a function allocates, and the most that were alive at one time.

    Storages are watched by torch's own weak references. With torch 2.9 Python's are cleared too early: where a storage's
    Python object belongs to a reference cycle, as in Triton's interpreter, the collector clears them while the memory lives on.
    """

    def __init__(self):
        super().__init__()
        self.sizes: list[tuple[str, int]] = []
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.peak = self.returned = 0

    def __enter__(self):
        gc.freeze()  # what lives already need not be searched again and again
        return super().__enter__()

    def __exit__(self, *problem):
        gc.unfreeze()
        return super().__exit__(*problem)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tuple_of(out):
            if isinstance(t, Tensor) and "set_" not in str(func) and t.untyped_storage().data_ptr() not in seen:
                storage = t.untyped_storage()
                gc.collect()  # the interpreter leaves its arguments to the collector
                self.sizes.append((str(func), storage.nbytes()))
                self.alive = [each for each in self.alive if not each[0].expired()]
                self.alive.append((StorageWeakRef(storage), storage.nbytes()))
                self.peak = max(self.peak, sum(size for _, size in self.alive))
        return out


def allocations(monkeypatch, operator: Operator, impl: str) -> list[Allocations]:
    """What the kernels' launchers allocate, call by call."""
    found: list[Allocations] = []

    def watch(phase: str, run: Callable, *args, **keywords):
        with Allocations() as mode:
            out = run(*args)
            out = out if isinstance(out, Tensor) else tuple(out)
        mode.returned = sum(t.nbytes for t in tuple_of(out))
        found.append(mode)
        return out

    around(monkeypatch, operator.kernels(impl), watch)
    for device in ("cpu", "cuda"):  # no mode sees what these do
        monkeypatch.setattr(torch_private, f"_empty_strided_{device}", None)
    monkeypatch.setattr(allocator, "CAN_COUNT_OWNERS", False)  # nor memory that is used again
    return found
