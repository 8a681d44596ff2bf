"""The gradient of images with a fixed order of additions: sort samples by cell, sum pieces of cells, then sum pieces into pixels.

A cell is the square between four pixels. Its sorted samples are cut into pieces of at most PIECE; one program sums one piece for
each of the cell's corners; then each pixel sums the pieces of the four cells around it, in order. There are no atomics and no host
synchronization, and a cell with a million samples is many pieces, not one long loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...jit.launch import Launch, accumulator, cdiv
from ...jit.steps import Pass
from ...op.plan import Determinism
from .._device.long_sums import compensated, two_sum

PIECE = 64
BLOCK_C = 32
BLOCK_PIXELS = 16
SORTING = 16  # bytes of scratch memory that torch.sort takes per key: the initial indices, and the order in 64 bits
BLOCK = 1024  # samples per program in kernels with one thread per sample


class Segments(NamedTuple):
    """Slots of samples sorted by cell and cut into pieces; samples that see no pixel follow the last cell."""

    order: str  # [N], sample indices
    first: str  # [P + 1], first sample of each piece
    begin: str  # [cells + 1], first piece of each cell; P if it has none
    end: str  # [cells + 1], one past the last piece of each cell; 0 if it has none


def pieces(n: int, cells: int) -> int:
    """An upper bound on the number of pieces, which does not depend on the data."""
    return min(n, cdiv(n, PIECE) + cells)


def bytes_at_most(n: int, cells: int, sums: int) -> int:
    """Peak workspace in bytes for `n` samples, given the bytes of the sums; it decides how many are sorted at a time."""
    index = n * 4 + (pieces(n, cells) + 1) * 4 + (cells + 1) * 8
    return max(n * (4 + 4 + 4 + SORTING), index + sums)


def add_segments(p: Pass, keys: str, n: int, cells: int) -> Segments:
    """Steps that sort samples by cell, their `keys` ``[N]``, and find the pieces."""
    P, per_sample, same = pieces(n, cells), (cdiv(n, BLOCK), 1, 1), Determinism.RUN_TO_RUN
    gives = [("ordered", [n], torch.int32), ("order", [n], torch.int32)]
    ordered, order = p.call("torch.sort", _sorted, [keys], gives, promise=same, scratch=SORTING * n)
    starts = p.buffer("starts", [n], torch.bool)
    p.start(_starts, [ordered, starts], Launch(per_sample, (n,), (PIECE, BLOCK), 4), promise=same)
    count = partial(torch.cumsum, dim=0, dtype=torch.int32)
    (piece,) = p.call("torch.cumsum", count, [starts], [("piece", [n], torch.int32)], promise=same)  # counted from 1
    first, begin = p.buffer("first", [P + 1], torch.int32, fill=n), p.buffer("begin", [cells + 1], torch.int32, fill=P)
    end = p.buffer("end", [cells + 1], torch.int32, fill=0)
    p.start(_bounds, [ordered, piece, first, begin, end], Launch(per_sample, (n,), (BLOCK,), 4), promise=same)
    return Segments(order, first, begin, end)


def _sorted(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(keys, stable=True)
    return ordered, order.int()


def add_pixel_sums(
    p: Pass, sums: str, tile: int, wide: torch.dtype, segments: Segments, out: str, outline: Tensor, taps: int, c0: int,
    writes: Sequence[str] = (),
) -> None:  # fmt: skip
    """A step that sums the pieces around each pixel of `out` ``[B, (Z,) H, W, C]``, for `tile` channels from `c0`.

    Cells have `taps` pixels along each axis; `sums` are ``[P, taps ** dimensions, tile]``; `outline` is a meta tensor like `out`.
    """
    C, dim = outline.shape[-1], outline.ndim - 2
    block_c = min(BLOCK_C, tile)
    block_p = BLOCK_PIXELS * BLOCK_C // block_c
    (Z, H, W), n = (1, *outline.shape[1:-1])[-3:], outline.shape[:-1].numel()
    constants = (C, outline.stride(-2), c0, tile, accumulator(wide), block_p, block_c, taps, dim)
    registers = 64 if tile < C else None  # with several tiles, the compiler would spill a few to fit more programs
    launch = Launch((cdiv(n, block_p), tile // block_c, 1), (Z, H, W, n), constants, 4, registers=registers)
    p.start(_pixel_sums, [sums, segments.begin, segments.end, out], launch, writes=writes, promise=Determinism.RUN_TO_RUN)


@triton.jit
def first_samples(order, start, stop, BLOCK_N: tl.constexpr):
    """The first block of a piece's samples → positions in the order, mask, sample indices."""
    i = start + tl.arange(0, BLOCK_N)[:, None]
    return i, i < stop, tl.load(order + i, mask=i < stop, other=0)


@triton.jit
def next_samples(order, i, stop, BLOCK_N: tl.constexpr):
    """The next block, prefetched one step ahead to hide its latency."""
    i += BLOCK_N
    return i, i < stop, tl.load(order + i, mask=i < stop, other=0)


@triton.jit
def put_sums(sums, p, totals, TILES: tl.constexpr, BLOCK_C: tl.constexpr):
    """Reduce and store the sums of piece `p` for its cell's four corners, TILES tiles of channels: ``[P, 4, TILES·BLOCK_C]``."""
    for t in tl.static_range(TILES):
        at = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        for corner in tl.static_range(4):
            total = tl.sum(totals[4 * t + corner], 0, keep_dims=True)
            tl.store(sums + (p * 4 + corner) * (TILES * BLOCK_C) + at, total)


@triton.jit(do_not_specialize=["N"])
def _starts(
    keys,  # [N], sorted
    starts,  # [N], True where a piece starts: at a new cell, and at every multiple of PIECE
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
    begin,  # [cells + 1], first piece of each cell
    end,  # [cells + 1], one past the last piece of each cell
    N,
    BLOCK: tl.constexpr,
):
    """One thread per sorted sample: those at the edges of a piece or a cell record its bounds."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, before, after = i < N, (i > 0) & (i < N), i + 1 < N
    key, p = tl.load(keys + i, mask=here), tl.load(piece + i, mask=here)
    tl.store(first + p - 1, i.to(tl.int32), mask=here & (p != tl.load(piece + i - 1, mask=before, other=0)))
    tl.store(begin + key, p - 1, mask=here & (key != tl.load(keys + i - 1, mask=before, other=-1)))
    tl.store(end + key, p, mask=here & (key != tl.load(keys + i + 1, mask=after, other=-1)))


@triton.jit(do_not_specialize=["Z", "H", "W", "PIXELS"])
def _pixel_sums(
    sums,  # [P, TAPS ** DIM, TILE]
    begin,  # [cells + 1]
    end,
    out,  # [B, Z, H, W, C]
    Z,
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
    TAPS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Sum all pieces around BLOCK_P pixels for BLOCK_C channels: corner by corner, each cell's pieces in order, compensated."""
    CORNERS: tl.constexpr = TAPS**DIM
    MORE: tl.constexpr = TAPS - 1  # along an axis, the first cell is number −MORE
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_p, in_c = pixel < PIXELS, (at < TILE) & (C0 + at < C)
    x, y, b = pixel % W, pixel // W % H, pixel // W // H
    z, b = b % Z, b // Z
    total = tl.zeros([BLOCK_P, BLOCK_C], ACC)
    lost = tl.zeros_like(total)
    for corner in tl.static_range(CORNERS):
        # the pixel is corner (dz, dy, dx) of the cell (z − dz, y − dy, x − dx)
        cell = b
        if DIM == 3:
            cell = b * (Z + MORE) + z - corner // (TAPS * TAPS) + MORE
        cell = (cell * (H + MORE) + y - corner // TAPS % TAPS + MORE) * (W + MORE) + x - corner % TAPS + MORE
        p, stop = tl.load(begin + cell, mask=in_p, other=0), tl.load(end + cell, mask=in_p, other=0)
        for i in range(tl.max(stop - p, 0)):
            there = (p + i < stop)[:, None] & in_c[None]
            source = sums + ((p + i).to(tl.int64) * CORNERS + corner)[:, None] * TILE + at[None]
            total, lost = two_sum(total, lost, tl.load(source, mask=there, other=0))
    total = compensated(total, lost)
    tl.store(out + (pixel * STRIDE + C0)[:, None] + at[None], total.to(out.dtype.element_ty), mask=in_p[:, None] & in_c[None])
