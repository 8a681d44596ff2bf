"""Images to channels-last and back: one tiled transpose, which also rounds.

Images are ``[B, C, H, W]`` with any strides. *Planes* are contiguous images, *pixels* are channels-last images.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, cdiv
from ...jit.steps import Pass
from .fixed_point import Config, to_float

FEW = 1 << 17  # values tapped per image


def reads_in_place(taps: int, C: int) -> bool:
    """Read planes in place? With so few taps, converting them to pixels would take longer."""
    return taps * C <= FEW


def pixel_stride(C: int, itemsize: int) -> int:
    """Elements from one pixel to the next in an image that we lay out ourselves.

    Padded to whole 128-byte lines where that costs little, so that no tile of channels straddles two lines, else to sectors.
    """
    size = C * itemsize
    lines, sectors = cdiv(size, 128) * 128, cdiv(size, 32) * 32
    return (lines if lines <= 1.13 * size else sectors) // itemsize


def pixels_outline(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A meta tensor of images whose pixels are ``pixel_stride`` apart."""
    return as_images(torch.empty(pixels_size(shape, dtype), device="meta"), shape, pixel_stride(shape[1], dtype.itemsize))


def as_images(pixels: Tensor, shape: Sequence[int], stride: int) -> Tensor:
    """A view of this memory as images whose pixels are `stride` apart."""
    _, _, H, W = shape
    return pixels.as_strided(shape, (H * W * stride, 1, W * stride, stride))


def pixels_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """How many elements images or volumes of this shape take as padded pixels."""
    return shape[0] * prod(shape[2:]) * pixel_stride(shape[1], dtype.itemsize)


def into_pixels(p: Pass, planes: str, shape: Sequence[int]) -> str:
    """A step that copies planes into padded pixels; returns the slot of the flat buffer."""
    B, C, P, dtype = shape[0], shape[1], prod(shape[2:]), p.slots[planes].dtype
    pixels = p.buffer(f"{planes} as pixels", [pixels_size(shape, dtype)], dtype)
    p.launch(transpose, Transpose(B, C, P, P, pixel_stride(C, dtype.itemsize), dtype, dtype), [planes, pixels, None, None])
    return pixels


def into_planes(
    p: Pass, pixels: str, planes: str, shape: Sequence[int], low: str | None = None, largest: str | None = None, digits: int = 0
) -> None:
    """A step that copies back and rounds; `low`, `largest` and `digits` are given for sums in fixed point."""
    B, C, P, source = shape[0], shape[1], prod(shape[2:]), p.slots[pixels].dtype
    problem = Transpose(B, P, C, pixel_stride(C, source.itemsize), P, source, p.slots[planes].dtype, digits)
    p.launch(transpose, problem, [pixels, planes, low, largest])


class Transpose(NamedTuple):
    """``[B, M, N]`` → ``[B, N, M]``, rows `from_row` and `to_row` apart."""

    B: int
    M: int
    N: int
    from_row: int
    to_row: int
    source: torch.dtype
    to: torch.dtype
    digits: int = 0


def default_config(problem: Transpose) -> Config:
    return Config(32 if problem.digits else 64, 4)  # 64-bit integers take twice the registers


def launch(p: Transpose, config: Config) -> Launch:
    grid = (p.B * cdiv(p.M, config.block) * cdiv(p.N, config.block), 1, 1)
    aligned = (4 if (p.N | p.from_row) % 4 == 0 else 1, 4 if (p.M | p.to_row) % 4 == 0 else 1)
    return Launch(grid, (p.M, p.N, p.from_row, p.to_row, p.digits), (*aligned, config.block), config.num_warps)


@triton.jit(do_not_specialize=["M", "N", "FROM_ROW", "TO_ROW", "DIGITS"])
def _transpose(
    source,  # [B, M, N], rows FROM_ROW apart
    out,  # [B, N, M], rows TO_ROW apart
    low,  # like source; the low half of sums in fixed point, if they have one
    largest,  # [B + 1]; None unless the source is in fixed point
    M,
    N,
    FROM_ROW,
    TO_ROW,
    DIGITS,
    IN: tl.constexpr,  # N and FROM_ROW are multiples of it
    OUT: tl.constexpr,  # M and TO_ROW are multiples of it
    BLOCK: tl.constexpr,
):
    """Transpose one BLOCK × BLOCK tile of one image, converting fixed point to floats and rounding to the dtype of `out`."""
    N, FROM_ROW = N // IN * IN, FROM_ROW // IN * IN  # tells the compiler that rows are aligned
    M, TO_ROW = M // OUT * OUT, TO_ROW // OUT * OUT
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    tile = tl.program_id(0)
    b = (tile // (down * across)).to(tl.int64)
    m = tile // across % down * BLOCK + tl.arange(0, BLOCK)
    n = tile % across * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None] & (n < N)[None]
    at = (b * M + m[:, None]) * FROM_ROW + n[None]
    x = tl.load(source + at, mask=inside)
    if largest is not None:
        x = to_float(x, None if low is None else tl.load(low + at, mask=inside), tl.load(largest + b), DIGITS)
    tl.store(out + (b * N + n[:, None]) * TO_ROW + m[None], tl.trans(x).to(out.dtype.element_ty), mask=tl.trans(inside))


transpose = jit.kernel(_transpose, "grid.transpose", default=default_config, launch=launch)
