"""Passes on CPUs: :class:`~sonde.jit.Pass` with steps that run Numba kernels on the memory of their slots.

What a pass does may depend on the number of threads (into how many blocks work is cut, what each thread allocates), and torch's may
change between two calls, so a pass is recorded once for each number: :func:`by_threads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..jit.steps import Pass, Slot, Step
from . import allocator, cpu
from .layout import outline, outline_of
from .plan import Determinism, Kernel

CPU = torch.device("cpu")


class Array(NamedTuple):
    """An argument of a kernel: the memory of a slot, which is contiguous, in this shape; None: in that of each call's tensor."""

    slot: str
    shape: tuple[int, ...] | None


class CpuPass(Pass):
    """Buffers are allocated by :mod:`~sonde.op.allocator`: in the memory of earlier results."""

    def __init__(self, accumulator: torch.dtype, given: Mapping[str, Tensor | None]) -> None:
        super().__init__(CPU, accumulator, given)
        self.threads = torch.get_num_threads()

    def _allocator(self, like: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        return allocator.allocator_of(tuple(like.shape), tuple(like.stride()), dtype)

    def dense(self, name: str, dtype: torch.dtype, part: Callable[[Tensor], Tensor] | None = None) -> str:
        """An argument, or `part` of it, contiguous and of this dtype: where it is neither, a copy."""
        t = self.given[name]
        assert t is not None
        t = t if part is None else part(t)
        if allocator.is_dense(t, dtype):
            return name if part is None else self.view(name, name, part)

        new = self._allocator(outline(t.shape), dtype)

        def make(x: Tensor) -> Tensor:
            x = x.detach()
            return new().copy_(x if part is None else part(x))

        return self.derive(f"{name} copied", name, make, t.shape, dtype)

    def derive(self, name: str, of: str | None, make: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype) -> str:
        """A buffer of this shape that `make` makes, from another slot or from nothing."""
        return self._add(name, Slot(dtype, prod(shape) * dtype.itemsize, make, of))

    def run(
        self, kernel: Callable, items: int, args: Sequence[Any], *, grain: int = 1, slices_per_thread: int = 4,
        writes: Sequence[str] = (), scratch: int = 0, promise: Determinism = Determinism.BATCH_INVARIANT,
        accumulator: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """``op.cpu.run(kernel, items, *args)``; `scratch` are the bytes that the kernel allocates in each thread.

        Of `args`, an :class:`Array` is the memory of a slot, and a string what is in a slot itself, say a NumPy array.
        """
        places = [(i, *_seen(x, self.slots)) for i, x in enumerate(args) if isinstance(x, (str, Array))]

        def launch(*found: Any) -> None:
            values = list(args)
            for (i, _, view), x in zip(places, found):
                values[i] = x if view is None else view(x)
            cpu.run(kernel, items, *values, grain=grain, slices_per_thread=slices_per_thread)

        busy = max(1, min(self.threads, -(-items // grain)))
        takes = tuple(slot for _, slot, _ in places)
        step = Step(kernel.__name__, takes, lambda _: launch, (), tuple(writes), promise, busy * scratch, accumulator)
        self.steps.append(step)

    def rounded(self, slot: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """The same numbers in this dtype."""
        if self.slots[slot].dtype == dtype:
            return slot
        (found,) = self.call("torch.to", lambda x: x.to(dtype), [slot], [(f"{slot} rounded", shape, dtype)])
        return found


def _seen(x: str | Array, slots: dict[str, Slot]) -> tuple[str, Callable[[Tensor], Any] | None]:
    if isinstance(x, str):
        return x, None
    return x.slot, cpu.array if x.shape is None else cpu.viewer(x.shape, slots[x.slot].dtype)


class ByThreads:
    """A pass that is recorded once for each number of threads that it runs with."""

    def __init__(self, record: Callable[[], Pass]) -> None:
        self.record = record

    def bind(self) -> Callable[..., Any]:
        bound: dict[int, Callable[..., Any]] = {}
        record, count = self.record, torch.get_num_threads

        def run(*args: Any) -> Any:
            threads = count()
            found = bound.get(threads)
            if found is None:
                found = bound[threads] = record().bind()
            return found(*args)

        return run

    def plan(self, phase: Literal["forward", "backward"]) -> list[Kernel]:
        return self.record().plan(phase)


def by_threads(record: Callable[..., Pass]) -> Callable[..., ByThreads]:
    """Decorates what records a pass. It sees shapes, strides and dtypes of tensors alone, so nothing keeps their memory."""

    @wraps(record)
    def anew(*args: Any, **how: Any) -> ByThreads:
        return ByThreads(partial(record, *[outline_of(x) if isinstance(x, Tensor) else x for x in args], **how))

    return anew
