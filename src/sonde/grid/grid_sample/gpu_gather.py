"""The gradient of images with a fixed order of additions: each pixel adds up the samples around it, in their order.

A cell is the square, or the cube, between pixels. Samples are grouped by cell. A pixel visits the cells that it is a corner of and
adds, sample by sample, the sample's row of the result's gradient times the pixel's weight. If a cell has more than PIECE samples,
those after the first PIECE are summed beforehand, a piece at a time: a pixel that a million samples see has sixteen thousand terms
left.

The samples of one cell among BLOCK consecutive samples form a run, and the runs of a cell form a linked list. Where a cell's
samples are stored and how its list is linked may differ from call to call; a sample's place in its cell, the number of the cell's
samples before it, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...jit.launch import Launch, accumulator, cdiv, power_of_2, vector_of
from ...jit.steps import Pass
from ...op.plan import Determinism
from .._device.axes import along, coordinate, weight
from .._device.long_sums import compensated, two_sum

PIECE = 64
BLOCK = 128  # samples per program
BLOCK_CELLS = 1024
TILE = 1024  # bytes that a warp sums at a time, 32 per thread


class Problem(NamedTuple):
    """Samples ``[B, points]``, where `group` consecutive rows see one image; and the layout of the tensors."""

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
    grids: int  # each serves equally many consecutive rows
    of_grid: tuple[int, ...]  # strides: b, point, coordinate
    row: int  # stride from one row of channels to the next, in the result's gradient
    stride: int  # stride from one pixel to the next, in the output

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


def add_gather(p: Pass, n: Problem, grad: str, grid: str, out: str, writes: Sequence[str]) -> None:
    """Steps that write the gradient of the images into every pixel of `out`; `grad` has a row of channels for each sample."""
    N, same = n.samples, Determinism.RUN_TO_RUN
    if not N:
        p.call("torch.zero_", Tensor.zero_, [out], writes=writes)
        return
    per_sample = (cdiv(N, BLOCK), 1, 1)
    sizes = (N, n.points, n.Z, n.H, n.W, n.group, n.images * n.group // n.grids, *n.of_grid, n.cells)
    how = (n.dim, n.taps, n.padding, n.align, accumulator(n.wide), BLOCK)
    pieces = cdiv(N, PIECE)
    table = p.buffer("table", [2 * n.cells + 1 + pieces], torch.int32, fill=0)
    first, ids = p.buffer("first", [n.cells], torch.int32), p.buffer("ids", [N], torch.int32)
    shares = p.buffer("shares", [N, n.dim], n.wide) if n.taps > 1 else None
    ranks, links = p.buffer("ranks", [N], torch.int32), p.buffer("links", [N], torch.int64)
    p.start(_cell_runs, [grid, table, ranks, links], Launch(per_sample, sizes, how, BLOCK // 32), promise=same)
    p.start(_cell_rooms, [table, first], Launch((cdiv(n.cells, BLOCK_CELLS), 1, 1), (n.cells,), (BLOCK_CELLS,), 4), promise=same)
    takes = [grid, table, first, ranks, links, ids, shares]
    p.start(_cell_order, takes, Launch(per_sample, sizes, (*how, PIECE), max(1, BLOCK // 128)), promise=same)
    tile = TILE // n.wide.itemsize
    block_c = min(tile, power_of_2(n.C))
    block_p = tile // block_c
    vector = vector_of(16 // p.slots[grad].dtype.itemsize, n.C, n.row, n.stride)
    of_row = (n.dim, n.taps, accumulator(n.wide), PIECE, vector)
    sums, lists = p.buffer("sums", [pieces, n.corners, n.C], n.wide), [table, first, ids, shares]
    p.start(_crowd_sums, [grad, *lists, sums], Launch((pieces, 1, 1), (n.C, n.row, n.cells), (*of_row, block_c), 1), promise=same)
    pixels = n.images * n.Z * n.H * n.W
    sizes = (n.Z, n.H, n.W, pixels, n.C, n.row, n.stride, n.cells)
    launch = Launch((cdiv(pixels, block_p), cdiv(n.C, block_c), 1), sizes, (*of_row, block_p, block_c), 1)
    p.start(_gather_cells, [grad, *lists, sums, out], launch, writes=writes, promise=same)


@triton.jit
def position(
    grid, b, p, here, axis: tl.constexpr, N, G_B, G_P, G_D, TAPS: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Along one axis: whether a sample sees any pixel; its cell, where 0 is the first that touches a pixel; its position in it."""
    u = coordinate(grid, b, p, here, axis, 1, G_B, G_P, G_D, ACC)
    live, first, t, _slope = along(u, N, TAPS, PAD, ALIGN, tl.int32)
    cell = first + (TAPS - 1)
    return live & (cell >= 0) & (first < N), cell, t


@triton.jit
def places(
    grid, i, here, P, Z, H, W, INPUT_GROUP, GRID_GROUP, G_B, G_P, G_D, DIM: tl.constexpr, TAPS: tl.constexpr, PAD: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For samples `i`: whether they see any pixel, their cells (32-bit numbers), and positions in them."""
    MORE: tl.constexpr = TAPS - 1
    b, p = i // P, (i % P).to(tl.int64)
    cell, there, t = b // INPUT_GROUP, here, ()
    b = (b // GRID_GROUP).to(tl.int64)
    if DIM == 3:
        inside, z, tz = position(grid, b, p, here, 2, Z, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
        cell, there, t = cell * (Z + MORE) + z, there & inside, (tz,)
    inside, y, ty = position(grid, b, p, here, 1, H, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
    cell, there = cell * (H + MORE) + y, there & inside
    inside, x, tx = position(grid, b, p, here, 0, W, G_B, G_P, G_D, TAPS, PAD, ALIGN, ACC)
    return there & inside, cell * (W + MORE) + x, (tx, ty) + t


SIZES = ["N", "P", "Z", "H", "W", "INPUT_GROUP", "GRID_GROUP", "G_B", "G_P", "G_D", "CELLS"]


@triton.jit(do_not_specialize=SIZES)
def _cell_runs(
    grid,  # [B / GRID_GROUP, P, DIM]
    table,  # zeros; [2, CELLS]: the first run of each cell's list (its first sample + 1; 0: none), and the cell's number of samples
    ranks,  # [N], how many samples of the same run come before a sample
    links,  # [N], at each run's first sample: the next run of the list, in the same form, and this run's number of samples
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
    each = tl.arange(0, BLOCK)
    i = tl.program_id(0) * BLOCK + each
    there, cell, _t = places(grid, i, i < N, P, Z, H, W, INPUT_GROUP, GRID_GROUP, G_B, G_P, G_D, DIM, TAPS, PAD, ALIGN, ACC)
    cell = tl.where(there, cell, -1)
    same = (cell[:, None] == cell[None, :]).to(tl.int32)
    both = tl.sum(tl.where(each[:, None] < each[None, :], same * (BLOCK * 2 + 1), same), 0)  # two sums in one
    rank, length = both // (BLOCK * 2), both % (BLOCK * 2)
    tl.store(ranks + i, rank, mask=there)
    leads = there & (rank == 0)
    tl.atomic_add(table + CELLS + cell, length, mask=leads, sem="relaxed")
    # with any scope but the system's, an exchange does not compile for AMD in Triton 3.6 and 3.7 (triton-lang/triton#11019)
    next = tl.atomic_xchg(table + cell, i + 1, mask=leads, sem="relaxed", scope="sys")
    tl.store(links + i, (next.to(tl.int64) << 32) + length, mask=leads)


@triton.jit(do_not_specialize=["CELLS"])
def _cell_rooms(
    table,  # the next element counts the samples that have been given a place so far
    first,  # [CELLS], where each cell's samples begin
    CELLS,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(table + CELLS + cell, mask=cell < CELLS, other=0)
    start = tl.atomic_add(table + CELLS + CELLS, tl.sum(count), sem="relaxed")
    tl.store(first + cell, start + tl.cumsum(count) - count, mask=cell < CELLS)


@triton.jit(do_not_specialize=SIZES)
def _cell_order(
    grid,
    table,  # then [N / PIECE]: for each PIECE places, cell + 1 of the piece that starts there, unless it is its cell's first
    first,
    ranks,
    links,
    ids,  # [N], samples sorted by cell, in their order within it
    shares,  # [N, DIM], their positions in the cell; None if not needed
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
    PIECE: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK
    i = start + tl.arange(0, BLOCK)
    there, cell, t = places(grid, i, i < N, P, Z, H, W, INPUT_GROUP, GRID_GROUP, G_B, G_P, G_D, DIM, TAPS, PAD, ALIGN, ACC)
    place = tl.load(ranks + i, mask=there, other=0)
    run = tl.load(table + cell, mask=there, other=0)
    while tl.max(run) > 0:
        link = tl.load(links + run - 1, mask=run > 0, other=0)
        place += tl.where(run <= start, link.to(tl.int32), 0)  # a run of earlier samples
        run = (link >> 32).to(tl.int32)
    at = (tl.load(first + cell, mask=there, other=0) + place).to(tl.int64)
    tl.store(ids + at, i, mask=there)
    if shares is not None:
        for d in tl.static_range(DIM):
            tl.store(shares + at * DIM + d, t[d], mask=there)
    tl.store(table + CELLS + CELLS + 1 + at // PIECE, cell + 1, mask=there & (place > 0) & (place % PIECE == 0))


@triton.jit
def share(shares, q, here, corner: tl.constexpr, DIM: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr):
    """The weight of the pixel at this corner in the sample at `q`."""
    w = tl.full(q.shape, 1, ACC)
    if TAPS > 1:
        at = shares + q.to(tl.int64) * DIM
        if DIM == 3:
            w = weight(tl.load(at + 2, mask=here, other=0), corner // (TAPS * TAPS), TAPS)
        w = w * weight(tl.load(at + 1, mask=here, other=0), corner // TAPS % TAPS, TAPS)
        w = w * weight(tl.load(at, mask=here, other=0), corner % TAPS, TAPS)
    return w


@triton.jit(do_not_specialize=["C", "ROW", "CELLS"])
def _crowd_sums(
    grad,  # [N, C], rows ROW apart
    table,
    first,
    ids,
    shares,
    sums,  # [N / PIECE, TAPS ** DIM, C]
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
    """Sum the piece that starts among these PIECE places and is not its cell's first; there is at most one."""
    C, ROW = C // VECTOR * VECTOR, ROW // VECTOR * VECTOR
    slot = tl.program_id(0).to(tl.int64)
    cell = tl.load(table + CELLS + CELLS + 1 + slot) - 1
    if cell >= 0:
        begin, count = tl.load(first + cell), tl.load(table + CELLS + cell)
        skip = (slot - begin // PIECE) * PIECE
        start, stop = begin + skip, begin + tl.minimum(skip + PIECE, count)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            for corner in tl.static_range(TAPS**DIM):
                total = tl.zeros([BLOCK_C], ACC)
                for at in range(start, stop):
                    q = at + tl.zeros([1], tl.int64)
                    row = tl.load(ids + q).to(tl.int64) * ROW
                    g = tl.load(grad + row + c, mask=c < C, other=0).to(ACC)
                    total += share(shares, q, q >= 0, corner, DIM, TAPS, ACC) * g
                tl.store(sums + (slot * TAPS**DIM + corner) * C + c, total, mask=c < C)


@triton.jit(do_not_specialize=["Z", "H", "W", "PIXELS", "C", "ROW", "STRIDE", "CELLS"])
def _gather_cells(
    grad,  # [N, C], rows ROW apart
    table,
    first,
    ids,
    shares,
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
    CORNERS: tl.constexpr = TAPS**DIM
    MORE: tl.constexpr = TAPS - 1
    C, ROW, STRIDE = C // VECTOR * VECTOR, ROW // VECTOR * VECTOR, STRIDE // VECTOR * VECTOR
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    in_p, in_c = pixel < PIXELS, c < C
    x, y, b = pixel % W, pixel // W % H, pixel // W // H
    cell = b
    if DIM == 3:
        cell = b // Z * (Z + MORE) + b % Z + MORE
    cell = (cell * (H + MORE) + y + MORE) * (W + MORE) + x + MORE
    begins = ()
    counts = ()
    for corner in tl.static_range(CORNERS):  # the pixel is corner (dz, dy, dx) of the cell (z − dz, y − dy, x − dx)
        of = cell - (corner // (TAPS * TAPS) * (H + MORE) + corner // TAPS % TAPS) * (W + MORE) - corner % TAPS
        begins = begins + (tl.load(first + of, mask=in_p, other=0),)
        counts = counts + (tl.load(table + CELLS + of, mask=in_p, other=0),)
    total = tl.zeros([BLOCK_P, BLOCK_C], ACC)
    lost = tl.zeros_like(total)
    for corner in tl.static_range(CORNERS):
        begin, count = begins[corner], counts[corner]
        most = tl.max(count)
        part = tl.zeros_like(total)
        for i in range(tl.minimum(most, PIECE)):
            here = i < count
            row = tl.load(ids + begin + i, mask=here, other=0).to(tl.int64) * ROW
            g = tl.load(grad + row + c, mask=here & in_c, other=0).to(ACC)
            part += share(shares, begin + i, here, corner, DIM, TAPS, ACC) * g
        total, lost = two_sum(total, lost, part)
        for skip in range(PIECE, most, PIECE):
            slot = (begin // PIECE + skip // PIECE).to(tl.int64)
            part = tl.load(sums + (slot * CORNERS + corner) * C + c, mask=(skip < count) & in_c, other=0)
            total, lost = two_sum(total, lost, part)
    total = compensated(total, lost)
    tl.store(out + pixel.to(tl.int64) * STRIDE + c, total.to(out.dtype.element_ty), mask=in_p & in_c)
