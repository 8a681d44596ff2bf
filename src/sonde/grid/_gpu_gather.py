"""The gradient of images in a fixed order of additions: each pixel adds up the samples around it, in their order.

A cell is the square between pixels, or the cube. Samples are sorted by cell; a pixel looks into the cells that it is a corner of
and adds, sample by sample, the row of channels of the result's gradient times the pixel's share in it. Of a cell with more than
PIECE samples the rest is added up before, a piece at a time: a pixel that a million samples see has sixteen thousand terms left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import accumulator, cdiv, launch, power_of_2, vector_of
from ._gpu_axes import along, coordinate

PIECE = 64
BLOCK = 512  # samples per program where one thread serves one sample
KERNELS = ("_cells", "torch.sort", "_lists", "_rest", "_gather")  # that a gradient launches, in order


class Problem(NamedTuple):
    """Samples, ``[B, points]``, of which `group` in succession see one image; how rows of channels and the result are laid out."""

    images: int
    group: int
    points: int
    Z: int
    H: int
    W: int
    C: int
    dim: int
    taps: int  # along an axis: 1 or 2
    padding: int
    align: bool
    wide: torch.dtype
    grids: int  # of which each serves as many in succession
    of_grid: tuple[int, ...]  # strides: b, point, coordinate
    row: int  # from one row of channels to the next, in the result's gradient
    stride: int  # from one pixel to the next, in what is written

    @property
    def samples(self) -> int:
        return self.images * self.group * self.points

    @property
    def cells(self) -> int:
        more = self.taps - 1
        return self.images * (self.Z + more if self.dim == 3 else 1) * (self.H + more) * (self.W + more)

    @property
    def corners(self) -> int:
        return self.taps**self.dim


def workspace(n: Problem) -> int:
    """Bytes in use beside the result."""
    N = n.samples
    lists = N * (4 + 4 + (n.dim * n.wide.itemsize if n.taps > 1 else 0)) + 2 * 4 * n.cells
    sums = cdiv(N, PIECE) * n.corners * n.C * n.wide.itemsize
    return max(N * (4 + 4 + 8 + 8), lists + max(8 * N, sums))  # keys and their order, twice


def gather(n: Problem, grad: Tensor, grid: Tensor, out: Tensor) -> None:
    """The gradient of the images into `out`, every pixel of which is written; `grad` has a row of channels for each sample."""
    N = n.samples
    if not N:
        out.zero_()
        return

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=grad.device)

    per_sample = (cdiv(N, BLOCK), 1, 1)
    sizes = (N, n.points, n.Z, n.H, n.W, n.group, n.images * n.group // n.grids, *n.of_grid, n.cells)
    how = (n.dim, n.taps, n.padding, n.align, accumulator(n.wide), BLOCK)
    keys = new(N)
    launch(_cells, (grid, keys), per_sample, sizes, how, 4)
    ordered, order = torch.sort(keys, stable=True)
    del keys
    ids, shares = new(N), new(N, n.dim, dtype=n.wide) if n.taps > 1 else None
    bounds = torch.zeros(2, n.cells, dtype=torch.int32, device=grad.device)
    launch(_lists, (grid, ordered, order, ids, shares, bounds), per_sample, sizes, how, 4)
    del order
    tile = 2048 // n.wide.itemsize  # numbers of a warp
    block_c = min(128, power_of_2(n.C), tile // n.corners)
    block_p = max(1, tile // (block_c * n.corners))
    vector = vector_of(16 // grad.element_size(), n.C, n.row, n.stride)
    of_row = (n.dim, n.taps, accumulator(n.wide), PIECE, vector)
    sums = new(cdiv(N, PIECE), n.corners, n.C, dtype=n.wide)
    launch(_rest, (grad, ordered, ids, shares, bounds, sums), (len(sums), 1, 1), (N, n.C, n.row, n.cells), (*of_row, block_c), 1)
    pixels = n.images * n.Z * n.H * n.W
    grid_ = (cdiv(pixels, block_p), cdiv(n.C, block_c), 1)
    sizes = (n.Z, n.H, n.W, pixels, n.C, n.row, n.stride, n.cells)
    launch(_gather, (grad, ids, shares, bounds, sums, out), grid_, sizes, (*of_row, block_p, block_c), 1)


@triton.jit
def position(
    grid, b, p, here, axis: tl.constexpr, N, GROUP, G_B, G_P, G_D, TAPS: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Along an axis: whether a sample sees any pixel, its cell, counted from the first that touches a pixel, its place there."""
    u = coordinate(grid, b, p, here, axis, GROUP, G_B, G_P, G_D, ACC)
    live, first, t, _slope = along(u, N, TAPS, PAD, ALIGN, tl.int64)
    cell = first + (TAPS - 1)
    return live & (cell >= 0) & (first < N), cell, t


SIZES = ["N", "P", "Z", "H", "W", "INPUT_GROUP", "GRID_GROUP", "G_B", "G_P", "G_D", "CELLS"]


@triton.jit(do_not_specialize=SIZES)
def _cells(
    grid,  # [B / GRID_GROUP, P, DIM]
    keys,  # [N], the cell of each sample; CELLS where it sees nothing
    N,
    P,
    Z,
    H,
    W,
    INPUT_GROUP,
    GRID_GROUP,
    G_B,
    G_P,
    G_D,
    CELLS,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    MORE: tl.constexpr = TAPS - 1
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, p = i // P, i % P
    cell, there = b // INPUT_GROUP, i < N
    if DIM == 3:
        inside, z, _tz = position(grid, b, p, i < N, 2, Z, GRID_GROUP, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
        cell, there = cell * (Z + MORE) + z, there & inside
    inside, y, _ty = position(grid, b, p, i < N, 1, H, GRID_GROUP, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
    cell, there = cell * (H + MORE) + y, there & inside
    inside, x, _tx = position(grid, b, p, i < N, 0, W, GRID_GROUP, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
    cell, there = cell * (W + MORE) + x, there & inside
    tl.store(keys + i, tl.where(there, cell, CELLS).to(tl.int32), mask=i < N)


@triton.jit(do_not_specialize=SIZES)
def _lists(
    grid,
    ordered,  # [N], keys
    order,  # [N], of samples
    ids,  # [N], the same in 32 bits
    shares,  # [N, DIM], where each is in its cell; None where that does not matter
    bounds,  # [2, CELLS], the first sample of each cell and the one after its last; zeros where there is none
    N,
    P,
    Z,
    H,
    W,
    INPUT_GROUP,
    GRID_GROUP,
    G_B,
    G_P,
    G_D,
    CELLS,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    id = tl.load(order + i, mask=here, other=0)
    tl.store(ids + i, id.to(tl.int32), mask=here)
    if shares is not None:
        b, p = id // P, id % P
        _there, _x, t = position(grid, b, p, here, 0, W, GRID_GROUP, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
        tl.store(shares + i * DIM, t, mask=here)
        _there, _y, t = position(grid, b, p, here, 1, H, GRID_GROUP, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
        tl.store(shares + i * DIM + 1, t, mask=here)
        if DIM == 3:
            _there, _z, t = position(grid, b, p, here, 2, Z, GRID_GROUP, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
            tl.store(shares + i * DIM + 2, t, mask=here)
    key = tl.load(ordered + i, mask=here, other=CELLS)
    before = tl.load(ordered + i - 1, mask=here & (i > 0), other=-1)
    after = tl.load(ordered + i + 1, mask=i + 1 < N, other=-1)
    tl.store(bounds + key, i.to(tl.int32), mask=(key < CELLS) & (key != before))
    tl.store(bounds + CELLS + key, (i + 1).to(tl.int32), mask=(key < CELLS) & (key != after))


@triton.jit
def share(shares, q, here, corner, DIM: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr):
    """What the pixel at this corner has of the sorted sample `q`."""
    w = tl.full(q.shape, 1, ACC)
    if TAPS > 1:
        for d in tl.static_range(DIM):
            t = tl.load(shares + q.to(tl.int64) * DIM + (DIM - 1 - d), mask=here, other=0)
            w *= tl.where((corner >> (DIM - 1 - d)) % 2 == 0, 1 - t, t)
    return w


@triton.jit(do_not_specialize=["N", "C", "ROW", "CELLS"])
def _rest(
    grad,  # [N, C], rows ROW apart
    ordered,
    ids,
    shares,
    bounds,
    sums,  # [N / PIECE, TAPS ** DIM, C]
    N,
    C,
    ROW,
    CELLS,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    ACC: tl.constexpr,
    PIECE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The piece that starts among these PIECE sorted samples, if there is one and it is not its cell's first: one at most is."""
    C, ROW = C // VECTOR * VECTOR, ROW // VECTOR * VECTOR
    slot = tl.program_id(0).to(tl.int64)
    i = slot * PIECE + tl.arange(0, PIECE)
    key = tl.load(ordered + i, mask=i < N, other=CELLS)
    first = tl.load(bounds + key, mask=key < CELLS, other=0)
    starts = (key < CELLS) & (i > first) & ((i - first) % PIECE == 0)
    start = tl.max(tl.where(starts, i, 0), 0)
    if start > 0:
        stop = tl.minimum(start + PIECE, tl.load(bounds + CELLS + tl.load(ordered + start)))
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            for corner in tl.static_range(TAPS**DIM):
                total = tl.zeros([BLOCK_C], ACC)
                for at in range(start, stop):
                    q = at + tl.zeros([1], tl.int64)
                    row = tl.load(ids + q).to(tl.int64) * ROW
                    g = tl.load(grad + row + c, mask=c < C, other=0).to(ACC)
                    total += share(shares, q, q >= 0, corner + tl.zeros([1], tl.int32), DIM, TAPS, ACC) * g
                tl.store(sums + (slot * TAPS**DIM + corner) * C + c, total, mask=c < C)


@triton.jit(do_not_specialize=["Z", "H", "W", "PIXELS", "C", "ROW", "STRIDE", "CELLS"])
def _gather(
    grad,  # [N, C], rows ROW apart
    ids,
    shares,
    bounds,
    sums,
    out,  # [PIXELS, C], pixels STRIDE apart
    Z,
    H,
    W,
    PIXELS,
    C,
    ROW,
    STRIDE,
    CELLS,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    ACC: tl.constexpr,
    PIECE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """All corners' cells at the same time: their samples are far apart in memory, and each waits for its own."""
    CORNERS: tl.constexpr = TAPS**DIM
    MORE: tl.constexpr = TAPS - 1
    C, ROW, STRIDE = C // VECTOR * VECTOR, ROW // VECTOR * VECTOR, STRIDE // VECTOR * VECTOR
    start = tl.program_id(0).to(tl.int64) * BLOCK_P
    each = tl.arange(0, BLOCK_P * CORNERS)[:, None]
    pixel, corner = start + each // CORNERS, each % CORNERS
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    in_p, in_c = pixel < PIXELS, c < C
    x, y, b = pixel % W, pixel // W % H, pixel // W // H
    cell, b = b, b // Z
    if DIM == 3:  # the pixel is corner (dz, dy, dx) of the cell (z − dz, y − dy, x − dx)
        cell = b * (Z + MORE) + cell % Z - corner // (TAPS * TAPS) + MORE
    cell = (cell * (H + MORE) + y - corner // TAPS % TAPS + MORE) * (W + MORE) + x - corner % TAPS + MORE
    first = tl.load(bounds + cell, mask=in_p, other=0)
    count = tl.load(bounds + CELLS + cell, mask=in_p, other=0) - first
    total = tl.zeros([BLOCK_P * CORNERS, BLOCK_C], ACC)
    near = tl.minimum(count, PIECE)
    for i in range(tl.max(near)):
        here = i < near
        row = tl.load(ids + first + i, mask=here, other=0).to(tl.int64) * ROW
        g = tl.load(grad + row + c, mask=here & in_c, other=0).to(ACC)
        total += share(shares, first + i, here, corner, DIM, TAPS, ACC) * g
    pieces = (count - 1) // PIECE  # behind the first
    for j in range(1, tl.max(pieces) + 1):
        slot = (first.to(tl.int64) + j * PIECE) // PIECE
        total += tl.load(sums + (slot * CORNERS + corner) * C + c, mask=(j <= pieces) & in_c, other=0)
    if CORNERS > 1:
        total = tl.sum(tl.reshape(total, [BLOCK_P, CORNERS, BLOCK_C]), 1)
    pixel = start + tl.arange(0, BLOCK_P)[:, None]
    tl.store(out + pixel * STRIDE + c, total.to(out.dtype.element_ty), mask=(pixel < PIXELS) & in_c)
