"""Images to channels-last and back: one tiled transpose, which also rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import launch

BLOCK = 64


def channels_last(images: Tensor) -> Tensor:
    """``[B, C, H, W]`` → ``[B, H, W, C]``, contiguous; a view where the images are channels-last already."""
    view = images.permute(0, 2, 3, 1)
    if view.is_contiguous() or not images.is_contiguous():
        return view.contiguous()
    out = images.new_empty(view.shape)
    B, C, H, W = images.shape
    _transpose_to(images, out, B, C, H * W)
    return out


def as_images(pixels: Tensor, like: Tensor, memory_format: torch.memory_format) -> Tensor:
    """``[B, H, W, C]`` → ``[B, C, H, W]`` in the dtype of `like`, laid out as asked."""
    if memory_format == torch.channels_last:
        return pixels.to(like.dtype).permute(0, 3, 1, 2)
    B, H, W, C = pixels.shape
    out = torch.empty(B, C, H, W, dtype=like.dtype, device=like.device)
    _transpose_to(pixels, out, B, H * W, C)
    return out


def _transpose_to(source: Tensor, out: Tensor, B: int, M: int, N: int) -> None:
    grid = (B * triton.cdiv(M, BLOCK) * triton.cdiv(N, BLOCK), 1, 1)
    launch(_transpose, grid, (source, out), (M, N), (*(4 if size % 4 == 0 else 1 for size in (M, N)), BLOCK), 4)


@triton.jit(do_not_specialize=["M", "N"])
def _transpose(
    source,  # [B, M, N]
    out,  # [B, N, M]
    M,
    N,
    VEC_M: tl.constexpr,  # M is a multiple of it
    VEC_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    M, N = M // VEC_M * VEC_M, N // VEC_N * VEC_N  # tells the compiler what it cannot know: rows are aligned
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    tile = tl.program_id(0)
    b = (tile // (down * across)).to(tl.int64) * M * N
    m = tile // across % down * BLOCK + tl.arange(0, BLOCK)
    n = tile % across * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None] & (n < N)[None]
    x = tl.load(source + b + m.to(tl.int64)[:, None] * N + n[None], mask=inside)
    tl.store(out + b + n.to(tl.int64)[:, None] * M + m[None], tl.trans(x).to(out.dtype.element_ty), mask=tl.trans(inside))
