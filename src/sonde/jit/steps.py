"""A pass: an operator's forward or backward, recorded once as steps over named slots and read twice.

:meth:`Pass.bind` returns the function that runs the steps; :meth:`Pass.plan` lists the kernels for ``explain``. Both read the
same record, so names, order, bytes and promises are stated in one place.

A slot is an argument, a buffer that the pass allocates, or a view of another slot. A buffer is allocated before the first step
that takes it and freed after the last one, unless it is returned; a plan computes each step's memory use from these lifetimes.
Binding turns names into positions, so that running a step costs one ``itemgetter`` and the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..op.layout import outline
from ..op.plan import Determinism, Kernel
from ..op.torch_private import empty_strided
from .kernel import Launch, Tunable, dtypes_of

Names = Sequence[str | None]


@dataclass
class Slot:
    dtype: torch.dtype
    nbytes: int = 0  # memory that the pass owns while the slot is in use: none for arguments and views
    make: Callable[..., Tensor] | None = None  # allocates the buffer, or derives it from the slot `source`
    source: str | None = None
    is_view: bool = False  # shares the memory of `source`


@dataclass
class Step:
    """One kernel launch, or one call of torch."""

    title: str  # the name that a profiler shows
    takes: tuple[str | None, ...]  # the slots it is called with, in order
    start: Callable[[tuple[Any, ...]], Callable[..., Any]]  # from the first tensors, the function that runs on these and later ones
    gives: tuple[str, ...] = ()  # slots that it allocates itself and returns
    writes: tuple[str, ...] = ()  # the operator's results that it computes
    promise: Determinism = Determinism.BATCH_INVARIANT
    scratch: int = 0  # bytes of temporary memory that it allocates while it runs
    accumulator: torch.dtype | None = None  # where it differs from the pass's
    kernel: Tunable | None = None  # set where there is a choice of configurations
    problem: Any = None

    def chosen(self, dtypes: Sequence[torch.dtype | None], device: torch.device) -> tuple[Any, ...]:
        """For a plan: the configuration that would run, its origin, the number of candidates and the store's key."""
        if self.kernel is None:
            return ()
        config, *about = self.kernel.choose(self.problem, dtypes_of(dtypes), device)
        return str(config), *about


class Moment(NamedTuple):
    """One step, with the slots that are allocated right before it and freed right after."""

    step: Step
    made: list[str]
    freed: list[str]


@dataclass
class Pass:
    """Record with :meth:`buffer`, :meth:`launch`, :meth:`start` and :meth:`call`; :meth:`returns` names the results."""

    device: torch.device
    accumulator: torch.dtype
    given: Mapping[str, Tensor | None]  # the arguments in order; only shape, strides and dtype of tensors are read
    steps: list[Step] = field(default_factory=list)
    results: tuple[str, ...] = ()
    single: bool = False  # return a tensor, not a tuple of one

    def __post_init__(self) -> None:
        self.slots = {name: Slot(t.dtype) for name, t in self.given.items() if t is not None}

    # ---- recording

    def buffer(self, name: str, like: Tensor | Sequence[int], dtype: torch.dtype, fill: float | None = None) -> str:
        """A tensor of this shape (and these strides, if `like` is a tensor), uninitialised or filled; returns its slot."""
        like = like if isinstance(like, Tensor) else outline(like)
        new = self._allocator(like, dtype)
        make = new if fill is None else (lambda: new().fill_(fill)) if fill else (lambda: new().zero_())
        return self._add(name, Slot(dtype, extent(like) * dtype.itemsize, make))

    def _allocator(self, like: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        return allocator(like, dtype, self.device)

    def outside(self, name: str, dtype: torch.dtype, find: Callable[[], Tensor]) -> str:
        """A tensor that outlives the pass; `find` is called on every run."""
        return self._add(name, Slot(dtype, 0, find))

    def view(self, name: str, of: str, make: Callable[[Tensor], Tensor]) -> str:
        """Another view of a slot's memory."""
        return self._add(name, Slot(self.slots[of].dtype, 0, make, of, True))

    def rows(self, slot: str, start: int, stop: int) -> str:
        return self.view(slot, slot, lambda t: t[start:stop])

    def contiguous(self, name: str) -> str | None:
        """The argument of this name, copied if it is not contiguous; None if it was not given."""
        t = self.given.get(name)
        if t is None or t.is_contiguous():
            return None if t is None else name
        return self.copy(name, Tensor.contiguous)

    def copy(self, name: str, make: Callable[[Tensor], Tensor]) -> str:
        """A copy of an argument, made by `make`, with the same number of elements."""
        t = self.given[name]
        assert t is not None
        if f"{name} copied" in self.slots:
            return f"{name} copied"
        return self._add(f"{name} copied", Slot(t.dtype, t.numel() * t.element_size(), make, name))

    def launch(
        self, kernel: Tunable, problem: Any, takes: Names, *, writes: Sequence[str] = (),
        promise: Determinism = Determinism.BATCH_INVARIANT, accumulator: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel in the configuration that the policy chooses for this problem."""
        start = partial(kernel.bind, problem)
        self.steps.append(Step(kernel.title, tuple(takes), start, (), tuple(writes), promise, 0, accumulator, kernel, problem))

    def start(
        self, function: Any, takes: Names, launch: Launch, *, writes: Sequence[str] = (),
        promise: Determinism = Determinism.BATCH_INVARIANT,
    ) -> None:  # fmt: skip
        """Launch a kernel without a choice of configurations; records nothing if the grid is empty."""
        if 0 in launch.grid:
            return

        def start(tensors: tuple[Any, ...]) -> Callable[..., None]:
            from .launch import bind  # which imports Triton

            return bind(function, tensors, launch)

        self.steps.append(Step(function.__name__, tuple(takes), start, (), tuple(writes), promise))

    def call(
        self, title: str, function: Callable[..., Any], takes: Names, gives: Sequence[tuple[str, Sequence[int], torch.dtype]] = (),
        *, writes: Sequence[str] = (), promise: Determinism = Determinism.BATCH_INVARIANT, scratch: int = 0,
    ) -> tuple[str, ...]:  # fmt: skip
        """Call a torch function on the slots it `takes`; its results go to new slots, described by `gives`."""
        made = tuple(self._add(name, Slot(dtype, prod(shape) * dtype.itemsize)) for name, shape, dtype in gives)
        self.steps.append(Step(title, tuple(takes), lambda _: function, made, tuple(writes), promise, scratch))
        return made

    def returns(self, *names: str) -> Pass:
        self.results = names
        return self

    def returning_one(self) -> Pass:
        """For an operator whose result is one tensor, not a tuple."""
        self.single = True
        return self

    def _add(self, name: str, slot: Slot) -> str:
        unique, n = name, 1
        while unique in self.slots or unique in self.given:
            n += 1
            unique = f"{name} {n}"
        self.slots[unique] = slot
        return unique

    # ---- reading

    def _chain(self, name: str | None) -> list[str]:
        """The slot and the slots that it is a view of, down to the one that owns the memory."""
        found = []
        while name is not None and name in self.slots:
            found.append(name)
            slot = self.slots[name]
            name = slot.source if slot.is_view else None
        return found

    def moments(self) -> Iterator[Moment]:
        """The steps in order, with the lifetimes of buffers."""
        last: dict[str, int] = {}
        derived: set[str] = set()
        for i, step in enumerate(self.steps):
            for taken in (*step.takes, *step.gives):
                name = taken
                while chain := self._chain(name):
                    last.update(dict.fromkeys(chain, i))
                    if chain[-1] in derived:
                        break
                    derived.add(chain[-1])
                    name = self.slots[chain[-1]].source  # its source must live as long
        kept = {name for result in self.results for name in self._chain(result)}
        idle = [name for name in self.results if name not in last]  # empty results, which no step touches
        made = set(self.given)
        for i, step in enumerate(self.steps):
            new: list[str] = []
            for taken in (*step.takes, *(() if i else idle)):
                name, ahead = taken, []  # sources come before what is derived from them
                while name is not None and name in self.slots and name not in made and self.slots[name].make is not None:
                    made.add(name)
                    ahead.append(name)
                    name = self.slots[name].source
                new += ahead[::-1]
            freed = [name for name, at in last.items() if at == i and name not in kept and name not in self.given]
            yield Moment(step, new, freed)

    def bind(self) -> Callable[..., Any]:
        """The function that runs the steps. It takes the arguments and ignores any that follow them."""
        order = [*self.given, *(name for name in self.slots if name not in self.given)]
        at = {name: i for i, name in enumerate(order)}
        count, blank = len(self.given), [None] * (len(order) - len(self.given) + 1)  # the last one stays None
        program: list[Callable[[list[Any]], None]] = []
        moments = list(self.moments())
        if not moments:
            program += [_make(at[name], self.slots[name], at) for name in self.results]
        for i, (step, made, freed) in enumerate(moments):
            program += [_make(at[name], self.slots[name], at) for name in made]
            takes = [at[name] if name is not None and name in self.slots else -1 for name in step.takes]
            program.append(_Run(step, takes, [at[name] for name in step.gives]))
            if freed and any(later.made or later.step.gives or later.step.scratch for later in moments[i + 1 :]):
                program.append(_free([at[name] for name in freed]))
        results, single = [at[name] for name in self.results], self.single  # `run` must not capture self, which holds arguments

        def run(*args: Any) -> Any:
            slots = [*args[:count], *blank]
            for operation in program:
                operation(slots)
            return slots[results[0]] if single else tuple([slots[i] for i in results])

        return run

    def plan(self, phase: Literal["forward", "backward"]) -> list[Kernel]:
        """The kernels that :meth:`bind` launches, in order, with the bytes in use beyond arguments and results during each."""
        found, held = [], 0
        returned = sum(self.slots[name].nbytes for result in self.results for name in self._chain(result))
        for step, made, freed in self.moments():
            held += sum(self.slots[name].nbytes for name in (*made, *step.gives))
            dtypes = [self.slots[name].dtype if name in self.slots else None for name in step.takes]
            chosen = step.chosen(dtypes, self.device)
            workspace = max(0, held + step.scratch - returned)
            wide = step.accumulator or self.accumulator
            found.append(Kernel(step.title, step.writes, wide, step.promise, workspace, phase, *chosen))
            held -= sum(self.slots[name].nbytes for name in freed)
        return found

    def find(self, title: str) -> Step:
        """The first step with this title."""
        return next(step for step in self.steps if step.title == title)


class _Run:
    """A step bound to its slots; it is compiled when it first runs."""

    __slots__ = ("gives", "run", "start", "take")

    def __init__(self, step: Step, takes: list[int], gives: list[int]) -> None:
        self.take = itemgetter(*takes) if len(takes) > 1 else _take_one(takes[0])
        self.start, self.gives = step.start, gives
        self.run: Callable[..., Any] | None = None

    def __call__(self, slots: list[Any]) -> None:
        taken = self.take(slots)
        if self.run is None:
            self.run = self.start(taken)
        out = self.run(*taken)
        if self.gives:
            for i, tensor in zip(self.gives, out if isinstance(out, (tuple, list)) else (out,)):
                slots[i] = tensor


def _take_one(i: int) -> Callable[[list[Any]], tuple[Any, ...]]:
    return lambda slots: (slots[i],)


def _make(i: int, slot: Slot, at: dict[str, int]) -> Callable[[list[Any]], None]:
    make, source = slot.make, None if slot.source is None else at[slot.source]
    assert make is not None
    if source is None:

        def allocate(slots: list[Any]) -> None:
            slots[i] = make()

        return allocate

    def derive(slots: list[Any]) -> None:
        slots[i] = make(slots[source])

    return derive


def _free(places: list[int]) -> Callable[[list[Any]], None]:
    def free(slots: list[Any]) -> None:
        for i in places:
            slots[i] = None

    return free


def allocator(like: Tensor, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that allocates uninitialised tensors of this shape and these strides, in half the time of ``torch.empty``.

    They are allocated on the current device of that type.
    """
    size, strides = tuple(like.shape), tuple(like.stride())
    make = empty_strided(device.type)
    return partial(make, size, strides, dtype) if make else partial(torch.empty_strided, size, strides, dtype=dtype, device=device)


def extent(like: Tensor) -> int:
    """The number of elements that a tensor of this shape and these strides spans in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride())) if like.numel() else 0
