"""The floor of operators that gather: a kernel that reads every pixel row the samples touch, sums, and writes almost nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grid._device.taps import corners, edges, fetch, locate
from ..jit.launch import cdiv, launch


def floor(images: Tensor, samples: Tensor, block_q: int = 4, num_warps: int = 4) -> Tensor:
    """Sum of all corners of all samples of each query, ``[B, Q]``; `images` are ``[B, H, W, C]``."""
    (B, H, W, C), (_, Q, D, _) = images.shape, samples.shape
    out = torch.empty(B, Q, device=images.device)
    constants = (C, images.stride(2), block_q, 4, 32)
    launch(_touch, (images, samples, out), (B * cdiv(Q, block_q), 1, 1), (H, W, Q, D), constants, num_warps)
    return out


@triton.jit(do_not_specialize=["H", "W", "Q", "D"])
def _touch(
    images,  # [B, H, W, C]
    samples,  # [B, Q, D, 2]
    out,  # [B, Q]
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, BLOCK_Q * BLOCK_D)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    image = images + b * H * W * STRIDE
    total = tl.zeros([BLOCK_Q * BLOCK_D, BLOCK_C], tl.float32)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + i % BLOCK_D
        y, x = fetch(samples, (b * Q + q) * D + d, (q < Q) & (d < D), tl.float32)
        live, y0, x0, _fy, _fx = locate(y, x, H, W, tl.int32)
        k00, k01, k10, k11 = edges(live, y0, x0, H, W)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)[None, :]
            v00, v01, v10, v11 = corners(image, y0 * W + x0, k00, k01, k10, k11, c, c < C, W, STRIDE, tl.float32)
            total += (v00 + v01) + (v10 + v11)
    rows = tl.sum(tl.reshape(tl.sum(total, 1), [BLOCK_Q, BLOCK_D]), 1)
    q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    tl.store(out + b * Q + q, rows, mask=q < Q)
