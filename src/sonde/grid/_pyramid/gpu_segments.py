"""The deterministic gradient of pyramid rows: samples are sorted by cell, then summed in a fixed order by ``_scatter.segments``.

Both operators use the same description: N samples per row of the result's gradient; POINTS consecutive samples are in the same
level, REPEAT consecutive samples share a location. Every level has its own cells, one more than pixels along each axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...jit.launch import Launch, accumulator, cdiv
from ...jit.steps import Pass
from ...op.plan import Determinism
from .._device.long_sums import compensated, two_sum, zeros
from .._scatter.segments import BLOCK, BLOCK_PIXELS, add_segments, bytes_at_most, first_samples, next_samples, pieces, put_sums
from .gpu_levels import Levels, along, block_of, fetch_location, inside, level, put, shares

TILES = 4  # channel tiles whose sums one program keeps in registers
BLOCK_N = 4  # samples that a program processes at once
WORKSPACE = 1 << 26  # bytes that the workspace may always use; more only if the rows themselves are larger


class Problem(NamedTuple):
    B: int
    S: int  # rows per image; a row has all heads
    Q: int
    heads: int
    C: int  # channels per head
    G: int  # groups of channels, each with its own weights
    N: int  # samples per query and head
    points: int
    repeat: int
    levels: Levels
    drop: bool
    wide: torch.dtype
    int64: bool

    @property
    def cells(self) -> int:
        """Cells per image and head; for unchecked levels, an upper bound for any that do not overlap."""
        if not self.levels.table or self.levels.mask:
            return 4 * self.S + self.levels.number
        sizes = zip(self.levels.table[::3], self.levels.table[1::3])
        return sum((h + 1) * (w + 1) for h, w in sizes if h and w)

    @property
    def block_c(self) -> int:
        return block_of(max(1, self.C // max(1, self.G)))

    @property
    def tiles(self) -> int:
        return self.G * cdiv(self.C // max(1, self.G), self.block_c)

    @property
    def tile(self) -> int:
        """Channels that are processed at a time."""
        return min(TILES, self.tiles) * self.block_c


def add_rows_gradient(p: Pass, n: Problem, slots: Mapping[str, str], out: str, writes: Sequence[str]) -> None:
    """Steps that write the gradient of the rows into all of `out` ``[B, S, heads, C]``, a few images at a time."""
    if not n.B * n.Q * n.heads * n.N * n.C * n.S:
        p.call("torch.zero_", Tensor.zero_, [out], writes=writes, promise=Determinism.RUN_TO_RUN)
        return
    table, number = p.buffer("table", [n.levels.number, 4], torch.int64), n.levels.number
    constants = (*n.levels.constants, tl.int64 if n.int64 else tl.int32)
    launch = Launch((1, 1, 1), (number, n.cells), constants, 1)
    p.start(_cells, [slots["shapes"], slots["starts"], table], launch, promise=Determinism.RUN_TO_RUN)
    chunk = batch_chunk(n)
    for b in range(0, n.B, chunk):
        operands = {name: slots[name] for name in ("locations", "weights", "grad")}
        some = {name: p.rows(slot, b, b + chunk) for name, slot in dict(operands, out=out).items()}
        _add_some(p, n._replace(B=min(chunk, n.B - b)), table, some, writes if b + chunk >= n.B else ())


def batch_chunk(n: Problem) -> int:
    """Images that are processed at a time, limited by the workspace."""
    room = max(WORKSPACE, n.B * n.S * n.heads * n.C * n.wide.itemsize)
    N, last = n.B * n.Q * n.heads * n.N, n.B * n.heads * n.cells
    needed = bytes_at_most(N, last, pieces(N, last) * 4 * n.tile * n.wide.itemsize)
    return max(1, min(n.B, room * n.B // max(1, needed)))


def _add_some(p: Pass, n: Problem, table: str, slots: Mapping[str, str], writes: Sequence[str]) -> None:
    N, last, acc, same = n.B * n.Q * n.heads * n.N, n.B * n.heads * n.cells, accumulator(n.wide), Determinism.RUN_TO_RUN
    keys = p.buffer("keys", [N], torch.int32 if last < 2**31 else torch.int64)
    what = (n.points, n.repeat, n.levels.number)
    sizes = (N, n.N, n.Q, n.heads, n.cells, last)
    launch = Launch((cdiv(N, BLOCK), 1, 1), sizes, (*what, n.drop, acc, BLOCK), 4)
    p.start(_location_keys, [slots["locations"], table, keys], launch, promise=same)
    of = add_segments(p, keys, N, last)
    P = pieces(N, last)
    sums = p.buffer("sums", [P, 4, n.tile], n.wide)
    each = cdiv(n.C // n.G, n.block_c)  # tiles per group
    pixels = max(1, BLOCK_PIXELS * 32 // n.block_c)
    warps = 8 if n.block_c == 32 else 4  # of ``_row_sums``: with fewer or more it spills registers on sm_89 or sm_90
    at_once = n.tile // n.block_c
    for t0 in range(0, n.tiles, at_once):
        takes = [slots["locations"], slots["weights"], slots["grad"], table, of.order, of.first, of.begin, sums]
        constants = (*what, n.C, n.G, each, acc, BLOCK_N, n.block_c, at_once)
        p.start(_location_sums, takes, Launch((P, 1, 1), (n.N, last, t0), constants, 1), promise=same)
        grid = (n.B * n.heads * cdiv(n.S, pixels), at_once, 1)
        sizes, constants = (n.S, n.heads, n.cells, n.levels.number, t0), (n.C, n.G, each, n.tile, acc, pixels, n.block_c)
        done = writes if t0 + at_once >= n.tiles else ()
        takes = [sums, table, of.begin, of.end, slots["out"]]
        p.start(_row_sums, takes, Launch(grid, sizes, constants, warps), writes=done, promise=same)


@triton.jit(do_not_specialize=["LEVELS", "MOST"])
def _cells(
    shapes,
    starts,
    table,  # [LEVELS, 4]: height, width, first row, first cell; the cell is −1 if a level is empty or exceeds MOST cells in all
    LEVELS,
    MOST,
    TABLE: tl.constexpr,
    MASK: tl.constexpr,
    OFFSET: tl.constexpr,
):
    cell = tl.zeros([], tl.int64)
    for i in range(LEVELS):
        H, W, start = level(shapes, starts, i, TABLE, MASK, OFFSET)
        more = (H.to(tl.int64) + 1) * (W.to(tl.int64) + 1)
        fits = (H > 0) & (W > 0) & (more <= MOST - cell)
        tl.store(table + 4 * i, H.to(tl.int64))
        tl.store(table + 4 * i + 1, W.to(tl.int64))
        tl.store(table + 4 * i + 2, start.to(tl.int64))
        tl.store(table + 4 * i + 3, tl.where(fits, cell, -1))
        cell += tl.where(fits, more, 0)


@triton.jit(do_not_specialize=["SAMPLES", "N", "Q", "HEADS", "CELLS", "LAST"])
def _location_keys(
    locations,  # [SAMPLES / REPEAT, 2]
    table,  # [LEVELS, 4]
    keys,  # [SAMPLES]
    SAMPLES,
    N,
    Q,
    HEADS,
    CELLS,
    LAST,  # the key of samples that see no pixel
    POINTS: tl.constexpr,
    REPEAT: tl.constexpr,
    LEVELS: tl.constexpr,
    DROP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v, u = fetch_location(locations, (i // REPEAT).to(tl.int64), i < SAMPLES, ACC)
    of = table + i // POINTS % LEVELS * 4
    H, W, first = tl.load(of), tl.load(of + 1), tl.load(of + 3)
    here = (i < SAMPLES) & (first >= 0)
    if DROP:
        here = here & inside(v, u)
    y, _fy, top, bottom = along(v, H, tl.int64)
    x, _fx, left, right = along(u, W, tl.int64)
    live = here & (top | bottom) & (left | right)
    query = i // N
    image = query // HEADS // Q * HEADS + query % HEADS
    key = image.to(tl.int64) * CELLS + first + (y + 1) * (W + 1) + x + 1
    tl.store(keys + i, tl.where(live, key, LAST).to(keys.dtype.element_ty), mask=i < SAMPLES)


@triton.jit(do_not_specialize=["N", "LAST", "TILE0"])
def _location_sums(
    locations,  # [samples / REPEAT, 2]
    weights,  # [samples, G]
    grad,  # [samples / N, C]
    table,  # [LEVELS, 4]
    order,  # [samples], indices of the sorted samples
    first,  # [P + 1]
    begin,  # [cells + 1]
    sums,  # [P, 4, TILES·BLOCK_C]
    N,
    LAST,
    TILE0,  # the first tile
    POINTS: tl.constexpr,
    REPEAT: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    EACH: tl.constexpr,  # tiles per group
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    if p < tl.load(begin + LAST):  # the samples after that see no pixel
        start, stop = tl.load(first + p), tl.load(first + p + 1)
        totals = zeros(tl.zeros([BLOCK_N, BLOCK_C], ACC), 4 * TILES)  # sums of the four corners, for each tile
        i, next_in, next_sample = first_samples(order, start, stop, BLOCK_N)
        for _ in range(start, stop, BLOCK_N):
            sample, in_i = next_sample, next_in
            i, next_in, next_sample = next_samples(order, i, stop, BLOCK_N)
            v, u = fetch_location(locations, (sample // REPEAT).to(tl.int64), in_i, ACC)
            of = table + sample // POINTS % LEVELS * 4
            _y, fy, _top, _bottom = along(v, tl.load(of).to(tl.int32), tl.int32)
            _x, fx, _left, _right = along(u, tl.load(of + 1).to(tl.int32), tl.int32)
            s00, s01, s10, s11 = shares(fy, fx)
            sums_ = ()
            for t in tl.static_range(TILES):
                g = (TILE0 + t) // EACH
                at = (TILE0 + t) % EACH * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                in_g = in_i & (g < G)
                w = tl.load(weights + sample.to(tl.int64) * G + g, mask=in_g, other=0).to(ACC)
                a = tl.load(grad + (sample // N).to(tl.int64) * C + g * (C // G) + at, mask=in_g & (at < C // G), other=0).to(ACC)
                a = w * a
                s = totals[4 * t : 4 * t + 4]
                sums_ = sums_ + (s[0] + s00 * a, s[1] + s01 * a, s[2] + s10 * a, s[3] + s11 * a)
            totals = sums_
        put_sums(sums, p, totals, TILES, BLOCK_C)


@triton.jit(do_not_specialize=["S", "HEADS", "CELLS", "LEVELS", "TILE0"])
def _row_sums(
    sums,  # [P, 4, TILE]
    table,  # [LEVELS, 4]
    begin,  # [cells + 1]
    end,  # [cells + 1]
    out,  # [B, S, HEADS, C]
    S,
    HEADS,
    CELLS,
    LEVELS,
    TILE0,
    C: tl.constexpr,
    G: tl.constexpr,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum all pieces around the pixel of each row, in every level that contains the row."""
    blocks = tl.cdiv(S, BLOCK_P)
    image = tl.program_id(0) // blocks  # of a head
    row = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    tile = TILE0 + tl.program_id(1)
    at = tile % EACH * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = (tile // EACH < G) & (at < C // G)
    begin += image.to(tl.int64) * CELLS
    end += image.to(tl.int64) * CELLS
    sums += tl.program_id(1) * BLOCK_C
    total = tl.zeros([BLOCK_P, BLOCK_C], ACC)
    lost = tl.zeros_like(total)
    for i in range(LEVELS):
        of = table + 4 * i
        H, W, first = tl.load(of), tl.load(of + 1).to(tl.int32), tl.load(of + 3).to(tl.int32)
        pixel = row - tl.load(of + 2)
        in_p = (row < S) & (pixel >= 0) & (pixel < H * W) & (first >= 0)
        if tl.max(in_p.to(tl.int32), 0) > 0:
            at_pixel, width = tl.where(in_p, pixel, 0).to(tl.int32), tl.maximum(W, 1)
            y, x = at_pixel // width, at_pixel % width
            for corner in range(4):
                # the pixel is corner (dy, dx) of the cell (y − dy, x − dx)
                cell = first + (y - corner // 2 + 1) * (W + 1) + x - corner % 2 + 1
                p, stop = tl.load(begin + cell, mask=in_p, other=0), tl.load(end + cell, mask=in_p, other=0)
                for k in range(tl.max(stop - p, 0)):
                    there = (p + k < stop)[:, None] & in_c[None]
                    source = sums + ((p + k).to(tl.int64) * 4 + corner)[:, None] * TILE + tl.arange(0, BLOCK_C)[None]
                    total, lost = two_sum(total, lost, tl.load(source, mask=there, other=0))
    total = compensated(total, lost)
    to = out + (((image // HEADS).to(tl.int64) * S + row) * HEADS + image % HEADS)[:, None] * C + tile // EACH * (C // G) + at[None]
    put(to, total, (row < S)[:, None] & in_c[None])
