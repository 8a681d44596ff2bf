"""Triton implementation of ``grid_sample``: what a pass does; kernels are in ``gpu_kernels``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import jit
from ...op.dtypes import accumulator
from ...op.gpu import outline, room, zeros
from ...op.layout import memory_format
from ...op.plan import Determinism, Kernel
from .._device.axes import MODES, PADDINGS, TAPS
from .._device.fixed_point import ADD, FLOAT, MARK, TELL, finishing, largest
from .._device.layout import empty_pixels, few, into_pixels, into_planes, pixel_stride, pixels_room, transpose, turned
from .._epipolar.reference import joint_batch
from . import gpu_gather as gathers
from .gpu_configs import problem, units
from .gpu_kernels import gradients, sample

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
Options = tuple[str, str, bool]


class Forward(NamedTuple):
    """What a forward pass over operands of one kind does, decided once; the call and the plan both go by it."""

    copy_grid: bool
    turn: jit.Step | None  # by way of pixels: vectors instead of single numbers are worth a transpose
    out: Tensor  # without its memory
    room: Callable[[], Tensor]  # for it
    step: jit.Step


class Backward(NamedTuple):
    """And a backward pass."""

    copy_grid: bool
    copy_grad: bool
    wants: tuple[str, ...]  # of the kernel that has both gradients
    turn: jit.Step | None
    back: jit.Step | None  # makes the gradient of the input of its sums, if those have another layout or dtype
    step: jit.Step | None
    marks: tuple[jit.Step, ...]  # of sums in fixed point, so that their order does not matter
    gather: gathers.Problem | None  # of sums in a fixed order, in place of those
    rows: jit.Step | None  # makes rows of channels of the result's gradient for that
    repeated: bool  # a grid that serves many inputs has the sum of their gradients
    zeros: bool  # of the grid: known without a kernel
    wide: torch.dtype
    of_input: Callable[[], Tensor]  # zeros to add to
    of_grid: Callable[[], Tensor]  # room for its gradient
    room: Callable[[], Tensor]  # for the gradient of the input, where it is not what it was summed in


def decide_forward(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Callable[..., Tensor]:
    return partial(_forward, prepare_forward(input, grid, (mode, padding_mode, align_corners)))


def _forward(this: Forward, input: Tensor, grid: Tensor, *_options: Any) -> Tensor:
    out = this.room()
    source = input if this.turn is None else turned(this.turn, input)
    this.step((source, grid.flatten(1, -2) if this.copy_grid else grid, out))
    return out


def prepare_forward(input: Tensor, grid: Tensor, options: Options) -> Forward:
    """Decide; operands may have no values."""
    shape, layout = (joint_batch(input, grid), input.shape[1], *grid.shape[1:-1]), memory_format(input, True)
    out = outline(shape, memory_format=layout)
    through = _through(input, grid) and 16 * prod(grid.shape[1:-1]) >= prod(input.shape[2:])
    of_input = _pixel_strides(input, input.dtype) if through else input.stride()
    what = problem(
        input.shape, input.element_size(), _flat(grid), accumulator(input, grid), options, out.flatten(2).stride(), of_input,
        int64=FORCE_INT64,
    )  # fmt: skip
    turn = into_pixels(input.shape, input.dtype) if through else None
    new = room(out, input.dtype, input.device)
    return Forward(not _collapses(grid), turn, out, new, jit.Step(sample, what, [0, 1, 2]))


def decide_backward(
    grad: Tensor, input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *,
    needs: Sequence[bool], deterministic: bool,
) -> Callable[..., list[Tensor]]:  # fmt: skip
    return partial(_backward, prepare_backward(grad, input, grid, (mode, padding_mode, align_corners), needs, deterministic), needs)


def _backward(this: Backward, needs: Sequence[bool], grad: Tensor, input: Tensor, grid: Tensor, *_options: Any) -> list[Tensor]:
    if this.copy_grad:
        grad = grad.flatten(2)
    points = grid.flatten(1, -2) if this.copy_grid else grid
    d_input = d_grid = None
    if this.step is not None:
        d_input, d_grid = _both(this, grad, input, grid, points)
    if this.gather is not None:
        d_input = _gathered(this, grad, input, points)
    if this.zeros:
        d_grid = torch.zeros(grid.shape, dtype=grid.dtype, device=grid.device)
    return [g for g, need in zip((d_input, d_grid), needs) if need]  # type: ignore[misc]


def prepare_backward(grad: Tensor, input: Tensor, grid: Tensor, options: Options, needs: Sequence[bool], strict: bool) -> Backward:
    B, wide, flat = joint_batch(input, grid), accumulator(input, grid), _flat(grid)
    no_slope = options[0] == "nearest" and needs[1]
    wants = tuple(name for name, need in zip(("input", "grid"), needs) if need and not (name == "grid" and no_slope))
    through = "input" in wants and _through(input, grid)
    gather = rows = None
    if strict and "input" in wants and options[0] != "bicubic" and (through or _in_rows(input)):
        gather, rows = _gather_problem(grad, input, flat, options, wide, through)
    if gather is not None:
        wants = wants[1:]
    fixed = strict and "input" in wants
    step, of_input, of_gradient = None, None, None
    marks: tuple[jit.Step, ...] = ()
    if "grid" in wants:
        of_input = _pixel_strides(input, input.dtype) if through else input.stride()
    if "input" in wants:
        as_it_is = outline(input.shape, memory_format=_summed_in(input)).stride()
        of_gradient = _pixel_strides(input, torch.int64 if fixed else wide) if through else as_it_is
    if wants:
        of_out = _outline(grad).flatten(2).stride()
        known = (input.shape, input.element_size(), flat, wide, options, of_out)
        what = problem(*known, of_input, of_gradient, "grid" in wants, FORCE_INT64, ADD if fixed else FLOAT)
        takes = [0, 1 if "grid" in wants else None, 2, *(3 + i if t in wants else None for i, t in _NAMES)]
        step = jit.Step(gradients, what, [*takes, *_fixed(fixed, wide)])
        if fixed:
            mark = problem(*known, None, of_gradient, False, FORCE_INT64, MARK)
            marks = tuple(jit.Step(gradients, what, [0, None, 2, 3, None, None, 6]) for what in (mark, mark._replace(stage=TELL)))
    turn = back = None
    if through:
        turn = into_pixels(input.shape, input.dtype) if "grid" in wants else None
        of_pixels = input.dtype if gather is not None else torch.int64 if fixed else wide
        back = into_planes(input.shape, of_pixels, input.dtype, fixed, units(what) if fixed else 0)
    repeated, sums = grid.shape[0] != B, torch.int64 if fixed else wide
    summed = outline([pixels_room(input.shape, sums)]) if back else outline(input.shape, memory_format=_summed_in(input))
    of_grid = room(outline((B, *grid.shape[1:])), wide if repeated else grid.dtype, grid.device)
    gradient = outline(input.shape, memory_format=memory_format(input, True))
    if "input" in wants and not through and (fixed or input.dtype != wide or summed.stride() != gradient.stride()):
        back = finishing(summed, gradient, fixed, units(what) if fixed else 0)
    rooms = zeros(summed, sums, input.device), of_grid, room(gradient, input.dtype, input.device)
    copies = not _collapses(grid), not _collapses(grad.movedim(1, -1))
    return Backward(*copies, wants, turn, back, step, marks, gather, rows, repeated, no_slope, wide, *rooms)


def _in_rows(input: Tensor) -> bool:
    """Whether channels are neighbours, and many: few are added faster as integers."""
    return input.shape[1] >= 16 and memory_format(input, True) != torch.contiguous_format


def _gather_problem(
    grad: Tensor, input: Tensor, flat: Tensor, options: Options, wide: torch.dtype, through: bool
) -> tuple[gathers.Problem | None, jit.Step | None]:
    """Of a sum in a fixed order, if 32 bits count its samples and cells; and what makes rows of channels of the gradient first."""
    (n, C, *size), (grids, points, dim) = input.shape, flat.shape
    of_out, mode = _outline(grad).flatten(2).stride(), MODES.index(options[0])
    as_rows = of_out[1] == 1 and of_out[0] == points * of_out[2]
    row = of_out[2] if as_rows else pixel_stride(C, grad.element_size())
    Z, H, W = (1, *size)[-3:]
    stride = pixel_stride(C, input.element_size()) if through else C
    where = TAPS[mode], PADDINGS.index(options[1]), options[2]
    what = gathers.Problem(n, grad.shape[0] // max(1, n), points, Z, H, W, C, dim, *where, wide, grids, flat.stride(), row, stride)
    if max(what.samples, what.cells) >= 2**31 - gathers.BLOCK_CELLS:
        return None, None
    return what, None if as_rows else into_pixels(grad.shape, grad.dtype)


def _gathered(this: Backward, grad: Tensor, input: Tensor, points: Tensor) -> Tensor:
    """The gradient of the input, each pixel of which adds up its samples in order."""
    assert this.gather is not None
    rows = grad if this.rows is None else turned(this.rows, grad.contiguous())
    if this.back is None:
        out = this.room()
        gathers.gather(this.gather, rows, points, out)
        return out
    pixels = input.new_empty(pixels_room(input.shape, input.dtype))
    gathers.gather(this.gather, rows, points, pixels)
    del rows
    planes = this.room()
    this.back((pixels, planes, None))
    return planes


def _through(input: Tensor, grid: Tensor) -> bool:
    return input.is_contiguous() and input.shape[1] >= 16 and not few(prod(grid.shape[1:-1]), input.shape[1])


def _fixed(fixed: bool, wide: torch.dtype) -> tuple[int | None, int | None]:
    """Positions of what else sums in fixed point have: a second half where float64 is to come of them, and their units."""
    return (5 if fixed and wide == torch.float64 else None, 6 if fixed else None)


_NAMES = tuple(enumerate(("input", "grid")))


def _both(this: Backward, grad: Tensor, input: Tensor, grid: Tensor, points: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients in one pass, that of the input by atomic additions."""
    assert this.step is not None
    source, d_input, d_grid, low, most = input, None, None, None, None
    if "grid" in this.wants:
        if this.turn is not None:
            source = turned(this.turn, input)
        d_grid = this.of_grid()
    if "input" in this.wants:
        d_input = this.of_input()
        if this.marks:
            low = this.of_input() if this.wide == torch.float64 else None
            most = largest(grad.flatten(2), input.shape[0], this.wide)
    tensors = (grad, source, points, d_input, d_grid, low, most, None)
    this.step(tensors)
    for step in this.marks:
        step(tensors)
    del source, tensors
    if d_grid is not None and this.repeated:
        n = grid.shape[0]
        d_grid = d_grid.view(n, this.step.problem.B // max(1, n), *grid.shape[1:]).sum(1).to(grid.dtype)
    if d_input is not None and this.back is not None:
        sums, d_input = d_input, this.room()
        this.back((sums, d_input, low, most, None))
    return d_input, d_grid


def _summed_in(input: Tensor) -> torch.memory_format:
    """The layout that its gradient is summed in, if not by way of pixels: few channels are added plane by plane."""
    return torch.contiguous_format if input.shape[1] < 4 else memory_format(input, True)


def plan(
    input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *, needs: Sequence[bool], deterministic: bool
) -> list[Kernel]:
    """What the two above launch and allocate."""
    options, wide = (mode, padding_mode, align_corners), accumulator(input, grid)
    this = prepare_forward(input, grid, options)
    copy = grid.numel() * grid.element_size() if this.copy_grid else 0
    chosen = this.step.chosen([input, grid, input], input.device)
    same, room, found = Determinism.BATCH_INVARIANT, copy, []
    if this.turn is not None:
        room += input.numel() // input.shape[1] * pixel_stride(input.shape[1], input.element_size()) * input.element_size()
        found.append(Kernel(transpose.title, (), wide, same, room, "forward"))
    found.append(Kernel(sample.title, ("out",), wide, same, room, "forward", *chosen))
    if any(needs):
        grad = this.out.to(input.dtype)
        found += _backward_plan(prepare_backward(grad, input, grid, options, tuple(needs), deterministic), input, grid, copy)
    return found


def _backward_plan(this: Backward, input: Tensor, grid: Tensor, copy: int) -> list[Kernel]:
    found: list[Kernel] = []

    same, fixed = Determinism.BATCH_INVARIANT, bool(this.marks)
    sums = torch.int64 if fixed else this.wide

    def add(name: str, writes: Sequence[str], promise: Determinism, room: int, *chosen: Any) -> None:
        found.append(Kernel(name, tuple(writes), sums if "input" in writes else this.wide, promise, room, "backward", *chosen))

    if this.step is not None:
        room, after = (copy + x for x in _both_bytes(this, input, grid))
        if this.turn is not None:
            add(transpose.title, (), same, room)
        if fixed:
            add("_largest", (), same, room)
        of_input = Determinism.RUN_TO_RUN if fixed else Determinism.NONE
        promise = of_input if "input" in this.wants else Determinism.RUN_TO_RUN if this.repeated else same
        of_grid, most = this.wide if this.repeated else grid.dtype, torch.int64 if this.wide == torch.float64 else torch.int32
        dtypes = [input.dtype, input.dtype, grid.dtype, sums, of_grid, sums, most]
        add(gradients.title, this.wants, promise, room, *this.step.chosen(dtypes, input.device))
        for step in this.marks:
            add(gradients.title, (), Determinism.RUN_TO_RUN, room, *step.chosen(dtypes, input.device))
        if this.repeated and "grid" in this.wants:
            add("torch.sum", (), Determinism.RUN_TO_RUN, room)
        if this.back is not None and this.gather is None:
            add(this.back.kernel.title, (), same, after)
    if this.gather is not None:
        room, after = (copy + x for x in _gather_bytes(this, this.gather, input))
        if this.rows is not None:
            add(transpose.title, (), same, room)
        for name in gathers.KERNELS:
            add(name, ("input",) if name == gathers.KERNELS[-1] else (), Determinism.RUN_TO_RUN, room)
        if this.back is not None:
            add(transpose.title, (), same, after)
    if this.zeros:
        add("torch.zeros", ("grid",), same, 0)
    return found


def _both_bytes(this: Backward, input: Tensor, grid: Tensor) -> tuple[int, int]:
    """Beside the results while the kernel runs, and when the gradient of the input is made of the buffer that it was summed in."""
    C, result, itemsize = input.shape[1], input.numel() * input.element_size(), input.element_size()
    pixels, room, wide = input.numel() // max(1, C), 0, this.wide.itemsize
    if "grid" in this.wants and this.repeated:
        room = joint_batch(input, grid) * (grid.numel() // max(1, grid.shape[0])) * wide
    copy = pixels * pixel_stride(C, itemsize) * itemsize if this.turn is not None else 0
    if this.gather is not None:  # the gradient of the input comes later
        return max(0, room + copy - result), room
    if this.back is None:
        return room, room
    each = 8 if this.marks else wide
    buffer = pixels * (pixel_stride(C, each) if this.back.kernel is transpose else C) * each
    if this.marks:
        buffer = buffer * (wide // 4) + (input.shape[0] + 1) * wide
    return max(0, room + buffer + copy - result), room + buffer


def _gather_bytes(this: Backward, gather: gathers.Problem, input: Tensor) -> tuple[int, int]:
    """The same of a gradient that pixels gather."""
    itemsize = input.element_size()
    room = gathers.workspace(gather) + (gather.samples * gather.row * itemsize if this.rows is not None else 0)
    if this.back is None:
        return room, 0
    pixels = pixels_room(input.shape, input.dtype) * itemsize
    return max(0, room + pixels - input.numel() * itemsize), pixels


def _outline(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _flat(grid: Tensor) -> Tensor:
    """The grid as kernels see it, ``[B, points, coordinates]``, without its values."""
    return _outline(grid).flatten(1, -2)


def _collapses(x: Tensor) -> bool:
    """Whether all dimensions between the first and the last are one in memory."""
    kept = [(n, s) for n, s in zip(x.shape[1:-1], x.stride()[1:-1]) if n != 1]
    return not x.numel() or all(s == n * t for (_, s), (n, t) in pairwise(kept))


def _tall(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """A volume as one tall image."""
    return shape[0], shape[1], prod(shape[2:-1]), shape[-1]


def _pixel_strides(input: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """Those of `input` if its memory were that of pixels."""
    b, c, y, x = empty_pixels(_tall(input.shape), dtype, torch.device("meta")).stride()
    return (b, c, *((input.shape[3] * y,) if input.ndim == 5 else ()), y, x)
