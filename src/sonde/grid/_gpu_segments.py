"""The gradient of images in a fixed order of additions: sort the samples by cell, add up pieces, then pixels.

A cell is the square between four pixels. Its samples, sorted together, are cut into pieces of at most PIECE; one program adds
up one piece for each of the cell's corners; last, each pixel adds the pieces of the four cells around it, in order. Nothing
is atomic, nothing waits for the host, and a cell with a million samples is many pieces, not one long loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import accumulator, launch
from ._gpu_taps import locate, octave, wave

PIECE = 64
BLOCK = 1024  # samples per program where one thread serves one sample
BLOCK_PIXELS = 16
LANES = 8


def channel_tile(images: Tensor, samples: Tensor) -> int:
    """Channels that are reduced together: all, unless their partial sums would be larger than the images."""
    B, H, W, C = images.shape
    bound = max(images.numel() // (4 * max(1, pieces(images, samples))), 32)
    return min(triton.cdiv(C, 4) * 4, triton.cdiv(bound, 32) * 32)


def cells(images: Tensor) -> int:
    B, H, W, _ = images.shape
    return B * (H + 1) * (W + 1)


def pieces(images: Tensor, samples: Tensor) -> int:
    """An upper bound that needs no look at the data."""
    n = samples.numel() // 2
    return min(n, triton.cdiv(n, PIECE) + cells(images))


def workspace(images: Tensor, samples: Tensor, wide: torch.dtype) -> int:
    """Bytes in use beside the result: keys and their order, pieces, partial sums."""
    n, P = samples.numel() // 2, pieces(images, samples)
    sums = P * 4 * channel_tile(images, samples) * wide.itemsize
    return n * (4 + 4 + 8 + 4) + P * 4 + 4 + cells(images) * 8 + 8 + sums


def images_gradient(form, out: Tensor) -> None:
    """∂T/∂images into `out` ``[B, H, W, C]``, every element of which is written."""
    images, samples = form.images, form.samples
    (B, H, W, C), (_, Q, D, _) = images.shape, samples.shape
    n, P, last = B * Q * D, pieces(images, samples), cells(images)
    if not n or not out.numel():
        out.zero_()
        return
    acc = accumulator(form.wide)
    new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device=images.device)

    keys = new(n)
    launch(_keys, (triton.cdiv(n, BLOCK), 1, 1), (samples, keys), (H, W, Q * D, n, last), (acc, BLOCK), 4)
    keys, order = torch.sort(keys, stable=True)
    starts = (torch.arange(n, device=keys.device) % PIECE == 0)
    starts[1:] |= keys[1:] != keys[:-1]
    piece = torch.cumsum(starts, 0, dtype=torch.int32)  # 1 for the first
    first, begin, end = new(P + 1).fill_(n), new(last + 1).zero_(), new(last + 1).zero_()
    launch(_bounds, (triton.cdiv(n, BLOCK), 1, 1), (keys, piece, first, begin, end), (n,), (BLOCK,), 4)

    tile = channel_tile(images, samples)
    sums = new(P, 4, tile, dtype=form.wide)
    heads = triton.next_power_of_2(max(1, form.heads))
    for c0 in range(0, C, tile):
        launch(
            _sums, (P, triton.cdiv(tile, 4 * LANES), 1), (samples, form.coef, form.rows, form.depths, keys, order, first, sums),
            (H, W, Q, D, c0, tile, last), (C, form.heads, form.octaves, acc, heads, 4, LANES, 4), 1,
        )  # fmt: skip
        grid = (triton.cdiv(B * H * W, BLOCK_PIXELS), triton.cdiv(tile, 32), 1)
        launch(_gather, grid, (sums, begin, end, out), (H, W, B * H * W, c0, tile), (C, acc, BLOCK_PIXELS, 32), 4)


@triton.jit(do_not_specialize=["H", "W", "QD", "N", "LAST"])
def _keys(
    samples,  # [N, 2]
    keys,  # [N]
    H,
    W,
    QD,
    N,
    LAST,  # the key of samples that see no pixel
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, y0, x0, _, _ = locate(samples, i, i < N, H, W, ACC, tl.int32)
    key = ((i // QD).to(tl.int32) * (H + 1) + y0 + 1) * (W + 1) + x0 + 1
    tl.store(keys + i, tl.where(live, key, LAST), mask=i < N)


@triton.jit(do_not_specialize=["N"])
def _bounds(
    keys,  # [N], sorted
    piece,  # [N], number of the sample's piece, from 1
    first,  # [P + 1], first sample of each piece
    begin,  # [cells + 1], first piece of each cell
    end,  # [cells + 1], and the one after its last
    N,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, before, after = i < N, (i > 0) & (i < N), i + 1 < N
    key, p = tl.load(keys + i, mask=here), tl.load(piece + i, mask=here)
    tl.store(first + p - 1, i.to(tl.int32), mask=here & (p != tl.load(piece + i - 1, mask=before, other=0)))
    tl.store(begin + key, p - 1, mask=here & (key != tl.load(keys + i - 1, mask=before, other=-1)))
    tl.store(end + key, p, mask=here & (key != tl.load(keys + i + 1, mask=after, other=-1)))


@triton.jit(do_not_specialize=["H", "W", "Q", "D", "C0", "TILE", "LAST"])
def _sums(
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C − 2·OCTAVES]
    depths,  # [B, Q, D]
    keys,  # [N], sorted
    order,  # [N], which sample
    first,  # [P + 1]
    sums,  # [P, 4, TILE]
    H,
    W,
    Q,
    D,
    C0,  # channels from C0 to C0 + TILE
    TILE,
    LAST,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    p = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(first + p), tl.load(first + p + 1)
    if start < stop:
        if tl.load(keys + start) < LAST:
            at = tl.program_id(1) * LANES * VEC + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None]
            c = C0 + at
            h = tl.arange(0, BLOCK_H)
            in_h, in_c = h < HEADS, (at < TILE) & (c < C)
            s00 = tl.zeros([BLOCK_N, LANES, VEC], ACC)
            s01 = tl.zeros([BLOCK_N, LANES, VEC], ACC)
            s10 = tl.zeros([BLOCK_N, LANES, VEC], ACC)
            s11 = tl.zeros([BLOCK_N, LANES, VEC], ACC)
            for i0 in range(start, stop, BLOCK_N):
                i = i0 + tl.arange(0, BLOCK_N)
                in_i = i < stop
                sample = tl.load(order + i, mask=in_i, other=0)
                _live, _y0, _x0, fy, fx = locate(samples, sample, in_i, H, W, ACC, tl.int32)
                query, d = sample // D, sample % D
                hq = (query // Q * HEADS + h[:, None]) * Q + query % Q  # [BLOCK_H, BLOCK_N]
                in_hi = in_h[:, None] & in_i[None]
                w = tl.load(coef + hq * D + d, mask=in_hi, other=0).to(ACC)[:, :, None, None]
                in_row = in_hi[:, :, None, None] & (in_c & (c < ROW_C))[None, None]
                r = tl.load(rows + (hq * ROW_C)[:, :, None, None] + c[None, None], mask=in_row, other=0).to(ACC)
                a = tl.sum(w * r, 0)
                if OCTAVES > 0:
                    if C0 + tl.program_id(1) * LANES * VEC + LANES * VEC > ROW_C:
                        depth = tl.load(depths + sample, mask=in_i, other=0).to(ACC)[:, None, None]
                        turns, _power = octave(depth, tl.maximum(c - ROW_C, 0)[None] // 2)
                        waves = wave(turns, ((c - ROW_C) % 2 == 1)[None])
                        a = tl.where((c < ROW_C)[None], a, tl.sum(w, 0) * waves)
                bottom = fy[:, None, None] * a
                top = a - bottom
                fx = fx[:, None, None]
                s00 += top - fx * top
                s01 += fx * top
                s10 += bottom - fx * bottom
                s11 += fx * bottom
            to = sums + p * 4 * TILE + at
            tl.store(to, tl.sum(s00, 0), mask=at < TILE)
            tl.store(to + TILE, tl.sum(s01, 0), mask=at < TILE)
            tl.store(to + 2 * TILE, tl.sum(s10, 0), mask=at < TILE)
            tl.store(to + 3 * TILE, tl.sum(s11, 0), mask=at < TILE)


@triton.jit(do_not_specialize=["H", "W", "PIXELS", "C0", "TILE"])
def _gather(
    sums,  # [P, 4, TILE]
    begin,  # [cells + 1]
    end,
    out,  # [B, H, W, C]
    H,
    W,
    PIXELS,
    C0,
    TILE,
    C: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_p, in_c = pixel < PIXELS, (at < TILE) & (C0 + at < C)
    x, y, b = pixel % W, pixel // W % H, pixel // W // H
    total = tl.zeros([BLOCK_P, BLOCK_C], ACC)
    for corner in tl.static_range(4):
        # the pixel is corner (dy, dx) of the cell (y − dy, x − dx); cells are counted from −1
        cell = (b * (H + 1) + y - corner // 2 + 1) * (W + 1) + x - corner % 2 + 1
        p, stop = tl.load(begin + cell, mask=in_p, other=0), tl.load(end + cell, mask=in_p, other=0)
        for i in range(tl.max(stop - p, 0)):
            there = (p + i < stop)[:, None] & in_c[None]
            source = sums + ((p + i).to(tl.int64) * 4 + corner)[:, None] * TILE + at[None]
            total += tl.load(source, mask=there, other=0)
    tl.store(out + (pixel * C + C0)[:, None] + at[None], total.to(out.dtype.element_ty), mask=in_p[:, None] & in_c[None])
