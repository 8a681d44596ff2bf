"""One form, of which every pass of ``sample_sum`` and ``sample_dot`` is a derivative, forward passes included:

    T(images, samples, coef, rows) = Σ_{b,h,q,d} coef[b,h,q,d] · Σ_c tap(images[b,c], samples[b,q,d]) · rows[b,h,q,c]

``sample_sum(weights)`` is ∂T/∂rows with coef = weights, and its gradient is that of T with rows = ∂L/∂out;
``sample_dot(queries)`` is ∂T/∂coef with rows = queries, and its gradient is that of T with coef = ∂L/∂out.
The last 2·octaves channels of the images meet an encoding of the depth in place of rows, the same for every head.

This file decides what a pass does; its kernels are in ``gpu_kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ... import jit
from ...op.dtypes import accumulator
from ...op.gpu import outline, room, zeros
from ...op.layout import memory_format
from ...op.plan import Determinism, Kernel
from .._device.fixed_point import finishing
from .._device.layout import empty_pixels, few, into_pixels, into_planes, pixel_stride, pixels_room, transpose, turned
from .gpu_kernels import Problem, form, launch_rows, rows, rows_config
from .gpu_segments import SEGMENTS, images_gradient, workspace

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
CLEARED = 1 << 15  # numbers that each program of ``rows`` may clear on its way, which saves a launch
OPERANDS = ("images", "samples", "coef", "rows", "depths")
Layout = Literal["pixels", "planes", "padded"]  # channels next to each other; apart; next to each other in a copy of ours


class Result(NamedTuple):
    name: str
    place: int  # among the tensors of a pass
    room: Callable[[], Tensor]  # for it
    dtype: torch.dtype  # that it is written in


class Pass(NamedTuple):
    """What a pass over operands of one kind does, decided once; the call and the plan both go by it."""

    problem: Problem
    copies: tuple[int, ...]  # operands that are made contiguous
    layout: Layout  # of the images, as the kernels see them
    d_layout: Layout  # of their gradient
    results: tuple[Result, ...]  # what is asked for, in order
    steps: tuple[jit.Step, ...]
    segments: bool  # the images' gradient comes last, in a fixed order of additions
    unread: bool  # nothing reads the depths, whose gradient is asked for
    turn: jit.Step | None  # makes pixels of the images
    back: jit.Step | None  # makes their gradient of its sums, if those have another layout or dtype
    room: Callable[[], Tensor]  # for that


def decide(
    wants: tuple[str, ...], images: Tensor, samples: Tensor, coef: Tensor | None = None, rows: Tensor | None = None,
    depths: Tensor | None = None, octaves: int = 0, *, dtype: torch.dtype | None = None, deterministic: bool = False,
) -> Callable[[list[Any]], list[Tensor]]:  # fmt: skip
    """What takes operands of this kind to the derivatives of T by what `wants` names.

    Each is laid out and rounded as that operand, or in `dtype` if it is None. The list of operands is theirs who takes it.
    """
    return partial(_run, prepare(wants, (images, samples, coef, rows, depths), octaves, dtype, deterministic))


def prepare(wants: Sequence[str], T: Sequence[Tensor | None], octaves: int, dtype: torch.dtype | None, deterministic: bool) -> Pass:
    """Decide; operands may be meta tensors."""
    images, samples, coef, rows_, _ = T
    assert images is not None
    assert samples is not None
    (B, C, H, W), (_, Q, D, _) = images.shape, samples.shape
    heads = (rows_ if coef is None else coef).shape[1]  # type: ignore[union-attr]
    wide = accumulator(*T)
    by_segments = deterministic and "images" in wants

    where_they_lie = few(Q * D, C) or 16 * Q * D <= H * W  # whatever the batch: another layout may add in another order
    layout: Layout = "planes" if where_they_lie else "padded"
    d_layout: Layout = "padded" if by_segments else layout
    if images.permute(0, 2, 3, 1).is_contiguous():
        layout = d_layout = "pixels"
    strides = {"pixels": C, "planes": 1, "padded": pixel_stride(C, images.element_size())}
    d_strides = {"pixels": C, "planes": 1, "padded": pixel_stride(C, wide.itemsize)}
    copies = [i for i, t in enumerate(T) if t is not None and not t.is_contiguous() and not (i == 0 and layout == "pixels")]

    unread = "depths" in wants and not octaves
    alone = {"rows"} | ({"images"} if by_segments else set()) | ({"depths"} if unread else set())
    together = [want for want in wants if want not in alone]
    int64 = FORCE_INT64 or H * W * max(C, strides[layout], d_strides[d_layout]) >= 2**31
    d_stride = d_strides[d_layout] if "images" in wants else 0
    problem = Problem(B, H, W, Q, D, C, strides[layout], d_stride, heads, octaves, wide, int64, coef is not None)
    grid = launch_rows(problem, rows_config(problem)).grid
    clears = "rows" in wants and "images" in together and B * H * W * max(C, d_stride) <= CLEARED * grid[0] * grid[1]
    steps = []
    if "rows" in wants:  # first: it may clear what the other adds to
        takes = [0, 1, 2, 5 + OPERANDS.index("rows"), 5 if clears else None]
        steps.append(jit.Step(rows, problem if clears else problem._replace(d_stride=0), takes))
    if together:  # derivatives come after the operands, in the same order
        written = [5 + OPERANDS.index(name) if name in together else None for name in ("images", "samples", "coef", "depths")]
        takes = [i if t is not None else None for i, t in enumerate(T)] + written
        steps.append(jit.Step(form, problem if "images" in together else problem._replace(d_stride=0), takes))
    shapes = ((B, C, H, W), (B, Q, D, 2), (B, heads, Q, D), (B, heads, Q, C - 2 * octaves), (B, Q, D))
    results = []
    for want in wants:
        i = OPERANDS.index(want)
        if want == "images":
            results.append(Result(want, 5, _sums(images, d_layout, wide, by_segments, clears), wide))
        else:
            of = dtype if T[i] is None else T[i].dtype  # type: ignore[union-attr]
            assert of is not None
            results.append(Result(want, 5 + i, room(outline(shapes[i]), of, images.device), of))
    turn = into_pixels(images.shape, images.dtype) if layout == "padded" else None
    back, gradient = None, outline(images.shape, memory_format=memory_format(images, True))
    if "images" in wants and d_layout == "padded":
        back = into_planes(images.shape, wide, images.dtype)
    elif "images" in wants and images.dtype != wide:
        back = finishing(gradient, gradient)
    new = room(gradient, images.dtype, images.device)
    return Pass(problem, tuple(copies), layout, d_layout, tuple(results), tuple(steps), by_segments, unread, turn, back, new)


def _run(this: Pass, T: list[Any]) -> list[Tensor]:
    if this.turn is not None:  # first, as the images may have to be copied for it
        T[0] = turned(this.turn, T[0].contiguous())
    for i in this.copies:
        T[i] = T[i].contiguous()
    T += (None,) * 6  # for the derivatives, and for nothing
    for _, i, new, _ in this.results:
        T[i] = new()
    if this.unread:
        T[9].zero_()
    for step in this.steps:
        step(T)
    if this.segments:
        T[0] = None  # read no more: make room
        images_gradient(this.problem, *T[1:6])
    if this.back is not None:
        T[:5] = [None] * 5  # read no more, copies too
        sums, T[5] = T[5], this.room()
        this.back((sums, T[5], None))
    return [T[result.place] for result in this.results]


def _sums(images: Tensor, layout: Layout, wide: torch.dtype, by_segments: bool, cleared: bool) -> Callable[[], Tensor]:
    """Makes room for the gradient of the images; segments will write every element, atomics add, to what is `cleared` or zeros."""
    if layout == "padded" and by_segments:
        return partial(empty_pixels, images.shape, wide, images.device)
    like = outline(images.shape, memory_format=memory_format(images, True))
    if layout == "padded":
        like = outline([pixels_room(images.shape, wide)])
    return (room if by_segments or cleared else zeros)(like, wide, images.device)


def plan(
    phase: Literal["forward", "backward"], names: dict[str, str], T: Sequence[Tensor | None], octaves: int,
    dtype: torch.dtype | None = None, deterministic: bool = False,
) -> list[Kernel]:  # fmt: skip
    """What :func:`decide` launches for what `names` lists, under the names it gives them."""
    this = prepare(tuple(names), T, octaves, dtype, deterministic)
    images, wide = T[0], this.problem.wide
    assert images is not None
    sizes = [0 if t is None else t.numel() * t.element_size() for t in T]
    pixels = this.problem.B * this.problem.H * this.problem.W
    room = sum(sizes[i] for i in this.copies)
    gradient = 0  # the buffer that the gradient of the images is summed in, if it is not the result itself
    if this.back is not None:
        gradient = pixels * (this.problem.d_stride if this.d_layout == "padded" else this.problem.C) * wide.itemsize

    def kernel(name: str, writes: Sequence[str], promise: Determinism, workspace: int, *chosen: Any) -> Kernel:
        return Kernel(name, tuple(writes), wide, promise, workspace, phase, *chosen)

    found = []
    if this.layout == "padded":
        padded, copy = pixels * this.problem.stride * images.element_size(), sizes[0] if 0 in this.copies else 0
        room += padded - copy
        found.append(kernel(transpose.title, [], Determinism.BATCH_INVARIANT, padded + copy))
    dtypes = [None if t is None else t.dtype for t in T] + [None] * 5
    for result in this.results:
        dtypes[result.place] = result.dtype
    for step in this.steps:
        atomic = step.kernel is form and 5 in step.takes
        writes = [names[OPERANDS[i - 5]] for i in step.takes if i is not None and i >= (5 if atomic else 6)]
        promise = Determinism.NONE if atomic else Determinism.BATCH_INVARIANT
        found.append(kernel(step.kernel.title, writes, promise, room, *step.chosen(dtypes, images.device)))
    if this.segments:  # which need the images no more
        room = sum(sizes[i] for i in this.copies if i) + workspace(this.problem)
        *others, last = SEGMENTS
        found += [kernel(name, [], Determinism.RUN_TO_RUN, room) for name in others]
        found.append(kernel(last, [names["images"]], Determinism.RUN_TO_RUN, room))
    if gradient:  # it becomes the result when all else is gone
        found = [replace(k, workspace=max(0, k.workspace + gradient - sizes[0])) for k in found]
        assert this.back is not None
        found.append(kernel(this.back.kernel.title, [], Determinism.BATCH_INVARIANT, gradient))
    if this.unread:
        found.append(kernel("torch.zero_", [names["depths"]], Determinism.BATCH_INVARIANT, 0))
    return found
