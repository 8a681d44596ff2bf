"""What a pass over a feature pyramid does: decided once for each kind of operands; the call and the plan both go by it.

Operands are ``(features, spatial_shapes, level_starts, locations, weights)``, of which the first, fourth and fifth have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import jit
from ...jit.kernel import Tunable
from ...op.cache import CallCache
from ...op.dtypes import accumulator
from ...op.gpu import outline, room, zeros
from ...op.plan import Determinism, Kernel
from .._device.fixed_point import finishing
from .._scatter.marked_rows import clear_marked, round_marked, rows_of
from .gpu_levels import Levels, layout_of, levels_of, table_of
from .gpu_segments import Problem as Segments
from .gpu_segments import launches, rows_gradient, workspace
from .levels import numbers


class Operator(NamedTuple):
    """What is an operator's own."""

    names: tuple[str, str, str]  # of the operands that have gradients
    shape: Callable[..., tuple[int, ...]]  # of the result, from features and weights
    problem: Callable[..., Any]  # of its kernels: from those, levels, layout, accumulator, flag, and of which gradients
    segments: Callable[..., Segments]  # from the same but the last
    value: Tunable
    gradients: Tunable
    total: Tunable | None = None  # adds up the slices that the problem may have
    mark: Tunable | None = None  # marks the rows of features that the gradients' kernel adds to, if those may be few
    soft: bool = False  # the flag means that weights are logits


class Forward(NamedTuple):
    levels: Levels
    told: list[Tensor]  # what kernels read of the levels, once it is there for good
    copies: tuple[int, ...]  # operands that are made contiguous
    shape: tuple[int, ...]
    room: Callable[[], Tensor]  # for the result
    parts: tuple[int, ...] | None  # of the sums that are added up afterwards
    wide: torch.dtype
    steps: tuple[jit.Step, ...]


class Backward(NamedTuple):
    levels: Levels
    told: list[Tensor]
    copies: tuple[int, ...]  # the result's gradient being the last
    rooms: tuple[Callable[[], Tensor] | None, ...]  # for gradients, of features (zeros, if nothing is marked), locations, weights
    wants: tuple[int, ...]  # of the kernel: 0 for features, 1 for locations, 2 for weights
    marks: Callable[[], Tensor] | None  # of the rows that the kernel adds to (zeros)
    steps: tuple[jit.Step, ...]  # that kernel and, before it, what it needs
    back: jit.Step | None  # rounds the features' gradient
    room: Callable[[], Tensor]  # for that
    segments: Segments | None  # the features' gradient comes last, in a fixed order of additions
    soft: bool
    wide: torch.dtype


def decide_forward(op: Operator, T: Sequence[Any], levels: Sequence[int], flag: bool, int64: bool) -> Callable[..., Tensor]:
    """What takes operands of this kind, ``(*T, …)``, to their result."""
    known: CallCache[Forward] = CallCache()

    def run(*args: Any) -> Tensor:
        T, levels = _described(args[:5])
        return _forward(known.get(levels) or known.put(levels, prepare_forward(op, T, levels, flag, int64)), *T)

    return run if _elsewhere(T) else partial(_forward, prepare_forward(op, T, tuple(levels), flag, int64))


def decide_backward(
    op: Operator, grad: Tensor, T: Sequence[Any], levels: Sequence[int], flag: bool, needs: Sequence[bool], deterministic: bool,
    int64: bool,
) -> Callable[..., list[Tensor]]:  # fmt: skip
    """What takes a gradient and operands of this kind, ``(grad, *T, …)``, to the gradients that are needed."""
    known: CallCache[Backward] = CallCache()

    def prepare(T: Sequence[Any], grad: Tensor, levels: tuple[int, ...]) -> Backward:
        return prepare_backward(op, (*T, grad), levels, flag, tuple(needs), deterministic, int64)

    def run(grad: Tensor, *args: Any) -> list[Tensor]:
        T, levels = _described(args[:5])
        return _backward(known.get(levels) or known.put(levels, prepare(T, grad, levels)), grad, *T)

    return run if _elsewhere(T) else partial(_backward, prepare(T, grad, tuple(levels)))


def _elsewhere(T: Sequence[Any]) -> bool:
    """Whether the host can read the levels: a CPU's tensors come beside a GPU's from traced graphs."""
    return T[1] is not None and (T[1].device != T[0].device or T[2].device != T[0].device)


def _described(T: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Numbers in their place."""
    features, shapes, starts, locations, weights = T
    return (features, None, None, locations, weights), tuple(numbers((shapes, starts, ())))


def _tables(this: Forward | Backward, features: Tensor, shapes: Tensor | None, starts: Tensor | None) -> Sequence[Tensor]:
    """What kernels are told of the levels."""
    if this.levels.table:
        table = table_of(this.levels.table, features.device)
        if table.event is None:
            this.told[:] = table.tensor, table.tensor
        return table.tensor, table.tensor
    if shapes is None or starts is None:  # there are none
        return (features.new_empty(0, dtype=torch.int32),) * 2
    return shapes.contiguous(), starts.contiguous()


def _levels(features: Tensor, starts: Tensor | None, levels: tuple[int, ...]) -> Levels:
    return levels_of(len(levels) // 3 if starts is None else starts.numel(), levels, features.shape[1])


def _forward(this: Forward, *args: Any) -> Tensor:
    features, shapes, starts, locations, weights = _copied(args[:5], this.copies)
    out = this.room()
    sums = None if this.parts is None else features.new_empty(this.parts, dtype=this.wide)
    tensors = (features, *(this.told or _tables(this, features, shapes, starts)), locations, weights, out, sums)
    for step in this.steps:
        step(tensors)
    return out


def _copied(T: Sequence[Any], copies: Sequence[int]) -> Sequence[Any]:
    return [t.contiguous() if i in copies else t for i, t in enumerate(T)] if copies else T


def prepare_forward(op: Operator, T: Sequence[Any], levels: tuple[int, ...], flag: bool, int64: bool) -> Forward:
    """Decide; operands may have no values."""
    features, _, starts, locations, weights = T
    wide, layout, known = accumulator(features, locations, weights), layout_of(features, int64), _levels(features, starts, levels)
    copies = [i for i in (0, 3, 4) if (layout.copy if i == 0 else not T[i].is_contiguous())]
    problem = op.problem(features, weights, known, layout, wide, flag, ())
    shape, slices = op.shape(features, weights), getattr(problem, "slices", 1)
    steps = [jit.Step(op.value, problem, [0, 1, 2, 3, 4, 5 if slices == 1 else 6])]
    if slices > 1:
        steps.append(jit.Step(op.total, problem, [6, 5]))  # type: ignore[arg-type]
    new, parts = room(outline(shape), features.dtype, features.device), (*shape[:2], slices, shape[2]) if slices > 1 else None
    return Forward(known, [], tuple(copies), shape, new, parts, wide, tuple(steps))


def _backward(this: Backward, grad: Tensor, *args: Any) -> list[Tensor]:
    dtype, size = args[0].dtype, args[0].shape
    features, shapes, starts, locations, weights, grad = _copied((*args[:5], grad), this.copies)
    tables = this.told or _tables(this, features, shapes, starts)
    found: list[Any] = [new and new() for new in this.rooms]
    marks = this.marks and this.marks()
    for step in this.steps:
        step((grad, features, *tables, locations, weights, *found, marks, None))
    del features  # a copy is read no more: make room
    if this.segments is not None:
        if this.soft:
            weights = torch.softmax(weights.flatten(3), -1, dtype=this.wide)
        found[0] = torch.empty(size, dtype=dtype, device=grad.device)
        rows_gradient(this.segments, tables[0], tables[1], locations, weights, grad, found[0])
    del locations, weights, grad
    if this.back is not None:
        sums, found[0] = found[0], this.room()
        this.back((sums, found[0], marks, None))
    return [d for d in found if d is not None]


def prepare_backward(
    op: Operator, T: Sequence[Any], levels: tuple[int, ...], flag: bool, needs: tuple[bool, ...], deterministic: bool, int64: bool
) -> Backward:
    features, _, starts, locations, weights, _grad = T
    wide, layout, known = accumulator(features, locations, weights), layout_of(features, int64), _levels(features, starts, levels)
    by_segments = deterministic and needs[0]
    wants = tuple(i for i, need in enumerate(needs) if need and not (by_segments and i == 0))
    reads = needs[1] or needs[2]
    copies = [i for i in (0, 3, 4, 5) if (layout.copy and reads if i == 0 else not T[i].is_contiguous())]
    sums, begin = outline(features.shape), zeros
    steps: list[jit.Step] = []
    segments = back = marks = None
    if wants:
        problem = op.problem(features, weights, known, layout, wide, flag, wants)
        written = [6 + i if i in wants else None for i in range(3)]
        steps = [jit.Step(op.gradients, problem, [0, 1 if reads else None, 2, 3, 4, 5, *written])]
    if 0 in wants and features.dtype != wide:
        if op.mark is None:
            back = finishing(sums, sums)
        else:  # 9 has the marks
            marks, begin = zeros(outline(sums.shape[:2]), torch.uint8, features.device), room
            steps = [jit.Step(op.mark, problem, [2, 3, 4, 9]), jit.Step(clear_marked, rows_of(sums), [6, 9]), *steps]
            back = jit.Step(round_marked, rows_of(sums), [0, 1, 2])
    if by_segments:
        segments = op.segments(features, weights, known, layout, wide, flag)
    news = begin(sums, wide, features.device), *(room(outline(t.shape), t.dtype, t.device) for t in (locations, weights))
    rooms = tuple(new if i in wants else None for i, new in enumerate(news))
    result, soft = room(sums, features.dtype, features.device), by_segments and op.soft and flag
    return Backward(known, [], tuple(copies), rooms, wants, marks, tuple(steps), back, result, segments, soft, wide)


def plan(
    op: Operator, T: Sequence[Any], levels: Sequence[int], flag: bool, needs: Sequence[bool], deterministic: bool, int64: bool
) -> list[Kernel]:
    """What the two above launch and allocate."""
    levels, same = tuple(levels), Determinism.BATCH_INVARIANT
    features, shapes, starts, locations, weights = T
    this = prepare_forward(op, T, levels, flag, int64)
    parts = 0 if this.parts is None else prod(this.parts) * this.wide.itemsize
    given, told = [locations.dtype, weights.dtype], _table_dtypes(this.levels, shapes, starts)
    dtypes = [features.dtype, *told, *given, features.dtype, this.wide]
    found = []
    for step in this.steps:
        last = step is this.steps[-1]
        chosen = step.chosen(dtypes, features.device)
        room = parts + _bytes(T, this.copies)
        found.append(Kernel(step.kernel.title, ("out",) if last else (), this.wide, same, room, "forward", *chosen))
    if any(needs):
        grad = torch.empty(this.shape, dtype=features.dtype, device="meta")
        found += _backward_plan(op, prepare_backward(op, (*T, grad), levels, flag, tuple(needs), deterministic, int64), (*T, grad))
    return found


def _backward_plan(op: Operator, this: Backward, T: Sequence[Any]) -> list[Kernel]:
    found: list[Kernel] = []

    def add(name: str, writes: Sequence[str], promise: Determinism, room: int, *chosen: Any) -> None:
        found.append(Kernel(name, tuple(writes), this.wide, promise, room, "backward", *chosen))

    features, shapes, starts, locations, weights, grad = T
    copied, result = _bytes(T, this.copies), features.numel() * features.element_size()
    atomic = 0 in this.wants
    buffer = 0 if this.back is None else features.numel() * this.wide.itemsize
    buffer += features.shape[0] * features.shape[1] if this.marks else 0  # a byte each
    if this.steps:
        dtypes = [grad.dtype, features.dtype, *_table_dtypes(this.levels, shapes, starts), locations.dtype, weights.dtype]
        dtypes += [this.wide, locations.dtype, weights.dtype]
        later = result if buffer or this.segments is not None else 0  # is allocated when this is over
        room = max(0, copied + buffer - later)
        promise = Determinism.NONE if atomic else Determinism.BATCH_INVARIANT
        for step in this.steps[:-1]:
            add(step.kernel.title, (), Determinism.BATCH_INVARIANT, room)
        chosen = this.steps[-1].chosen(dtypes, features.device)
        add(op.gradients.title, [op.names[i] for i in this.wants], promise, room, *chosen)
    if this.back is not None:
        add(this.back.kernel.title, (), Determinism.BATCH_INVARIANT, buffer)
    if this.segments is not None:
        room = _bytes(T, [i for i in this.copies if i]) + workspace(this.segments)
        if this.soft:
            room += weights.numel() * this.wide.itemsize
            add("torch.softmax", (), Determinism.RUN_TO_RUN, room)
        names = launches(this.segments)
        for i, name in enumerate(names):
            add(name, op.names[:1] if i == len(names) - 1 else (), Determinism.RUN_TO_RUN, room)
    return found


def _bytes(T: Sequence[Any], which: Sequence[int]) -> int:
    return sum(T[i].numel() * T[i].element_size() for i in which)


def _table_dtypes(levels: Levels, shapes: Tensor | None, starts: Tensor | None) -> list[torch.dtype]:
    return [torch.int32 if levels.table or t is None else t.dtype for t in (shapes, starts)]
