"""The gradient of images in a fixed order of additions: sort the samples by cell, add up pieces, then pixels.

A cell is the square between four pixels. Its samples, sorted together, are cut into pieces of at most PIECE; one program adds
up one piece for each of the cell's corners; last, each pixel adds the pieces of the four cells around it, in order. Nothing
is atomic, nothing waits for the host, and a cell with a million samples is many pieces, not one long loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op.gpu import accumulator, cdiv, launch
from .._device.long_sums import plus, settled

PIECE = 64
BLOCK_C = 32
BLOCK_PIXELS = 16
BLOCK = 1024  # samples per program where one thread serves one sample


class Segments(NamedTuple):
    """Samples sorted by cell, cut into pieces; behind the last cell are those that see no pixel."""

    order: Tensor  # [N], which sample
    first: Tensor  # [P + 1], first sample of each piece
    begin: Tensor  # [cells + 1], first piece of each cell; P where there is none
    end: Tensor  # [cells + 1], and the one after its last; 0 where there is none


def pieces(n: int, cells: int) -> int:
    """An upper bound that needs no look at the data."""
    return min(n, cdiv(n, PIECE) + cells)


def sorting_bytes(n: int) -> int:
    return n * (4 + 4 + 8 + 8)  # keys and their order, twice


def index_bytes(n: int, cells: int) -> int:
    return n * 4 + (pieces(n, cells) + 1) * 4 + (cells + 1) * 8


def segments(keys: list[Tensor], cells: int) -> Segments:
    """Of the samples whose cells are `keys[0]` ``[N]``; the list is emptied, to make room."""
    n, device = len(keys[0]), keys[0].device
    P, per_sample = pieces(n, cells), (cdiv(n, BLOCK), 1, 1)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ordered, order = torch.sort(keys.pop(), stable=True)
    order = order.int()
    starts = new(n, dtype=torch.bool)
    launch(_starts, (ordered, starts), per_sample, (n,), (PIECE, BLOCK), 4)
    piece = torch.cumsum(starts, 0, dtype=torch.int32)  # 1 for the first
    first, begin, end = new(P + 1).fill_(n), new(cells + 1).fill_(P), new(cells + 1).zero_()
    launch(_bounds, (ordered, piece, first, begin, end), per_sample, (n,), (BLOCK,), 4)
    return Segments(order, first, begin, end)


def gather(sums: Tensor, of: Segments, out: Tensor, taps: int, c0: int) -> None:
    """Every pixel of `out` ``[B, (Z,) H, W, C]`` from the pieces around it; channels from `c0`, pixels in a row.

    Cells have `taps` pixels along each axis, `sums` are ``[P, taps ** dimensions, tile]``.
    """
    tile, C, dim = sums.shape[2], out.shape[-1], out.ndim - 2
    block_c = min(BLOCK_C, tile)
    block_p = BLOCK_PIXELS * BLOCK_C // block_c
    (Z, H, W), n = (1, *out.shape[1:-1])[-3:], out.shape[:-1].numel()
    constants = (C, out.stride(-2), c0, tile, accumulator(sums.dtype), block_p, block_c, taps, dim)
    launch(_gather, (sums, of.begin, of.end, out), (cdiv(n, block_p), tile // block_c, 1), (Z, H, W, n), constants, 4)


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


@triton.jit(do_not_specialize=["Z", "H", "W", "PIXELS"])
def _gather(
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
    CORNERS: tl.constexpr = TAPS**DIM
    MORE: tl.constexpr = TAPS - 1  # cells are counted from −MORE
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
            total, lost = plus(total, lost, tl.load(source, mask=there, other=0))
    total = settled(total, lost)
    tl.store(out + (pixel * STRIDE + C0)[:, None] + at[None], total.to(out.dtype.element_ty), mask=in_p[:, None] & in_c[None])
