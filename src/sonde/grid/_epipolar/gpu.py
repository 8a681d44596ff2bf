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
    """The pass that takes the operands `given` and returns the derivatives of T by those in `wants`: operand → name in a plan.

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

    in_place = reads_in_place(Q * D, C) or 16 * Q * D <= H * W  # not by B: another layout may sum in another order
    layout: Layout = "planes" if in_place else "padded"
    d_layout: Layout = "padded" if by_segments else layout
    if images.permute(0, 2, 3, 1).is_contiguous():
        layout = d_layout = "pixels"
    strides = {"pixels": C, "planes": 1, "padded": pixel_stride(C, images.element_size())}
    d_strides = {"pixels": C, "planes": 1, "padded": pixel_stride(C, wide.itemsize)}
    int64 = FORCE_INT64 or H * W * max(C, strides[layout], d_strides[d_layout]) >= 2**31
    d_stride = d_strides[d_layout] if "images" in wants else 0
    problem = Problem(B, H, W, Q, D, C, strides[layout], d_stride, heads, octaves, wide, int64, coef is not None)

    slots = {name: p.contiguous(name) for name in given if name != "images"}
    slots["images"] = "images" if layout == "pixels" else p.contiguous("images")
    if layout == "padded":
        slots["images"] = into_pixels(p, slots["images"], images.shape)  # type: ignore[arg-type]

    shapes = dict(samples=(B, Q, D, 2), coef=(B, heads, Q, D), rows=(B, heads, Q, C - 2 * octaves), depths=(B, Q, D))
    depths_unread = "depths" in wants and not octaves  # their gradient is zero
    separate = {"rows"} | ({"images"} if by_segments else set()) | ({"depths"} if depths_unread else set())
    fused = [want for want in wants if want not in separate]
    grid = launch_rows(problem, rows_config(problem)).grid
    rows_clear = "rows" in wants and "images" in fused and B * H * W * max(C, d_stride) <= CLEARED * grid[0] * grid[1]
    found = {}
    for want in wants:
        if want == "images":
            fill = None if by_segments or rows_clear else 0  # segments write every element, atomics add
            found[want] = p.buffer("d_images", _sums(images, d_layout, wide, by_segments), wide, fill)
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
    gradient = outline(images.shape, memory_format=memory_format(images, True))
    if "images" in wants and (d_layout == "padded" or images.dtype != wide):  # round the sums into the layout of the images
        sums, found["images"] = found["images"], p.buffer("d_images", gradient, images.dtype)
        if d_layout == "padded":
            into_planes(p, sums, found["images"], images.shape)
        else:
            add_finish(p, sums, gradient, found["images"], gradient)
    if depths_unread:
        p.call("torch.zero_", Tensor.zero_, [found["depths"]], writes=[wants["depths"]])
    return p.returns(*(found[want] for want in wants))


def _sums(images: Tensor, layout: Layout, wide: torch.dtype, by_segments: bool) -> Tensor:
    """The outline of the buffer in which the gradient of the images is summed."""
    if layout != "padded":
        return outline(images.shape, memory_format=memory_format(images, True))
    return pixels_outline(images.shape, wide) if by_segments else outline([pixels_size(images.shape, wide)])
