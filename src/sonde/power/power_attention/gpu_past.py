"""The part of power attention that goes through states of power 2: sums over earlier chunks, and their gradients.

A state is a symmetric matrix M of vectors: φ(x)·S = Σ_ab x_a x_b M_ab. So ∂x_a = 2 Σ_b x_b M_ab·∂, a product of rows that are
scaled by one number of x at a time with M's slice b. Nothing of φ's size is formed, and sums stay in the accumulator. Keys go
through the gradients of states in the same way as queries go through states, so both kernels serve both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.powers import outer_rows
from .._device.product import landed, nearest
from .._device.tiles import load_rows, multiple, places
from .._sympow.gpu_kernels import add_pair
from .gpu_states import SIZES, X, Y, packed


@triton.jit
def rows_of(chunks_first, heads, T, C, BM: tl.constexpr, OFFSET: tl.constexpr):
    """Which rows of which chunk and head a program computes: chunk, batch, head, rows, and the row after the chunk's last."""
    blocks = tl.cdiv(C, BM)
    chunk = tl.program_id(0) // blocks + chunks_first
    row_of = tl.program_id(1).to(tl.int64)
    row = places(chunk * C + tl.program_id(0) % blocks * BM, BM, OFFSET)
    return chunk, row_of // heads, row_of % heads, row, tl.minimum(chunk * C + C, T)


@triton.jit
def times_state(
    x, state, row, column, in_rows, in_columns, x_step, n, E: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    ACC: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """φ(x) @ state [BM, BE] for a state without roots: pairs of different pieces count twice."""
    pieces = x + row[:, None] * x_step + tl.arange(0, TILE)[None, :]
    below = state + tl.arange(0, TILE * TILE)[:, None] * E + column[None, :]
    total = tl.zeros([BM, BE], ACC)
    s, t = 0, 1
    for _ in range(n * (n - 1) // 2):
        total = add_pair(total, pieces, below, s, t, n, 1, E, in_rows, in_columns, TILE, COMMON, PRECISION)
        last = t == n - 1
        s = tl.where(last, s + 1, s)
        t = tl.where(last, s + 1, t + 1)
    total *= 2
    for s in range(n):
        total = add_pair(total, pieces, below, s, s, n, 1, E, in_rows, in_columns, TILE, COMMON, PRECISION)
    return total


@triton.jit
def times_moments(
    x, moments, row, in_rows, x_step, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
    COMMON: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x @ Z [BM, BD], where the symmetric matrix Z of the moments is the sum of PARTS, so that it is not rounded."""
    BLOCK: tl.constexpr = 16 if PARTS == 1 else 64 if BD > 64 else BD
    a, b = tl.arange(0, BLOCK), tl.arange(0, BD)
    total = tl.zeros([BM, BD], ACC)
    for first in range(0, D, BLOCK):
        left = tl.load(x + row[:, None] * x_step + (first + a)[None, :], mask=in_rows & (first + a < D)[None, :], other=0)
        for part in tl.static_range(PARTS):
            at = moments + ((PARTS - 1 - part) * D + first + a)[:, None] * D + b[None, :]
            right = tl.load(at, mask=(first + a < D)[:, None] & (b < D)[None, :], other=0)
            total = tl.dot(left.to(COMMON), right, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def times_slices(
    rows, x, x_row, state, i, stop, n, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Σ_b x_b · (rows @ M_bᵀ) [BM, BD]: half the gradient of φ(x)·M·rows by x. SLICES of M are multiplied at a time."""
    a, each, k = tl.arange(0, BD), tl.arange(0, SLICES), tl.arange(0, SLICES * BE)
    slice, column = k // BE, k % BE
    total = tl.zeros([rows.shape[0], BD], ACC)
    for b in range(0, D, SLICES):
        numbers = tl.load(x + i[:, None] * x_row + (b + each)[None, :], mask=(i < stop)[:, None] & (b + each < D)[None, :], other=0)
        at = state + packed(a[None, :], (b + slice)[:, None], n, TILE) * E + column[:, None]
        if BD == D and BE == E:  # then SLICES divides D
            matrix = tl.load(at)
        else:
            matrix = tl.load(at, mask=(a < D)[None, :] & ((column < E) & (b + slice < D))[:, None], other=0)
        scaled = nearest(outer_rows(numbers.to(COMMON), rows), COMMON, PRECISION)
        total = landed(tl.dot(scaled, matrix.to(COMMON), total, input_precision=PRECISION, out_dtype=ACC), b)
    return total


@triton.jit(do_not_specialize=[*SIZES, "first_chunk", *X])
def _past_sums(
    x,  # [B, h · groups, T, d], rows contiguous: queries; or keys, with gradients of states
    factors,  # [B, h, T], or None
    states,  # [B, chunks, h, D, e], of each chunk, without roots
    moments,  # [B, chunks, h, PARTS, d, d], or None
    sums,  # [B, h · groups, T, e], factor · φ(x)·state
    norms,  # [B, h · groups, T], factor · φ(x)·moments; or None
    h,
    groups,
    T,
    C,
    chunks,
    first_chunk,  # that has a state
    x_batch,
    x_head,
    x_row,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    TILE: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
):
    n: tl.constexpr = D // TILE
    SPAN: tl.constexpr = n * (n + 1) // 2 * TILE * TILE
    chunk, batch, head, i, stop = rows_of(first_chunk, h * groups, T, C, BM, OFFSET)
    x += batch * multiple(x_batch, UNIT) + head * multiple(x_head, UNIT)
    x_step, inside, column = multiple(x_row, UNIT), (i < stop)[:, None], tl.arange(0, BE)
    at = (batch * chunks + chunk) * h + head // groups
    total = times_state(
        x, states + at * SPAN * E, i, column, inside, (column < E)[None, :], x_step, n, E, TILE, BM, BE, ACC, COMMON, PRECISION
    )
    row = (batch * h * groups + head) * T + i
    factor = tl.full([BM], 1, ACC)
    if factors is not None:
        factor = tl.load(factors + (batch * h + head // groups) * T + i, mask=i < stop, other=0)
        total *= factor[:, None]
    tl.store(sums + row[:, None] * E + column[None, :], total, mask=inside & (column < E)[None, :])
    if norms is not None:
        toward = times_moments(x, moments + at * PARTS * D * D, i, inside, x_step, D, BD, PARTS, BM, ACC, COMMON, EXACT)
        queries = load_rows(x, i, stop, x_step, D, BD, ACC)
        tl.store(norms + row, tl.sum(toward * queries, 1) * factor, mask=i < stop)


@triton.jit(do_not_specialize=[*SIZES, "first_chunk", *X, *Y])
def _past_gradients(
    x,  # as in `_past_sums`
    y,  # [B, h · groups, T, e], rows contiguous: gradients of results; or values
    rate,  # [B, h · groups, T], ∂(φ(x)·state) is this times y; None: 1
    shift,  # and ∂(φ(x)·moments) this
    states,
    moments,
    d_x,  # [B, h · groups, T, d]
    h,
    groups,
    T,
    C,
    chunks,
    first_chunk,
    x_batch,
    x_head,
    x_row,
    y_batch,
    y_head,
    y_row,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    TILE: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    BM: tl.constexpr,
    SLICES: tl.constexpr,
):
    n: tl.constexpr = D // TILE
    SPAN: tl.constexpr = n * (n + 1) // 2 * TILE * TILE
    chunk, batch, head, i, stop = rows_of(first_chunk, h * groups, T, C, BM, OFFSET)
    x += batch * multiple(x_batch, X_UNIT) + head * multiple(x_head, X_UNIT)
    y += batch * multiple(y_batch, Y_UNIT) + head * multiple(y_head, Y_UNIT)
    x_step, inside = multiple(x_row, X_UNIT), (i < stop)[:, None]
    rows = load_rows(y, i, stop, multiple(y_row, Y_UNIT), E, BE, COMMON)
    at = (batch * chunks + chunk) * h + head // groups
    total = times_slices(rows, x, x_step, states + at * SPAN * E, i, stop, n, D, E, BD, BE, TILE, ACC, COMMON, PRECISION, SLICES)
    toward = times_moments(x, moments + at * PARTS * D * D, i, inside, x_step, D, BD, PARTS, BM, ACC, COMMON, EXACT)
    row = (batch * h * groups + head) * T + i
    if rate is not None:
        total *= tl.load(rate + row, mask=i < stop, other=0)[:, None]
        toward *= tl.load(shift + row, mask=i < stop, other=0)[:, None]
    column = tl.arange(0, BD)[None, :]
    tl.store(d_x + row[:, None] * D + column, 2 * (total + toward), mask=inside & (column < D))
