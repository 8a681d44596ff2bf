"""One form, of which every pass of ``sample_sum`` and ``sample_dot`` is a derivative, forward passes included:

    T(images, samples, coef, rows) = Σ_{b,h,q,d} coef[b,h,q,d] · Σ_c tap(images[b,c], samples[b,q,d]) · rows[b,h,q,c]

``sample_sum(weights)`` is ∂T/∂rows with coef = weights, and its gradient is that of T with rows = ∂L/∂out;
``sample_dot(queries)`` is ∂T/∂coef with rows = queries, and its gradient is that of T with coef = ∂L/∂out.
The last 2·octaves channels of the images meet an encoding of the depth in place of rows, the same for every head.

This file decides what a pass does; its kernels are in ``gpu_kernels``.
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
from .._device.layout import few, into_pixels, into_planes, pixel_stride, pixels_outline, pixels_size
from .gpu_kernels import Problem, form, launch_rows, rows, rows_config
from .gpu_segments import add_images_gradient

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
CLEARED = 1 << 15  # numbers that each program of ``rows`` may clear on its way, which saves a launch
OPERANDS = ("images", "samples", "coef", "rows", "depths")
Layout = Literal["pixels", "planes", "padded"]  # channels next to each other; apart; next to each other in a copy of ours


def derivatives(
    wants: Mapping[str, str], given: Mapping[str, Tensor | None], octaves: int = 0, *, dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> Pass:  # fmt: skip
    """The pass from these operands to the derivatives of T by those that `wants` names, each with the name it has in a plan.

    A derivative is laid out and rounded as that operand is, or in `dtype` if that is not given. Operands may be meta tensors.
    """
    images, samples, coef, rows_, depths = (given.get(name) for name in OPERANDS)
    assert images is not None
    assert samples is not None
    (B, C, H, W), (_, Q, D, _) = images.shape, samples.shape
    heads = (rows_ if coef is None else coef).shape[1]  # type: ignore[union-attr]
    wide = accumulator(images, samples, coef, rows_, depths)
    p = Pass(images.device, wide, given)
    by_segments = deterministic and "images" in wants

    where_they_lie = few(Q * D, C) or 16 * Q * D <= H * W  # whatever the batch: another layout may add in another order
    layout: Layout = "planes" if where_they_lie else "padded"
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
    unread = "depths" in wants and not octaves  # nothing reads the depths, whose gradient is asked for
    alone = {"rows"} | ({"images"} if by_segments else set()) | ({"depths"} if unread else set())
    together = [want for want in wants if want not in alone]
    grid = launch_rows(problem, rows_config(problem)).grid
    clears = "rows" in wants and "images" in together and B * H * W * max(C, d_stride) <= CLEARED * grid[0] * grid[1]
    found = {}
    for want in wants:
        if want == "images":
            fill = None if by_segments or clears else 0  # segments write every element, atomics add
            found[want] = p.buffer("d_images", _sums(images, d_layout, wide, by_segments), wide, fill)
        else:
            operand = given.get(want)
            kind = dtype if operand is None else operand.dtype
            assert kind is not None
            found[want] = p.buffer(f"d_{want}", shapes[want], kind)

    if "rows" in wants:  # first: it may clear what the other adds to
        takes = [slots["images"], slots["samples"], slots["coef"], found["rows"], found["images"] if clears else None]
        p.launch(rows, problem if clears else problem._replace(d_stride=0), takes, writes=[wants["rows"]])
    if together:
        written = [found[name] if name in together else None for name in ("images", "samples", "coef", "depths")]
        atomic = "images" in together
        p.launch(
            form, problem if atomic else problem._replace(d_stride=0), [*(slots.get(name) for name in OPERANDS), *written],
            writes=[wants[name] for name in together], promise=Determinism.NONE if atomic else Determinism.BATCH_INVARIANT,
        )  # fmt: skip
    if by_segments:
        add_images_gradient(p, problem, slots, found["images"], [wants["images"]])
    gradient = outline(images.shape, memory_format=memory_format(images, True))
    if "images" in wants and (d_layout == "padded" or images.dtype != wide):  # round the sums, and bring them into place
        sums, found["images"] = found["images"], p.buffer("d_images", gradient, images.dtype)
        if d_layout == "padded":
            into_planes(p, sums, found["images"], images.shape)
        else:
            add_finish(p, sums, gradient, found["images"], gradient)
    if unread:
        p.call("torch.zero_", Tensor.zero_, [found["depths"]], writes=[wants["depths"]])
    return p.returns(*(found[want] for want in wants))


def _sums(images: Tensor, layout: Layout, wide: torch.dtype, by_segments: bool) -> Tensor:
    """An outline of the buffer that the gradient of the images is summed in."""
    if layout != "padded":
        return outline(images.shape, memory_format=memory_format(images, True))
    return pixels_outline(images.shape, wide) if by_segments else outline([pixels_size(images.shape, wide)])
