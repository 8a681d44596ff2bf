"""Sparse sums of rows: only rows that will receive a gradient are marked, cleared and read; the rest are written as zeros."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, cdiv, power_of_2


class Rows(NamedTuple):
    rows: int
    C: int


class Config(NamedTuple):
    block: int
    num_warps: int


def rows_of(sums: Tensor) -> Rows:
    C = sums.shape[-1]
    return Rows(sums.numel() // max(1, C), C)


def launch_rows(p: Rows, config: Config) -> Launch:
    block_c = min(config.block, power_of_2(p.C))
    block_r = config.block // block_c
    return Launch((cdiv(p.rows, block_r), cdiv(p.C, block_c), 1), (p.rows,), (p.C, block_r, block_c), config.num_warps)


@triton.jit
def mark(p, k00, k01, k10, k11, W):
    """Mark the rows of the cells' corners; `p` points to the top left. Left and right are stored together: mostly one sector."""
    right = tl.arange(0, 2)[None, :]
    p = p[:, None] + right
    tl.store(p, 1, mask=tl.where(right > 0, k01[:, None], k00[:, None]))
    tl.store(p + W[:, None], 1, mask=tl.where(right > 0, k11[:, None], k10[:, None]))


@triton.jit
def tile(i, marks, ROWS, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """→ rows and channels of the `i`-th tile of rows, and a mask of the marked rows."""
    r = i.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return r, c, tl.load(marks + r, mask=r < ROWS, other=0) != 0


@triton.jit(do_not_specialize=["ROWS"])
def _clear_marked(
    sums,  # [ROWS, C]
    marks,  # [ROWS]
    ROWS,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Zero the marked rows of a tile, so that they can be added to."""
    r, c, marked = tile(tl.program_id(0), marks, ROWS, BLOCK_R, BLOCK_C)
    tl.store(sums + r * C + c, tl.zeros([BLOCK_R, BLOCK_C], sums.dtype.element_ty), mask=marked & (c < C))


@triton.jit(do_not_specialize=["ROWS"])
def _round_marked(
    sums,  # [ROWS, C]
    out,  # [ROWS, C]
    marks,  # [ROWS]
    ROWS,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Round the marked rows of a tile to the dtype of `out`; the others become zeros."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: the rows added to last may still be in the cache
    r, c, marked = tile(program, marks, ROWS, BLOCK_R, BLOCK_C)
    x = tl.load(sums + r * C + c, mask=marked & (c < C), other=0)
    tl.store(out + r * C + c, x.to(out.dtype.element_ty), mask=(r < ROWS) & (c < C))


clear_marked = jit.kernel(_clear_marked, "grid.clear_marked", default=lambda p: Config(4096, 8), launch=launch_rows)
round_marked = jit.kernel(_round_marked, "grid.round_marked", default=lambda p: Config(2048, 4), launch=launch_rows)
