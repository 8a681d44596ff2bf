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

from ..op.gpu import accumulator, cdiv, launch
from ._gpu_taps import fetch, locate, octave, wave

PIECE = 64
TILES = 5  # tiles of channels whose sums one program keeps in registers
BLOCK_C = 32
BLOCK_N = 4  # samples of a piece that are in flight together
BLOCK_PIXELS = 16
BLOCK = 1024  # samples per program where one thread serves one sample
ROOM = 1 << 26  # bytes that the workspace may always take; more only where the images are larger than that


def images_gradient(T, out: Tensor) -> None:
    """∂T/∂images into `out` ``[B, H, W, C]``, every element of which is written."""
    B = out.shape[0]
    chunk = batch_chunk(T.images, T.samples, T.wide)
    for b in range(0, B, chunk):
        part = {
            name: x[b : b + chunk]
            for name in ("images", "samples", "coef", "rows", "depths")
            if (x := getattr(T, name)) is not None
        }
        _images_gradient(T._replace(**part), out[b : b + chunk])


def batch_chunk(images: Tensor, samples: Tensor, wide: torch.dtype) -> int:
    """Images that are worked on at a time, so that the workspace stays within its room."""
    B = images.shape[0]
    room = max(ROOM, images.numel() * wide.itemsize)
    return max(1, min(B, room * B // max(1, _bytes(images, samples, wide))))


def workspace(images: Tensor, samples: Tensor, wide: torch.dtype) -> int:
    """Bytes in use beside the result."""
    chunk = batch_chunk(images, samples, wide)
    return _bytes(images[:chunk], samples[:chunk], wide)


def _bytes(images: Tensor, samples: Tensor, wide: torch.dtype) -> int:
    n, P = samples.numel() // 2, _pieces(images, samples)
    sort = n * (4 + 4 + 8 + 8)  # keys and their order, twice
    sums = n * 4 + (P + 1) * 4 + (_cells(images) + 1) * 8 + P * 4 * _tile(images) * wide.itemsize
    return max(sort, sums)


def _cells(images: Tensor) -> int:
    B, H, W, _ = images.shape
    return B * (H + 1) * (W + 1)


def _pieces(images: Tensor, samples: Tensor) -> int:
    """An upper bound that needs no look at the data."""
    n = samples.numel() // 2
    return min(n, cdiv(n, PIECE) + _cells(images))


def _tile(images: Tensor) -> int:
    return min(TILES, cdiv(images.shape[3], BLOCK_C)) * BLOCK_C


def _images_gradient(T, out: Tensor) -> None:
    images, samples = T.images, T.samples
    (B, H, W, C), (_, Q, D, _) = images.shape, samples.shape
    n, P, last = B * Q * D, _pieces(images, samples), _cells(images)
    if not n or not out.numel():
        out.zero_()
        return
    acc = accumulator(T.wide)
    per_sample = (cdiv(n, BLOCK), 1, 1)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=samples.device)

    keys = new(n)
    launch(_keys, (samples, keys), per_sample, (H, W, Q * D, n, last), (acc, BLOCK), 4)
    keys, order = torch.sort(keys, stable=True)
    order = order.int()
    starts = new(n, dtype=torch.bool)
    launch(_starts, (keys, starts), per_sample, (n,), (PIECE, BLOCK), 4)
    piece = torch.cumsum(starts, 0, dtype=torch.int32)  # 1 for the first
    first, begin, end = new(P + 1).fill_(n), new(last + 1).fill_(P), new(last + 1).zero_()
    launch(_bounds, (keys, piece, first, begin, end), per_sample, (n,), (BLOCK,), 4)
    del keys, starts, piece

    tile = _tile(images)
    sums = new(P, 4, tile, dtype=T.wide)
    pixels = (cdiv(B * H * W, BLOCK_PIXELS), tile // BLOCK_C, 1)
    for c0 in range(0, C, tile):
        launch(
            _sums, (samples, T.coef, T.rows, T.depths, order, first, begin, sums), (P, 1, 1), (H, W, Q, D, last),
            (C, c0, tile, T.heads, T.octaves, acc, BLOCK_N, BLOCK_C, tile // BLOCK_C), 1,
        )  # fmt: skip
        constants = (C, out.stride(2), c0, tile, acc, BLOCK_PIXELS, BLOCK_C)
        launch(_gather, (sums, begin, end, out), pixels, (H, W, B * H * W), constants, 4)


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
    y, x = fetch(samples, i, i < N, ACC)
    live, y0, x0, _, _ = locate(y, x, H, W, tl.int32)
    key = ((i // QD).to(tl.int32) * (H + 1) + y0 + 1) * (W + 1) + x0 + 1
    tl.store(keys + i, tl.where(live, key, LAST), mask=i < N)


@triton.jit(do_not_specialize=["N"])
def _starts(
    keys,  # [N], sorted
    starts,  # [N], whether a piece starts here
    N,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, before = tl.load(keys + i, mask=i < N), tl.load(keys + i - 1, mask=(i > 0) & (i < N), other=-1)
    tl.store(starts + i, (i % PIECE == 0) | (key != before), mask=i < N)


@triton.jit(do_not_specialize=["N"])
def _bounds(
    keys,  # [N], sorted
    piece,  # [N], number of the sample's piece, from 1
    first,  # [P + 1], first sample of each piece
    begin,  # [cells + 1], first piece of each cell; P where there is none
    end,  # [cells + 1], and the one after its last; 0 where there is none
    N,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, before, after = i < N, (i > 0) & (i < N), i + 1 < N
    key, p = tl.load(keys + i, mask=here), tl.load(piece + i, mask=here)
    tl.store(first + p - 1, i.to(tl.int32), mask=here & (p != tl.load(piece + i - 1, mask=before, other=0)))
    tl.store(begin + key, p - 1, mask=here & (key != tl.load(keys + i - 1, mask=before, other=-1)))
    tl.store(end + key, p, mask=here & (key != tl.load(keys + i + 1, mask=after, other=-1)))


@triton.jit(do_not_specialize=["H", "W", "Q", "D", "LAST"])
def _sums(
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C − 2·OCTAVES]
    depths,  # [B, Q, D]
    order,  # [N], which sample
    first,  # [P + 1]
    begin,  # [cells + 1]
    sums,  # [P, 4, TILE]
    H,
    W,
    Q,
    D,
    LAST,
    C: tl.constexpr,
    C0: tl.constexpr,  # channels from C0 to C0 + TILE
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    p = tl.program_id(0).to(tl.int64)
    if p < tl.load(begin + LAST):  # the samples behind it see no pixel
        start, stop = tl.load(first + p), tl.load(first + p + 1)
        totals = ()  # of each tile, the sums of its four corners
        for _ in tl.static_range(4 * TILES):
            totals = totals + (tl.zeros([BLOCK_N, BLOCK_C], ACC),)
        i = start + tl.arange(0, BLOCK_N)[:, None]
        next_sample = tl.load(order + i, mask=i < stop, other=0)
        for _ in range(start, stop, BLOCK_N):
            sample, in_i = next_sample.to(tl.int64), i < stop
            i += BLOCK_N
            next_sample = tl.load(order + i, mask=i < stop, other=0)  # its latency is hidden in this turn
            y, x = fetch(samples, sample, in_i, ACC)
            _live, _y0, _x0, fy, fx = locate(y, x, H, W, tl.int32)
            query, d = sample // D, sample % D
            hq = query // Q * (HEADS * Q) + query % Q
            w = ()
            w_all = tl.zeros([BLOCK_N, 1], ACC)
            for h in tl.static_range(HEADS):
                w = w + (tl.load(coef + (hq + h * Q) * D + d, mask=in_i, other=0).to(ACC),)
                w_all += w[h]
            if OCTAVES > 0:
                depth = tl.load(depths + sample, mask=in_i, other=0).to(ACC)
            sums_ = ()
            for t in tl.static_range(TILES):
                c = C0 + t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                a = tl.zeros([BLOCK_N, BLOCK_C], ACC)
                for h in tl.static_range(HEADS):
                    a += w[h] * tl.load(rows + (hq + h * Q) * ROW_C + c, mask=in_i & (c < ROW_C), other=0).to(ACC)
                if OCTAVES > 0 and C0 + (t + 1) * BLOCK_C > ROW_C:
                    turns, _power = octave(depth, tl.maximum(c - ROW_C, 0) // 2)
                    a = tl.where(c < ROW_C, a, w_all * wave(turns, (c - ROW_C) % 2 == 1))
                bottom = fy * a
                top = a - bottom
                s = totals[4 * t : 4 * t + 4]
                sums_ = sums_ + (s[0] + (top - fx * top), s[1] + fx * top, s[2] + (bottom - fx * bottom), s[3] + fx * bottom)
            totals = sums_
        for t in tl.static_range(TILES):
            at = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            for corner in tl.static_range(4):
                total = tl.sum(totals[4 * t + corner], 0, keep_dims=True)
                tl.store(sums + (p * 4 + corner) * TILE + at, total, mask=at < TILE)


@triton.jit(do_not_specialize=["H", "W", "PIXELS"])
def _gather(
    sums,  # [P, 4, TILE]
    begin,  # [cells + 1]
    end,
    out,  # [B, H, W, C]
    H,
    W,
    PIXELS,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    C0: tl.constexpr,
    TILE: tl.constexpr,
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
    tl.store(out + (pixel * STRIDE + C0)[:, None] + at[None], total.to(out.dtype.element_ty), mask=in_p[:, None] & in_c[None])
