"""Images to channels-last and back: one tiled transpose, which also rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import cdiv, launch

BLOCK = 64


def pixel_stride(C: int, itemsize: int) -> int:
    """Channels from one pixel to the next in an image that we lay out ourselves.

    Whole 128-byte lines where that costs little, so that no tile of channels straddles two of them, else whole sectors.
    """
    size = C * itemsize
    lines, sectors = cdiv(size, 128) * 128, cdiv(size, 32) * 32
    return (lines if lines <= 1.13 * size else sectors) // itemsize


def empty_pixels(B: int, H: int, W: int, C: int, dtype: torch.dtype, device: torch.device, *, padded: bool = True) -> Tensor:
    """``[B, H, W, C]``, uninitialised; `padded` to the stride above."""
    stride = pixel_stride(C, dtype.itemsize) if padded else C
    return torch.empty_strided((B, H, W, C), (H * W * stride, W * stride, stride, 1), dtype=dtype, device=device)


def channels_last(images: Tensor) -> Tensor:
    """``[B, C, H, W]`` → ``[B, H, W, C]``, a view where the images are channels-last already."""
    view = images.permute(0, 2, 3, 1)
    if view.is_contiguous():
        return view
    B, C, H, W = images.shape
    out = empty_pixels(B, H, W, C, images.dtype, images.device)
    if images.is_contiguous():
        _transpose_to(images, out, B, C, H * W, H * W, out.stride(2))
    else:
        out.copy_(view)
    return out


def as_images(pixels: Tensor, like: Tensor, memory_format: torch.memory_format) -> Tensor:
    """``[B, H, W, C]`` → ``[B, C, H, W]`` in the dtype of `like`, laid out as asked."""
    if memory_format == torch.channels_last:
        return pixels.to(like.dtype).permute(0, 3, 1, 2)
    B, H, W, C = pixels.shape
    out = torch.empty(B, C, H, W, dtype=like.dtype, device=like.device)
    _transpose_to(pixels, out, B, H * W, C, pixels.stride(2), H * W)
    return out


def _transpose_to(source: Tensor, out: Tensor, B: int, M: int, N: int, from_row: int, to_row: int) -> None:
    grid = (B * cdiv(M, BLOCK) * cdiv(N, BLOCK), 1, 1)
    aligned = (4 if (N | from_row) % 4 == 0 else 1, 4 if (M | to_row) % 4 == 0 else 1)
    launch(_transpose, (source, out), grid, (M, N, from_row, to_row), (*aligned, BLOCK), 4)


@triton.jit(do_not_specialize=["M", "N", "FROM_ROW", "TO_ROW"])
def _transpose(
    source,  # [B, M, N], rows FROM_ROW apart
    out,  # [B, N, M], rows TO_ROW apart
    M,
    N,
    FROM_ROW,
    TO_ROW,
    IN: tl.constexpr,  # N and FROM_ROW are multiples of it
    OUT: tl.constexpr,  # M and TO_ROW are
    BLOCK: tl.constexpr,
):
    N, FROM_ROW = N // IN * IN, FROM_ROW // IN * IN  # tells the compiler what it cannot know: that rows are aligned
    M, TO_ROW = M // OUT * OUT, TO_ROW // OUT * OUT
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    tile = tl.program_id(0)
    b = (tile // (down * across)).to(tl.int64)
    m = tile // across % down * BLOCK + tl.arange(0, BLOCK)
    n = tile % across * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None] & (n < N)[None]
    x = tl.load(source + (b * M + m[:, None]) * FROM_ROW + n[None], mask=inside)
    tl.store(out + (b * N + n[:, None]) * TO_ROW + m[None], tl.trans(x).to(out.dtype.element_ty), mask=tl.trans(inside))
