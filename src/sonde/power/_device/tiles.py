"""Tiles of slabs: where they are in memory, and which one a program computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiple(n, UNIT: tl.constexpr):
    """`n`, written so that the compiler can see that UNIT divides it and use wide loads and masks."""
    if UNIT <= 1:
        return n
    else:
        return n // UNIT * UNIT


@triton.jit
def step(stride, UNIT: tl.constexpr, OFFSET: tl.constexpr = tl.int32):
    """A stride; UNIT 0 stands for a stride of 1, which must be a constant so that neighbours are loaded together.

    A stride that is multiplied by a position of fewer bits than OFFSET needs OFFSET itself.
    """
    if UNIT == 0:
        return 1
    elif OFFSET == tl.int64:  # noqa: SIM300 (a constant on the left is no better)
        return (stride // UNIT * UNIT).to(tl.int64)
    else:
        return stride // UNIT * UNIT


@triton.jit
def places(first, BLOCK: tl.constexpr, OFFSET: tl.constexpr):
    """A tile's positions along one dimension of its slab, as integers wide enough for any offset in it."""
    return (first + tl.arange(0, BLOCK)).to(OFFSET)


@triton.jit
def batch_program():
    """This program's number along the batch, which is the second and third axis of the grid together (see ``batch_grid``)."""
    return (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int64)


@triton.jit
def head_program(heads):
    """If the batch counts heads: this program's number along it, its entry and its head; divided as int32, which is faster."""
    program = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    return program.to(tl.int64), (program // heads).to(tl.int64), (program % heads).to(tl.int64)


@triton.jit
def grouped(program, rows, columns, GROUP: tl.constexpr):
    """The row and column of a program's tile: programs walk through GROUP rows of tiles at once, so that neighbours share reads."""
    per_group = GROUP * columns
    first = program // per_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + program % per_group % height, program % per_group // height


@triton.jit
def load(at, inside):
    """Load a fragment, with zeros where it is not `inside`; None loads all of it without a mask."""
    if inside is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0)


@triton.jit
def load_rows(slab, row, rows, row_step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COMMON: tl.constexpr):
    """[rows, WIDTH] in a fragment of BLOCK columns; zeros outside. If `rows` is None, no row is masked."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = None if rows is None else (row < rows)[:, None]
    if WIDTH < BLOCK:
        inside = column < WIDTH if inside is None else inside & (column < WIDTH)
    return load(slab + row[:, None] * row_step + column, inside).to(COMMON)


@triton.jit
def load_columns(slab, row, rows, row_step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COMMON: tl.constexpr):
    """The same, transposed: [WIDTH, rows]."""
    column = tl.arange(0, BLOCK)[:, None]
    inside = None if rows is None else (row < rows)[None, :]
    if WIDTH < BLOCK:
        inside = column < WIDTH if inside is None else inside & (column < WIDTH)
    return load(slab + row[None, :] * row_step + column, inside).to(COMMON)
