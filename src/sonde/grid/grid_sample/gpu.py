"""Triton implementation of ``grid_sample``: what a pass does; its kernels are in ``gpu_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import jit
from ...jit.kernel import dtypes_of
from ...op.cache import remember
from ...op.library import memory_format
from ...op.plan import Determinism, Kernel
from .._gpu_axes_segments import input_gradient, launches, workspace
from .._gpu_layout import empty_pixels, pixel_stride, to_pixels, to_planes, transpose
from .._reference import accumulator, joint_batch
from .gpu_kernels import gradients, problem, sample

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
Options = tuple[str, str, bool]


class Forward(NamedTuple):
    """What a forward pass over operands of one kind does, decided once; the call and the plan both go by it."""

    copy_grid: bool
    shape: tuple[int, ...]
    layout: torch.memory_format
    step: jit.Step


class Backward(NamedTuple):
    """And a backward pass."""

    copy_grid: bool
    copy_grad: bool
    wants: tuple[str, ...]  # of the kernel that has both gradients
    through: bool  # by way of pixels: vectors instead of single numbers are worth a transpose
    step: jit.Step | None
    repeated: bool  # a grid that serves many inputs has the sum of their gradients
    zeros: bool  # of the grid: known without a kernel
    segments: bool  # of the input: in a fixed order of additions
    wide: torch.dtype


_passes: dict[tuple, Any] = {}


def _remembered(key: tuple, prepare, *args):
    found = _passes.get(key)
    return remember(_passes, key, prepare(*args)) if found is None else found


def _kind(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype, t.data_ptr() & 15


def forward(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    options = (mode, padding_mode, align_corners)
    key = (options, FORCE_INT64, input.get_device(), jit.state(), _kind(input), _kind(grid))
    this = _remembered(key, prepare_forward, input, grid, options)
    out = torch.empty(this.shape, dtype=input.dtype, device=input.device, memory_format=this.layout)
    this.step((input, grid.flatten(1, -2) if this.copy_grid else grid, out))
    return out


def prepare_forward(input: Tensor, grid: Tensor, options: Options) -> Forward:
    """Decide; operands may have no values."""
    shape, layout = (joint_batch(input, grid), input.shape[1], *grid.shape[1:-1]), memory_format(input, True)
    of_out = torch.empty(shape, memory_format=layout, device="meta").flatten(2).stride()
    what = problem(
        input.shape, input.element_size(), _flat(grid), accumulator(input, grid), options, of_out, input.stride(), int64=FORCE_INT64
    )
    return Forward(not _collapses(grid), shape, layout, jit.Step(sample, what, [0, 1, 2]))


def backward(
    grad: Tensor, input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *,
    needs: Sequence[bool], deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    options, asked = (mode, padding_mode, align_corners), tuple(needs)
    kinds = _kind(grad), _kind(input), _kind(grid)
    key = (options, asked, deterministic, FORCE_INT64, input.get_device(), jit.state(), *kinds)
    this = _remembered(key, prepare_backward, grad, input, grid, options, asked, deterministic)
    if this.copy_grad:
        grad = grad.flatten(2)
    points = grid.flatten(1, -2) if this.copy_grid else grid
    d_input = d_grid = None
    if this.step is not None:
        d_input, d_grid = _both(this, grad, input, grid, points)
    if this.zeros:
        d_grid = torch.zeros(grid.shape, dtype=grid.dtype, device=grid.device)
    if this.segments:
        d_input = input_gradient(grad.flatten(2), input, points.flatten(1, -2), this.wide, options)
    return [g for g, need in zip((d_input, d_grid), needs) if need]  # type: ignore[misc]


def prepare_backward(grad: Tensor, input: Tensor, grid: Tensor, options: Options, needs: Sequence[bool], strict: bool) -> Backward:
    C, B, wide, flat = input.shape[1], joint_batch(input, grid), accumulator(input, grid), _flat(grid)
    segments, zeros = strict and needs[0], options[0] == "nearest" and needs[1]
    alone = [name for name, is_so in (("input", segments), ("grid", zeros)) if is_so]
    wants = tuple(name for name, need in zip(("input", "grid"), needs) if need and name not in alone)
    through = "input" in wants and input.is_contiguous() and C >= 16
    step, of_input, of_gradient = None, None, None
    if "grid" in wants:
        of_input = _pixel_strides(input, input.dtype) if through else input.stride()
    if "input" in wants:
        as_it_is = torch.empty(input.shape, memory_format=memory_format(input, True), device="meta").stride()
        of_gradient = _pixel_strides(input, wide) if through else as_it_is
    if wants:
        of_out = _outline(grad).flatten(2).stride()
        what = problem(
            input.shape, input.element_size(), flat, wide, options, of_out, of_input, of_gradient, "grid" in wants, FORCE_INT64
        )
        step = jit.Step(
            gradients, what, [0, 1 if "grid" in wants else None, 2, *(3 + i if t in wants else None for i, t in _NAMES)]
        )
    copies = not _collapses(grid), not _collapses(grad.movedim(1, -1))
    return Backward(*copies, wants, through, step, grid.shape[0] != B, zeros, segments, wide)


_NAMES = tuple(enumerate(("input", "grid")))


def _both(this: Backward, grad: Tensor, input: Tensor, grid: Tensor, points: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients in one pass, that of the input by atomic additions."""
    assert this.step is not None
    source, d_input, d_grid = input, None, None
    if "grid" in this.wants:
        if this.through:
            source = to_pixels(input.flatten(2, -2))
        if this.repeated:
            shape = this.step.problem.B, *grid.shape[1:]
            d_grid = torch.empty(shape, dtype=this.wide, device=grid.device)
        else:
            d_grid = torch.empty(grid.shape, dtype=grid.dtype, device=grid.device)
    if this.through:
        d_input = empty_pixels(_tall(input.shape), this.wide, input.device, zero=True)
    elif "input" in this.wants:
        d_input = torch.zeros_like(input, dtype=this.wide, memory_format=memory_format(input, True))
    this.step((grad, source, points, d_input, d_grid))
    del source
    if d_grid is not None and this.repeated:
        n = grid.shape[0]
        d_grid = d_grid.view(n, this.step.problem.B // max(1, n), *grid.shape[1:]).sum(1).to(grid.dtype)
    if this.through and d_input is not None:
        d_input = to_planes(d_input, input.dtype).view(input.shape)
    elif d_input is not None:
        d_input = d_input.to(input.dtype)
    return d_input, d_grid


def plan(
    input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *, needs: Sequence[bool], deterministic: bool
) -> list[Kernel]:
    """What the two above launch and allocate."""
    options, wide = (mode, padding_mode, align_corners), accumulator(input, grid)
    this = prepare_forward(input, grid, options)
    copy = grid.numel() * grid.element_size() if this.copy_grid else 0
    chosen = _chosen(this.step, [input, grid, input], input.device)
    found = [Kernel(sample.title, ("out",), wide, Determinism.BATCH_INVARIANT, copy, "forward", *chosen)]
    if any(needs):
        grad = torch.empty(this.shape, dtype=input.dtype, memory_format=this.layout, device="meta")
        found += _backward_plan(
            prepare_backward(grad, input, grid, options, tuple(needs), deterministic), input, grid, options, copy
        )
    return found


def _backward_plan(this: Backward, input: Tensor, grid: Tensor, options: Options, copy: int) -> list[Kernel]:
    found: list[Kernel] = []

    def add(name: str, writes: Sequence[str], promise: Determinism, room: int, *chosen: Any) -> None:
        found.append(Kernel(name, tuple(writes), this.wide, promise, room, "backward", *chosen))

    same = Determinism.BATCH_INVARIANT
    if this.step is not None:
        room, after = (copy + x for x in _both_bytes(this, input, grid))
        if this.through and "grid" in this.wants:
            add(transpose.title, (), same, room)
        promise = Determinism.NONE if "input" in this.wants else Determinism.RUN_TO_RUN if this.repeated else same
        dtypes = [input.dtype, input.dtype, grid.dtype, this.wide, this.wide if this.repeated else grid.dtype]
        add(gradients.title, this.wants, promise, room, *_chosen(this.step, dtypes, input.device))
        if this.repeated and "grid" in this.wants:
            add("torch.sum", (), Determinism.RUN_TO_RUN, room)
        if this.through:
            add(transpose.title, (), same, after)
        elif "input" in this.wants and input.dtype != this.wide:
            add("torch.Tensor.to", (), same, after)
    if this.zeros:
        add("torch.zeros", ("grid",), same, 0)
    if this.segments:
        room = copy + workspace(input, grid, this.wide, *options[:2])
        names = launches(input, grid, this.wide, *options[:2])
        writes = max(i for i, name in enumerate(names) if name in ("_gather", "torch.zeros_like"))
        for i, name in enumerate(names):
            add(name, ("input",) if i == writes else (), Determinism.RUN_TO_RUN, room)
    return found


def _both_bytes(this: Backward, input: Tensor, grid: Tensor) -> tuple[int, int]:
    """Beside the results while the kernel runs, and when the gradient of the input is made of the buffer that it was summed in."""
    C, result, itemsize = input.shape[1], input.numel() * input.element_size(), input.element_size()
    pixels, room = input.numel() // max(1, C), 0
    if "grid" in this.wants and this.repeated:
        room = joint_batch(input, grid) * (grid.numel() // max(1, grid.shape[0])) * this.wide.itemsize
    if "input" not in this.wants or (not this.through and input.dtype == this.wide):
        return room, room
    buffer = pixels * (pixel_stride(C, this.wide.itemsize) if this.through else C) * this.wide.itemsize
    copy = pixels * pixel_stride(C, itemsize) * itemsize if this.through and "grid" in this.wants else 0
    return max(0, room + buffer + copy - result), room + buffer


def _chosen(step: jit.Step, given: Sequence[Tensor | torch.dtype], device: torch.device) -> tuple:
    """The configuration that a step runs in, and what else is known of it."""
    config, *about = step.kernel.choose(step.problem, dtypes_of(None if i is None else given[i] for i in step.takes), device)
    return str(config), *about


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
