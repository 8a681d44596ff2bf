"""The gradient of what is sampled along axes, in a fixed order of additions: segments of any mode and padding."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import accumulator, cdiv, launch, power_of_2
from ..op.library import memory_format
from . import _gpu_segments as segments
from ._gpu_axes import MODES, PADDINGS, TAPS, along, axis, coordinate, none
from ._gpu_layout import empty_pixels, pixel_stride, to_pixels, to_planes, transpose
from ._reference import joint_batch

TILES = 5  # tiles of channels whose sums one program keeps in registers
ROOM = 1 << 26  # bytes that the workspace may always take; more only where the input is larger than that


class Cells(NamedTuple):
    """How samples are sorted: the pixels that may have a gradient, with a margin where taps of the bicubic mode are folded."""

    size: tuple[int, ...]
    margin: int
    taps: int
    block_c: int
    tile: int

    @property
    def number(self) -> int:
        return prod(n + self.taps - 1 for n in self.size)


def _cells(input: Tensor, mode: str, padding: str) -> Cells:
    taps, C = TAPS[MODES.index(mode)], max(1, input.shape[1])
    margin = 2 if mode == "bicubic" and padding != "zeros" else 0
    block_c = min(segments.BLOCK_C, power_of_2(C))
    tiles = max(1, min(TILES, cdiv(C, block_c), 16 // taps ** (input.ndim - 2)))
    return Cells(tuple(n + 2 * margin + (margin > 0) for n in input.shape[2:]), margin, taps, block_c, tiles * block_c)


def input_gradient(grad: Tensor, input: Tensor, flat: Tensor, wide: torch.dtype, options: tuple[str, str, bool]) -> Tensor:
    """The gradient of the input, every element of which is written, without atomics."""
    (n, C, *size), layout, cells = input.shape, memory_format(input, True), _cells(input, *options[:2])
    if not grad.numel() or not input.numel():
        return torch.zeros_like(input, memory_format=layout)
    last = layout != torch.contiguous_format
    if _rows_first(grad.shape[1], grad.is_contiguous()):
        grad = to_pixels(grad[:, :, None])[:, :, 0]
    dtype = wide if cells.margin else input.dtype
    if last and not cells.margin:
        out = torch.empty_like(input, memory_format=layout).movedim(1, -1)
    else:
        rows = empty_pixels((n, C, prod(cells.size[:-1]), cells.size[-1]), dtype, input.device)
        out = rows.movedim(1, -1).unflatten(1, cells.size[:-1])
    chunk, per_image = _images_at_a_time(input, flat, wide, cells), grad.shape[0] // n
    for b in range(0, n, chunk):
        m = min(chunk, n - b)
        results = slice(b * per_image, (b + m) * per_image)
        of_grid = flat[results] if flat.shape[0] == grad.shape[0] else flat
        _images_in_order(grad[results], out[b : b + m], of_grid, input, wide, options, cells)
    if cells.margin:
        _fold(out, size, options)
        out = out[:, 2 : 2 + size[0], 2 : 2 + size[1]]
    if last:
        return out.movedim(-1, 1).contiguous(memory_format=layout).to(input.dtype)
    if cells.margin:
        return out.movedim(-1, 1).to(input.dtype).contiguous()
    return to_planes(rows, input.dtype).view(input.shape)


def _rows_first(C: int, contiguous: bool) -> bool:
    """Whether the result's gradient is transposed, so that a sample's channels are one row."""
    return contiguous and C >= 16


def _images_at_a_time(input: Tensor, flat: Tensor, wide: torch.dtype, cells: Cells) -> int:
    """So that the workspace stays within its room; all of them where they share a grid."""
    n, B = input.shape[0], joint_batch(input, flat)
    if flat.shape[0] != B:
        return n
    room = max(ROOM, input.numel() * wide.itemsize)
    return max(1, min(n, room * n // max(1, _index_bytes(n, B * flat.shape[1], cells, wide))))


def _index_bytes(images: int, samples: int, cells: Cells, wide: torch.dtype) -> int:
    last = images * cells.number
    sums = segments.pieces(samples, last) * cells.taps ** len(cells.size) * cells.tile * wide.itemsize
    return max(segments.sorting_bytes(samples), segments.index_bytes(samples, last) + sums)


def workspace(input: Tensor, grid: Tensor, wide: torch.dtype, mode: str, padding: str) -> int:
    cells, n, B = _cells(input, mode, padding), input.shape[0], joint_batch(input, grid)
    if not input.numel() or not grid.numel() or not B:
        return 0
    flat = grid.flatten(1, -2)
    m = _images_at_a_time(input, flat, wide, cells)
    room = _index_bytes(m, m * (B // n) * flat.shape[1], cells, wide)
    if _rows_first(input.shape[1], memory_format(input, True) == torch.contiguous_format):
        room += B * flat.shape[1] * pixel_stride(input.shape[1], input.element_size()) * input.element_size()
    last = memory_format(input, True) != torch.contiguous_format
    if last and not cells.margin:
        return room
    itemsize, result = wide.itemsize if cells.margin else input.element_size(), input.numel() * input.element_size()
    buffer = n * prod(cells.size) * pixel_stride(input.shape[1], itemsize) * itemsize
    more = input.numel() * itemsize if cells.margin and input.dtype != wide else 0
    return max(buffer + more, buffer + room - result)


def launches(input: Tensor, grid: Tensor, wide: torch.dtype, mode: str, padding: str) -> list[str]:
    """What :func:`input_gradient` runs, in order; ``_gather`` writes the gradient, what follows converts it."""
    cells, n, B = _cells(input, mode, padding), input.shape[0], joint_batch(input, grid)
    if not input.numel() or not grid.numel() or not B:
        return ["torch.zeros_like"]
    layout = memory_format(input, True)
    before = [transpose.title] if _rows_first(input.shape[1], layout == torch.contiguous_format) else []
    rounds = ["_keys", "torch.sort", "_starts", "torch.cumsum", "_bounds"] + ["_sums", "_gather"] * cdiv(input.shape[1], cells.tile)
    after = ["torch.Tensor.add_", "torch.Tensor.contiguous"] if cells.margin else []
    if layout == torch.contiguous_format and not cells.margin:
        after = [transpose.title]
    return before + rounds * cdiv(n, _images_at_a_time(input, grid.flatten(1, -2), wide, cells)) + after


def _images_in_order(
    grad: Tensor, out: Tensor, flat: Tensor, input: Tensor, wide: torch.dtype, options: tuple[str, str, bool], cells: Cells
) -> None:
    """The gradient `out` ``[b, (Z,) H, W, C]`` of some images from that of their results, ``[B, C, points]``."""
    n, (B, C, points), dim, taps = out.shape[0], grad.shape, input.ndim - 2, cells.taps
    N, last = B * points, n * cells.number
    P = segments.pieces(N, last)
    sizes = (*(1, *input.shape[2:])[-3:], N, points, last, B // n, B // flat.shape[0], *flat.stride())
    constants = (dim, taps, PADDINGS.index(options[1]), options[2], accumulator(wide))
    keys = [torch.empty(N, dtype=torch.int32 if last < 2**31 else torch.int64, device=grad.device)]
    launch(_keys, (flat, keys[0]), (cdiv(N, segments.BLOCK), 1, 1), sizes, (*constants, cells.margin, segments.BLOCK), 4)
    of = segments.segments(keys, last)
    sums = torch.empty(P, taps**dim, cells.tile, dtype=wide, device=grad.device)
    block_n = min(16, 4 * segments.BLOCK_C // cells.block_c)
    row = (grad.stride(1) == 1, block_n, cells.block_c, cells.tile // cells.block_c)
    for c0 in range(0, C, cells.tile):
        more = (C, c0, *grad.stride())
        launch(_sums, (flat, grad, *of[:3], sums), (P, 1, 1), (*sizes, *more), (*constants, *row), 1)
        segments.gather(sums, of, out, taps, c0)


def _fold(out: Tensor, size: Sequence[int], options: tuple[str, str, bool]) -> None:
    """Add the margins of ``[B, H + 5, W + 5, C]`` to the pixels that stand for them, line by line in a fixed order."""
    for d, n in ((1, size[0]), (2, size[1])):
        for i in (-2, -1, n, n + 1, n + 2):
            if options[1] == "border":
                to = min(max(i, 0), n - 1)
            else:
                period = max(1, 2 * n - 2 if options[2] else 2 * n)
                to = i % period
                to = to if to < n else (period if options[2] else period - 1) - to
            out.select(d, 2 + to).add_(out.select(d, 2 + i))


SAMPLES = ["Z", "H", "W", "N", "P", "LAST", "INPUT_GROUP", "GRID_GROUP", "G_B", "G_P", "G_D"]


@triton.jit(do_not_specialize=SAMPLES)
def _keys(
    grid,  # [B / GRID_GROUP, P, DIM]
    keys,  # [N]
    Z,
    H,
    W,
    N,  # B·P
    P,
    LAST,  # the key of samples that see no pixel
    INPUT_GROUP,
    GRID_GROUP,
    G_B,
    G_P,
    G_D,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, p = i // P, i % P
    key = b // INPUT_GROUP
    sees = i < N
    for d in tl.static_range(DIM - 1, -1, -1):
        n = W if d == 0 else H if d == 1 else Z
        u = coordinate(grid, b, p, i < N, d, GRID_GROUP, G_B, G_P, G_D, ACC)
        live, first, _t, _slope = along(u, n, TAPS, PAD, ALIGN, tl.int32)
        cell = first + (MARGIN + TAPS - 1)
        cells = n + (2 * MARGIN + (MARGIN > 0) + TAPS - 1)
        sees = sees & live & (cell >= 0) & (cell < cells)
        key = key * cells + cell
    tl.store(keys + i, tl.where(sees, key, LAST).to(keys.dtype.element_ty), mask=i < N)


@triton.jit(do_not_specialize=SAMPLES + ["C", "C0", "O_B", "O_C", "O_P"])
def _sums(
    grid,  # [B / GRID_GROUP, P, DIM]
    grad,  # [B, C, P]
    order,  # [N], which sample
    first,  # [pieces + 1]
    begin,  # [cells + 1]
    sums,  # [pieces, TAPS ** DIM, TILES·BLOCK_C]
    Z,
    H,
    W,
    N,
    P,
    LAST,
    INPUT_GROUP,
    GRID_GROUP,
    G_B,
    G_P,
    G_D,
    C,
    C0,  # channels from C0 to C0 + TILES·BLOCK_C
    O_B,
    O_C,
    O_P,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,  # the channels of a sample are neighbours
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    SLICES: tl.constexpr = TAPS if DIM == 3 else 1
    CORNERS: tl.constexpr = SLICES * TAPS * TAPS
    piece = tl.program_id(0).to(tl.int64)
    if piece < tl.load(begin + LAST):  # the samples behind it see no pixel
        start, stop = tl.load(first + piece), tl.load(first + piece + 1)
        totals = ()  # of each tile, the sums of its corners
        for _ in tl.static_range(CORNERS * TILES):
            totals = totals + (tl.zeros([BLOCK_N, BLOCK_C], ACC),)
        i = start + tl.arange(0, BLOCK_N)[:, None]
        for _ in range(start, stop, BLOCK_N):
            in_i = i < stop
            sample = tl.load(order + i, mask=in_i, other=0).to(tl.int64)
            i += BLOCK_N
            b, p = sample // P, sample % P
            ux = coordinate(grid, b, p, in_i, 0, GRID_GROUP, G_B, G_P, G_D, ACC)
            uy = coordinate(grid, b, p, in_i, 1, GRID_GROUP, G_B, G_P, G_D, ACC)
            _xs, _kx, wx, _sx = axis(ux, W, 1, TAPS, PAD, ALIGN, tl.int32, False)
            _ys, _ky, wy, _sy = axis(uy, H, 1, TAPS, PAD, ALIGN, tl.int32, False)
            if DIM == 3:
                uz = coordinate(grid, b, p, in_i, 2, GRID_GROUP, G_B, G_P, G_D, ACC)
                _zs, _kz, wz, _sz = axis(uz, Z, 1, TAPS, PAD, ALIGN, tl.int32, False)
            else:
                _zs, _kz, wz, _sz = none(ux)
            more = ()
            for t in tl.static_range(TILES):
                c = C0 + t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                row = grad + b * O_B + p * O_P + (c if ROWS else c.to(tl.int64) * O_C)
                g = tl.load(row, mask=in_i & (c < C), other=0).to(ACC)
                for z in tl.static_range(SLICES):
                    for y in tl.static_range(TAPS):
                        for x in tl.static_range(TAPS):
                            w = wz[z] * wy[y] * wx[x]
                            more = more + (totals[t * CORNERS + (z * TAPS + y) * TAPS + x] + w * g,)
            totals = more
        for t in tl.static_range(TILES):
            at = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            for corner in tl.static_range(CORNERS):
                total = tl.sum(totals[t * CORNERS + corner], 0, keep_dims=True)
                tl.store(sums + (piece * CORNERS + corner) * (TILES * BLOCK_C) + at, total)
