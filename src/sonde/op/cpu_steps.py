"""Passes on CPUs: a :class:`~sonde.jit.Pass` whose steps run Numba kernels on the memory of their slots.

A pass may depend on the number of threads (how many blocks the work is cut into, what each thread allocates), and torch's number
may change between two calls. So a pass is recorded once for each number of threads: :func:`by_threads`.
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
    """A kernel's argument: the contiguous memory of a slot, in this shape; None stands for the shape of each call's tensor."""

    slot: str
    shape: tuple[int, ...] | None


class CpuPass(Pass):
    """A pass whose buffers come from :mod:`~sonde.op.allocator`, which reuses the memory of earlier results."""

    def __init__(self, accumulator: torch.dtype, given: Mapping[str, Tensor | None]) -> None:
        super().__init__(CPU, accumulator, given)
        self.threads = torch.get_num_threads()

    def _allocator(self, like: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        return allocator.allocator_of(tuple(like.shape), tuple(like.stride()), dtype)

    def allocator(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
        """A function that allocates uninitialised, contiguous tensors, in the memory of earlier results."""
        return self._allocator(outline(shape), dtype)

    def dense(self, name: str, dtype: torch.dtype, part: Callable[[Tensor], Tensor] | None = None) -> str:
        """An argument, or `part` of it, as a contiguous tensor of this dtype; it is copied if it is not one already."""
        t = self.given[name]
        assert t is not None
        t = t if part is None else part(t)
        if allocator.is_dense(t, dtype):
            return name if part is None else self.view(name, name, part)

        new = self.allocator(t.shape, dtype)

        def make(x: Tensor) -> Tensor:
            x = x.detach()
            return new().copy_(x if part is None else part(x))

        return self.derive(f"{name} copied", name, make, t.shape, dtype)

    def derive(self, name: str, of: str | None, make: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype) -> str:
        """A buffer of this shape, made by `make` from another slot or from nothing."""
        return self._add(name, Slot(dtype, prod(shape) * dtype.itemsize, make, of))

    def run(
        self, kernel: Callable, items: int, args: Sequence[Any], *, grain: int = 1, slices_per_thread: int = 4,
        writes: Sequence[str] = (), scratch: int = 0, promise: Determinism = Determinism.BATCH_INVARIANT,
        accumulator: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Add a step that calls ``op.cpu.run(kernel, items, *args)``; `scratch` is what each thread allocates, in bytes.

        An :class:`Array` among `args` stands for the memory of a slot, a string for the object in a slot, say a NumPy array.
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
        """A slot with the same numbers in this dtype."""
        if self.slots[slot].dtype == dtype:
            return slot
        (found,) = self.call("torch.to", lambda x: x.to(dtype), [slot], [(f"{slot} rounded", shape, dtype)])
        return found


def _seen(x: str | Array, slots: dict[str, Slot]) -> tuple[str, Callable[[Tensor], Any] | None]:
    if isinstance(x, str):
        return x, None
    return x.slot, cpu.array if x.shape is None else cpu.viewer(x.shape, slots[x.slot].dtype)


class ByThreads:
    """A pass that is recorded once for each number of threads."""

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
    """Decorate a function that records a pass. It gets tensors without memory, so that a recorded pass keeps none alive."""

    @wraps(record)
    def anew(*args: Any, **how: Any) -> ByThreads:
        return ByThreads(partial(record, *[outline_of(x) if isinstance(x, Tensor) else x for x in args], **how))

    return anew
