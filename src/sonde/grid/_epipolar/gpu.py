"""Passes for derivatives of the form T; every pass of ``sample_sum`` and ``sample_dot`` is one, forward and backward:

    T(images, samples, coef, rows) = Σ_{b,h,q,d} coef[b,h,q,d] · Σ_c tap(images[b,c], samples[b,q,d]) · rows[b,h,q,c]

``sample_sum(weights)`` is ∂T/∂rows with coef = weights, and its gradient is that of T with rows = ∂L/∂out;
``sample_dot(queries)`` is ∂T/∂coef with rows = queries, and its gradient is that of T with coef = ∂L/∂out.
For the last 2·octaves channels of the images, rows are an encoding of the depth, the same for every head.

This file decides what a pass launches; the kernels are in ``gpu_kernels`` and ``gpu_segments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.dtypes import accumulator
from ...op.layout import memory_format, outline
from ...op.plan import Determinism
from .._device.fixed_point import add_finish
from .._device.layout import into_pixels, into_planes, pixel_stride, pixels_outline, pixels_size, reads_in_place
from .gpu_kernels import Problem, form, launch_rows, rows, rows_config
from .gpu_segments import add_images_gradient

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
CLEARED = 1 << 15  # elements that each program of ``rows`` may clear for ``form``, which saves a launch
OPERANDS = ("images", "samples", "coef", "rows", "depths")
Layout = Literal["pixels", "planes", "padded"]  # channels-last; contiguous; channels-last with padding, in a buffer of our own


def derivatives(
    wants: Mapping[str, str], given: Mapping[str, Tensor | None], octaves: int = 0, *, dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> Pass:  # fmt: skip
    """The pass that computes from `given` the derivatives of T with respect to the operands in `wants`: operand → name in a plan.

    A derivative has the layout and dtype of its operand, or `dtype` if that operand is not given. Operands may be meta tensors.
    """
    images, samples, coef, rows_, depths = (given.get(name) for name in OPERANDS)
    assert images is not None
    assert samples is not None
    (B, C, H, W), (_, Q, D, _) = images.shape, samples.shape
    heads = (rows_ if coef is None else coef).shape[1]  # type: ignore[union-attr]
    wide = accumulator(images, samples, coef, rows_, depths)
    p = Pass(images.device, wide, given)
    by_segments = deterministic and "images" in wants

    layout = layout_of(images, Q * D)
    d_layout = sums_layout(layout, by_segments)
    stride, sums_stride = stride_of(layout, C, images.dtype), stride_of(d_layout, C, wide)
    int64 = FORCE_INT64 or H * W * max(C, stride, sums_stride) >= 2**31
    d_stride = sums_stride if "images" in wants else 0
    problem = Problem(B, H, W, Q, D, C, stride, d_stride, heads, octaves, wide, int64, coef is not None)

    slots = {name: p.contiguous(name) for name in given if name != "images"}
    slots["images"] = as_read(p, "images", images, layout)

    shapes = dict(samples=(B, Q, D, 2), coef=(B, heads, Q, D), rows=(B, heads, Q, C - 2 * octaves), depths=(B, Q, D))
    depths_unread = "depths" in wants and not octaves  # their gradient is zero
    separate = {"rows"} | ({"images"} if by_segments else set()) | ({"depths"} if depths_unread else set())
    fused = [want for want in wants if want not in separate]
    grid = launch_rows(problem, rows_config(problem)).grid
    rows_clear = "rows" in wants and "images" in fused and B * H * W * max(C, d_stride) <= CLEARED * grid[0] * grid[1]
    found = {}
    for want in wants:
        if want == "images":
            found[want] = gradient_buffer(p, "images", images, d_layout, by_segments, cleared=not rows_clear)
        else:
            operand = given.get(want)
            rounded = dtype if operand is None else operand.dtype
            assert rounded is not None
            found[want] = p.buffer(f"d_{want}", shapes[want], rounded)

    if "rows" in wants:  # first: it may clear d_images, which ``form`` adds to
        takes = [slots["images"], slots["samples"], slots["coef"], found["rows"], found["images"] if rows_clear else None]
        p.launch(rows, problem if rows_clear else problem._replace(d_stride=0), takes, writes=[wants["rows"]])
    if fused:
        written = [found[name] if name in fused else None for name in ("images", "samples", "coef", "depths")]
        atomic = "images" in fused
        p.launch(
            form, problem if atomic else problem._replace(d_stride=0), [*(slots.get(name) for name in OPERANDS), *written],
            writes=[wants[name] for name in fused], promise=Determinism.NONE if atomic else Determinism.BATCH_INVARIANT,
        )  # fmt: skip
    if by_segments:
        add_images_gradient(p, problem, slots, found["images"], [wants["images"]])
    if "images" in wants:
        found["images"] = round_gradient(p, "images", images, found["images"], d_layout)
    if depths_unread:
        p.call("torch.zero_", Tensor.zero_, [found["depths"]], writes=[wants["depths"]])
    return p.returns(*(found[want] for want in wants))


def layout_of(images: Tensor, samples: int) -> Layout:
    """The layout in which kernels read images with this many samples each: channels-last, unless converting them costs more."""
    _, C, H, W = images.shape
    if images.permute(0, 2, 3, 1).is_contiguous():
        return "pixels"
    few = reads_in_place(samples, C) or 16 * samples <= H * W  # independent of B: another layout may sum in another order
    return "planes" if few else "padded"


def sums_layout(layout: Layout, by_segments: bool) -> Layout:
    """The layout in which the gradient of the images is accumulated."""
    return "padded" if by_segments and layout == "planes" else layout


def stride_of(layout: Layout, C: int, dtype: torch.dtype) -> int:
    """The stride from pixel to pixel; 1 if each channel is a plane."""
    return {"pixels": C, "planes": 1, "padded": pixel_stride(C, dtype.itemsize)}[layout]


def as_read(p: Pass, name: str, images: Tensor, layout: Layout) -> str:
    """The slot of the images in this layout."""
    if layout == "pixels":
        return name
    planes = p.contiguous(name)
    assert planes is not None
    return into_pixels(p, planes, images.shape) if layout == "padded" else planes


def gradient_buffer(p: Pass, name: str, images: Tensor, layout: Layout, by_segments: bool, cleared: bool = True) -> str:
    """The buffer that accumulates the images' gradient; zeroed for atomics, but not for segments, which write every element."""
    wide = p.accumulator
    if layout != "padded":
        like = outline(images.shape, memory_format=memory_format(images, True))
    else:
        like = pixels_outline(images.shape, wide) if by_segments else outline([pixels_size(images.shape, wide)])
    return p.buffer(f"d_{name}", like, wide, 0 if cleared and not by_segments else None)


def round_gradient(p: Pass, name: str, images: Tensor, sums: str, layout: Layout) -> str:
    """The slot of the gradient with the layout and the dtype of the images."""
    if layout != "padded" and images.dtype == p.accumulator:
        return sums
    gradient = outline(images.shape, memory_format=memory_format(images, True))
    found = p.buffer(f"d_{name}", gradient, images.dtype)
    if layout == "padded":
        into_planes(p, sums, found, images.shape)
    else:
        add_finish(p, sums, gradient, found, gradient)
    return found
