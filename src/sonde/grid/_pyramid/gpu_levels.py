"""Feature pyramids on GPUs: how kernels read levels, and device code that locates a sample in a level.

Levels are described either by a table ``[levels, 3]`` of (height, width, first row), made of numbers that the host knows, or by
the caller's tensors ``[levels, 2]`` and ``[levels]``, which only kernels read.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...jit.launch import cdiv, launch, power_of_2, vector_of
from ...op.cache import MAX_ENTRIES
from ...op.torch_private import is_fake


class Levels(NamedTuple):
    """How levels are passed to a kernel."""

    number: int
    table: tuple[int, ...]  # (h, w, start) of each; empty if they are tensors
    mask: bool  # unchecked: kernels must mask reads outside of the rows

    @property
    def constants(self) -> tuple[bool, bool]:
        return bool(self.table), self.mask


def levels_of(number: int, levels: tuple[int, ...], rows: int) -> Levels:
    """Levels of features with this many rows; numbers are checked again, since not every caller comes through the public API."""
    sizes = zip(levels[::3], levels[1::3], levels[2::3])
    return Levels(number, levels, not levels or not all(0 <= start <= rows - h * w for h, w, start in sizes))


class Layout(NamedTuple):
    """Strides of the rows of ``[B, S, …]``, with contiguous channels."""

    copy: bool  # the features must be copied first
    row: int  # stride
    batch: int  # stride
    vector: int  # a power of two that divides `batch`; 1 if the data pointer is not aligned to two elements
    int64: bool  # offsets within an image or its gradient need 64 bits


def layout_of(features: Tensor, force_int64: bool) -> Layout:
    B, S, *inner = features.shape
    width, dense, copy = prod(inner), 1, False
    for n, stride in zip(inner[::-1], features.stride()[:1:-1]):
        copy, dense = copy or (n > 1 and stride != dense), dense * n
    batch, row = features.stride()[:2]
    copy = copy or (S > 1 and row < width)
    if copy or S <= 1:
        row = width
    if copy or B <= 1:
        batch = S * row
    known = not copy and not is_fake(features)
    odd = known and features.data_ptr() // features.element_size() % 2
    return Layout(copy, row, batch, 1 if odd else vector_of(16, batch), force_int64 or S * max(row, width, 2) >= 2**31 - 2**20)


class Table(NamedTuple):
    tensor: Tensor  # [levels, 3]
    stream: int
    event: Any  # recorded after the launches that write it; None once they have finished


_tables: dict[tuple, Table] = {}  # never evicted: a captured graph may hold the address


class LevelTable:
    """Returns the level table on a device; once the table is complete, without any lookup."""

    def __init__(self, levels: tuple[int, ...], device: torch.device) -> None:
        self.levels, self.device = levels, device
        self.dtype = _dtype(levels)
        self.tensor: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.tensor is None:
            table = table_of(self.levels, self.device)
            if table.event is not None:
                return table.tensor
            self.tensor = table.tensor
        return self.tensor


def _dtype(levels: tuple[int, ...]) -> torch.dtype:
    return torch.int32 if max(max(levels), -min(levels)) < 2**31 else torch.int64


def table_of(levels: tuple[int, ...], device: torch.device) -> Table:
    """The cached level table. A kernel writes it from its arguments, which needs no copy from the host.

    A table that is made during a graph capture belongs to the graph and is not cached.
    """
    found = _tables.get((levels, device))
    if device.type != "cuda":
        return found or _kept(levels, device, Table(_write(levels, device), 0, None))
    if found is not None and found.event is None:
        return found
    stream = torch.cuda.current_stream().cuda_stream
    if torch.cuda.is_current_stream_capturing():  # events cannot be queried now
        return Table(_write(levels, device), stream, ())
    if found is None:
        found = Table(_write(levels, device), stream, torch.cuda.Event())
        found.event.record()
    elif found.event.query():
        found = found._replace(event=None)
    elif found.stream != stream:
        found.event.wait()
    return _kept(levels, device, found)


def _kept(levels: tuple[int, ...], device: torch.device, table: Table) -> Table:
    if len(_tables) < MAX_ENTRIES or (levels, device) in _tables:
        _tables[levels, device] = table
    return table


def _write(levels: tuple[int, ...], device: torch.device) -> Tensor:
    table = torch.empty(len(levels) // 3, 3, dtype=_dtype(levels), device=device)
    for i in range(len(table)):
        launch(_level, (table,), (1, 1, 1), (i, *levels[3 * i : 3 * i + 3]), (), 1)
    return table


@triton.jit(do_not_specialize=["AT", "H", "W", "START"])
def _level(
    table,  # [levels, 3]
    AT,
    H,
    W,
    START,
):
    tl.store(table + 3 * AT, H)
    tl.store(table + 3 * AT + 1, W)
    tl.store(table + 3 * AT + 2, START)


@triton.jit
def level(shapes, starts, i, TABLE: tl.constexpr, MASK: tl.constexpr, OFFSET: tl.constexpr):
    """Height, width and first row of level `i`; with MASK, a level with absurd sizes is empty."""
    if TABLE:
        H, W, start = tl.load(shapes + 3 * i), tl.load(shapes + 3 * i + 1), tl.load(shapes + 3 * i + 2)
    else:
        H, W, start = tl.load(shapes + 2 * i), tl.load(shapes + 2 * i + 1), tl.load(starts + i)
    if MASK:
        MOST: tl.constexpr = 2**61 if OFFSET.primitive_bitwidth == 64 else 2**30
        H, W, start = H.to(tl.int64), W.to(tl.int64), start.to(tl.int64)
        sane = (H > 0) & (H < 2**31) & (W > 0) & (W < 2**31) & (start > -MOST) & (start < MOST)
        sane = sane & (tl.where(sane, H, 0) * W < MOST)
        H, W, start = tl.where(sane, H, 0), tl.where(sane, W, 0), tl.where(sane, start, 0)
    return H.to(OFFSET), W.to(OFFSET), start.to(OFFSET)


@triton.jit
def fetch_location(locations, i, here, ACC: tl.constexpr):
    """Load (v, u) of locations, stored as (u, v); masked ones are outside of every level."""
    u = tl.load(locations + 2 * i, mask=here, other=-1.0).to(ACC)
    v = tl.load(locations + 2 * i + 1, mask=here, other=-1.0).to(ACC)
    return v, u


@triton.jit
def along(u, N, OFFSET: tl.constexpr):
    """A coordinate in [0, 1] on an axis of N pixels → first pixel, position in the cell, whether that pixel and the next exist.

    Every operation is rounded, as in the reference. The minimum makes NaN and huge values merely outside, and prevents an FMA,
    which would round once instead of twice: the last bit decides on which side of a pixel's edge a sample lies.
    """
    size = N.to(u.dtype)
    x = tl.maximum(tl.minimum(u * size, 2 * size + 2) - 0.5, -2)
    first = tl.floor(x).to(OFFSET)
    return first, x - first.to(u.dtype), below(first, N), below(first + 1, N)


@triton.jit
def below(i, n):
    """0 ≤ i < n, in one comparison."""
    if i.dtype == tl.int64:
        found = i.to(tl.uint64, bitcast=True) < n.to(tl.uint64, bitcast=True)
    else:
        found = i.to(tl.uint32, bitcast=True) < n.to(tl.uint32, bitcast=True)
    return found


@triton.jit
def inside(v, u):
    """Whether a sample is inside the image, for ``outside="drop"``."""
    return (u > 0) & (u < 1) & (v > 0) & (v < 1)


@triton.jit
def sees(v, u, H, W, OFFSET: tl.constexpr):
    """Whether a sample sees any pixel of a level."""
    _y, _fy, top, bottom = along(v, H, OFFSET)
    _x, _fx, left, right = along(u, W, OFFSET)
    return (top | bottom) & (left | right)


@triton.jit
def locate(v, u, here, H, W, start, S, ROW: tl.constexpr, MASK: tl.constexpr, OFFSET: tl.constexpr):
    """→ the row of the first corner of each sample's cell, position (fy, fx) in the cell, masks of the corners, any corner."""
    y, fy, top, bottom = along(v, H, OFFSET)
    x, fx, left, right = along(u, W, OFFSET)
    row = start + y * W + x
    left, right = left & here, right & here
    live = (left | right) & (top | bottom)
    k00, k01, k10, k11 = left & top, right & top, left & bottom, right & bottom
    if MASK:
        k00, k01, k10, k11 = within(k00, k01, k10, k11, row, W, S.to(OFFSET), ROW)
    return row, fy, fx, k00, k01, k10, k11, live


@triton.jit
def within(k00, k01, k10, k11, row, W, S, ROW: tl.constexpr):
    """Mask corners outside of the rows, and those so far from the first that offsets (rows are ROW apart) would overflow."""
    FAR: tl.constexpr = 2**63 - 1 if row.dtype == tl.int64 else 2**31 // (ROW if ROW > 0 else 1)
    k10, k11 = k10 & (W < FAR), k11 & (W < FAR)
    return k00 & below(row, S), k01 & below(row + 1, S), k10 & below(row + W, S), k11 & below(row + W + 1, S)


@triton.jit
def shares(fy, fx):
    """The bilinear weights of the four corners."""
    return (1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx


@triton.jit
def slopes(d00, d01, d10, d11, fy, fx):
    """Derivatives in y and x of the bilinear interpolation of four values."""
    return (1 - fx) * (d10 - d00) + fx * (d11 - d01), (1 - fy) * (d01 - d00) + fy * (d11 - d10)


@triton.jit
def scatter(p, value, s00, s01, s10, s11, k00, k01, k10, k11, in_c, W, STRIDE: tl.constexpr):
    """Add `value` times its weight to each corner; `p` points to the first one."""
    tl.atomic_add(p, s00 * value, mask=k00 & in_c, sem="relaxed")
    tl.atomic_add(p + STRIDE, s01 * value, mask=k01 & in_c, sem="relaxed")
    tl.atomic_add(p + W * STRIDE, s10 * value, mask=k10 & in_c, sem="relaxed")
    tl.atomic_add(p + (W * STRIDE + STRIDE), s11 * value, mask=k11 & in_c, sem="relaxed")


@triton.jit
def put(p, x, mask):
    """Store, rounded to the dtype that `p` points to."""
    tl.store(p, x.to(p.dtype.element_ty), mask=mask)


def block_of(channels: int) -> int:
    """Channels per tile: 32 (eight threads, one vector access each), or fewer if too many threads would idle."""
    if channels <= 8:
        return power_of_2(channels)
    return min((32, 16, 8), key=lambda width: (max(1.25 * channels, cdiv(channels, width) * width), -width))
