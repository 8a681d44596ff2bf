"""Triton implementation of ``grid_sample``: the steps of a pass; kernels are in ``gpu_kernels`` and ``gpu_gather``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.dtypes import accumulator
from ...op.layout import memory_format, outline, outline_of
from ...op.plan import Determinism
from .._device.axes import MODES, PADDINGS, TAPS
from .._device.fixed_point import ADD, CLASSIFY, FLOAT, MARK, add_finish, add_largest
from .._device.layout import into_pixels, into_planes, pixel_stride, pixels_outline, pixels_size, reads_in_place
from . import gpu_gather as gathers
from .gpu_configs import problem, units
from .gpu_kernels import gradients, sample
from .reference import joint_batch

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
Options = tuple[str, str, bool]


def forward_pass(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Pass:
    options, wide = (mode, padding_mode, align_corners), accumulator(input, grid)
    p = Pass(input.device, wide, dict(input=input, grid=grid))
    out = outline((joint_batch(input, grid), input.shape[1], *grid.shape[1:-1]), memory_format=memory_format(input, True))
    through = _through(input, grid) and 16 * prod(grid.shape[1:-1]) >= prod(input.shape[2:])
    of_input = _pixel_strides(input, input.dtype) if through else input.stride()
    what = problem(
        input.shape, input.element_size(), _flat(grid), wide, options, out.flatten(2).stride(), of_input, int64=FORCE_INT64
    )
    source = into_pixels(p, "input", input.shape) if through else "input"  # vector loads are worth a transpose
    result = p.buffer("out", out, input.dtype)
    p.launch(sample, what, [source, _points(p, grid), result], writes=["out"])
    return p.returns(result).returning_one()


def backward_pass(
    grad: Tensor, input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *,
    needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    options, wide, flat = (mode, padding_mode, align_corners), accumulator(input, grid), _flat(grid)
    p = Pass(input.device, wide, dict(grad=grad, input=input, grid=grid))
    of_grad = "grad" if _collapses(grad.movedim(1, -1)) else p.copy("grad", lambda g: g.flatten(2))
    points = _points(p, grid)
    no_slope = mode == "nearest" and needs[1]
    wants = [name for name, need in zip(("input", "grid"), needs) if need and not (name == "grid" and no_slope)]
    found: dict[str, str] = {}

    through = "input" in wants and _through(input, grid)  # through padded pixels
    gather = None
    if deterministic and "input" in wants and mode != "bicubic" and (through or _in_rows(input)):
        gather = _gather_problem(grad, input, flat, options, wide, through)
    together = [name for name in wants if name == "grid" or gather is None]  # by the kernel for both gradients
    if together:
        found |= _add_both(p, together, grad, input, grid, (of_grad, points), options, deterministic, through)
    if gather is not None:
        found["input"] = _add_gather(p, gather, grad, input, (of_grad, points), through)
    if no_slope:
        found["grid"] = p.buffer("d_grid", grid.shape, grid.dtype)
        p.call("torch.zero_", Tensor.zero_, [found["grid"]], writes=["grid"])
    return p.returns(*(found[name] for name, need in zip(("input", "grid"), needs) if need))


def _add_both(
    p: Pass, wants: Sequence[str], grad: Tensor, input: Tensor, grid: Tensor, slots: tuple[str, str], options: Options,
    deterministic: bool, through: bool,
) -> dict[str, str]:  # fmt: skip
    """Both gradients in one pass; that of the input by atomic additions, of integers if it must be deterministic."""
    (of_grad, points), wide, B = slots, p.accumulator, joint_batch(input, grid)
    fixed = deterministic and "input" in wants  # sums in fixed point, so that their order does not matter
    dtype = torch.int64 if fixed else wide
    summed = outline(input.shape, memory_format=_summed_in(input))
    of_input = of_sums = None  # strides
    if "grid" in wants:
        of_input = _pixel_strides(input, input.dtype) if through else input.stride()
    if "input" in wants:
        of_sums = _pixel_strides(input, dtype) if through else summed.stride()
    known = (input.shape, input.element_size(), _flat(grid), wide, options, outline_of(grad).flatten(2).stride())
    what = problem(*known, of_input, of_sums, "grid" in wants, FORCE_INT64, ADD if fixed else FLOAT)

    source = sums = low = largest = d_grid = None
    repeated = grid.shape[0] != B  # a grid that serves many inputs gets the sum of their gradients
    if "grid" in wants:
        source = into_pixels(p, "input", input.shape) if through else "input"
        d_grid = p.buffer("d_grid", (B, *grid.shape[1:]), wide if repeated else grid.dtype)
    if "input" in wants:
        like = outline([pixels_size(input.shape, dtype)]) if through else summed
        sums = p.buffer("sums", like, dtype, fill=0)
        if fixed:
            low = p.buffer("low", like, dtype, fill=0) if wide == torch.float64 else None
            largest = add_largest(p, of_grad, outline_of(grad).flatten(2), input.shape[0], wide)
    promise = Determinism.RUN_TO_RUN if repeated else Determinism.BATCH_INVARIANT
    if "input" in wants:
        promise = Determinism.RUN_TO_RUN if fixed else Determinism.NONE
    accumulates = dtype if "input" in wants else None
    takes = [of_grad, source, points, sums, d_grid, low, largest]
    p.launch(gradients, what, takes, writes=wants, promise=promise, accumulator=accumulates)
    if fixed:
        mark = problem(*known, None, of_sums, False, FORCE_INT64, MARK)
        for stage in (mark, mark._replace(stage=CLASSIFY)):
            p.launch(gradients, stage, [of_grad, None, points, sums, None, None, largest], promise=Determinism.RUN_TO_RUN)

    found = {}
    if d_grid is not None:
        found["grid"] = _add_total(p, d_grid, grid, B) if repeated else d_grid
    if sums is not None:
        gradient = outline(input.shape, memory_format=memory_format(input, True))
        digits = units(what) if fixed else 0
        found["input"] = sums
        if through or fixed or input.dtype != wide or summed.stride() != gradient.stride():
            found["input"] = p.buffer("d_input", gradient, input.dtype)
            if through:
                into_planes(p, sums, found["input"], input.shape, low, largest, digits)
            else:
                add_finish(p, sums, summed, found["input"], gradient, low, largest, digits)
    return found


def _add_total(p: Pass, d_grid: str, grid: Tensor, B: int) -> str:
    n, shape, dtype = grid.shape[0], tuple(grid.shape[1:]), grid.dtype

    def total(each: Tensor) -> Tensor:
        return each.view(n, B // max(1, n), *shape).sum(1).to(dtype)

    scratch = 0 if dtype == p.accumulator else grid.numel() * p.accumulator.itemsize
    gives = [("d_grid", grid.shape, dtype)]
    return p.call("torch.sum", total, [d_grid], gives, promise=Determinism.RUN_TO_RUN, scratch=scratch)[0]


def _add_gather(p: Pass, what: gathers.Problem, grad: Tensor, input: Tensor, slots: tuple[str, str], through: bool) -> str:
    """The gradient of the input by a gather: each pixel adds up its samples in order."""
    rows, points = slots
    if not _has_rows(grad):
        if rows == "grad" and not grad.is_contiguous():
            rows = p.copy("grad", Tensor.contiguous)
        rows = into_pixels(p, rows, grad.shape)
    gradient = p.buffer("d_input", outline(input.shape, memory_format=memory_format(input, True)), input.dtype)
    if not through:
        gathers.add_gather(p, what, rows, points, gradient, ["input"])
        return gradient
    pixels = p.buffer("pixels", [pixels_size(input.shape, input.dtype)], input.dtype)
    gathers.add_gather(p, what, rows, points, pixels, ["input"])
    into_planes(p, pixels, gradient, input.shape)
    return gradient


def _points(p: Pass, grid: Tensor) -> str:
    return "grid" if _collapses(grid) else p.copy("grid", lambda g: g.flatten(1, -2))


def _in_rows(input: Tensor) -> bool:
    """Whether channels are contiguous and many; few are summed faster as integers."""
    return input.shape[1] >= 16 and memory_format(input, True) != torch.contiguous_format


def _gather_problem(
    grad: Tensor, input: Tensor, flat: Tensor, options: Options, wide: torch.dtype, through: bool
) -> gathers.Problem | None:
    """The problem of a sum in a fixed order; None if there are too many samples or cells for 32 bits."""
    (n, C, *size), (grids, points, dim) = input.shape, flat.shape
    of_out, mode = outline_of(grad).flatten(2).stride(), MODES.index(options[0])
    row = of_out[2] if _has_rows(grad) else pixel_stride(C, grad.element_size())
    Z, H, W = (1, *size)[-3:]
    stride = pixel_stride(C, input.element_size()) if through else C
    where = TAPS[mode], PADDINGS.index(options[1]), options[2]
    what = gathers.Problem(n, grad.shape[0] // max(1, n), points, Z, H, W, C, dim, *where, wide, grids, flat.stride(), row, stride)
    return what if max(what.samples, what.cells) < 2**31 - gathers.BLOCK_CELLS else None


def _has_rows(grad: Tensor) -> bool:
    """Whether the gradient of the result has a row of channels for each sample."""
    strides, points = outline_of(grad).flatten(2).stride(), prod(grad.shape[2:])
    return strides[1] == 1 and strides[0] == points * strides[2]


def _through(input: Tensor, grid: Tensor) -> bool:
    return input.is_contiguous() and input.shape[1] >= 16 and not reads_in_place(prod(grid.shape[1:-1]), input.shape[1])


def _summed_in(input: Tensor) -> torch.memory_format:
    """The layout in which its gradient is summed, unless through padded pixels: few channels are added plane by plane."""
    return torch.contiguous_format if input.shape[1] < 4 else memory_format(input, True)


def _flat(grid: Tensor) -> Tensor:
    """The grid as kernels see it, ``[B, points, coordinates]``, without its values."""
    return outline_of(grid).flatten(1, -2)


def _collapses(x: Tensor) -> bool:
    """Whether the dimensions between the first and the last can be merged in memory."""
    kept = [(n, s) for n, s in zip(x.shape[1:-1], x.stride()[1:-1]) if n != 1]
    return not x.numel() or all(s == n * t for (_, s), (n, t) in pairwise(kept))


def _tall(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """A volume as one tall image."""
    return shape[0], shape[1], prod(shape[2:-1]), shape[-1]


def _pixel_strides(input: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """The strides that `input` would have as padded pixels."""
    b, c, y, x = pixels_outline(_tall(input.shape), dtype).stride()
    return (b, c, *((input.shape[3] * y,) if input.ndim == 5 else ()), y, x)
