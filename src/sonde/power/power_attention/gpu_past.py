"""The part of power attention that goes through states of power 2: sums over earlier chunks, and their gradients.

A state is a symmetric matrix M of vectors: φ(x)·S = Σ_ab x_a x_b M_ab. So ∂x_a = 2 Σ_b x_b M_ab·∂: for each b, rows scaled by x_b
are multiplied by M's slice b. Nothing of φ's size is formed, and the sums stay in the accumulator. Keys go through the gradients
of states in the same way as queries go through states, so both kernels serve queries and keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.powers import outer_rows
from .._device.product import landed, nearest
from .._device.tiles import head_program, load, load_rows, multiple, places
from .gpu_states import SIZES, X, Y, packed


@triton.jit
def block_of(chunks_first, heads, T, C, BM: tl.constexpr):
    """What a program computes: its chunk, batch, head, first row, and the row after the last of the chunk."""
    blocks = tl.cdiv(C, BM)
    chunk = tl.program_id(0) // blocks + chunks_first
    _, batch, head = head_program(heads)
    return chunk, batch, head, chunk * C + tl.program_id(0) % blocks * BM, tl.minimum(chunk * C + C, T)


@triton.jit
def times_state(
    x, state, row, column, in_rows, in_columns, x_step, D: tl.constexpr, E: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, ACC: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """φ(x) @ state [BM, BE] for a state without roots: pairs of different pieces count twice. Each step multiplies up to TILES
    tiles (s, t) of φ with the same s."""
    n: tl.constexpr = D // TILE
    FULL: tl.constexpr = n // TILES
    STEPS: tl.constexpr = TILES * FULL * (FULL + 1) // 2 + n % TILES * (FULL + 1)
    WIDE: tl.constexpr = TILE * TILES
    short, wide, k = tl.arange(0, TILE), tl.arange(0, WIDE), tl.arange(0, TILE * WIDE)
    a, b = k // WIDE, k % WIDE
    pieces = x + row[:, None] * x_step
    below = state + (b // TILE * (TILE * TILE) + a * TILE + b % TILE)[:, None] * E + column[None, :]
    total = tl.zeros([BM, BE], ACC)
    s, t = 0, 0
    for step in range(STEPS):
        u = load(pieces + (s * TILE + short)[None, :], in_rows).to(COMMON)
        if TILES == 1:
            v, here = load(pieces + (t * TILE + wide)[None, :], in_rows).to(COMMON), in_columns
        else:
            known, rows = (t * TILE + wide < D)[None, :], (t * TILE + b < D)[:, None]
            v = load(pieces + (t * TILE + wide)[None, :], known if in_rows is None else in_rows & known).to(COMMON)
            here = rows if in_columns is None else in_columns & rows
        twice = tl.where(t + wide // TILE > s, 2.0, 1.0).to(COMMON)  # exact
        matrix = load(below + (s * n - s * (s - 1) // 2 + t - s) * (TILE * TILE * E), here).to(COMMON)
        phi = nearest(outer_rows(u, v * twice[None, :]), COMMON, PRECISION)
        total = landed(tl.dot(phi, matrix, total, input_precision=PRECISION, out_dtype=ACC), step)
        t += TILES
        s, t = tl.where(t < n, s, s + 1), tl.where(t < n, t, s + 1)
    return total


@triton.jit
def times_moments(
    x, moments, row, in_rows, x_step, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
    COMMON: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x @ Z [BM, BD], where the symmetric matrix Z of the moments is split into PARTS, so that it is not rounded."""
    BLOCK: tl.constexpr = 16 if PARTS == 1 or BD < 32 else 32
    a, b = tl.arange(0, BLOCK), tl.arange(0, BD)
    total = tl.zeros([BM, BD], ACC)
    for first in range(0, D, BLOCK):
        inside = in_rows
        if D % BLOCK:
            inside = (first + a < D)[None, :] if in_rows is None else in_rows & (first + a < D)[None, :]
        left = load(x + row[:, None] * x_step + (first + a)[None, :], inside)
        for part in tl.static_range(PARTS):
            at = moments + ((PARTS - 1 - part) * D + first + a)[:, None] * D + b[None, :]
            right = load(at, None if BD == D else (first + a < D)[:, None] & (b < D)[None, :])
            total = tl.dot(left.to(COMMON), right, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def times_slices(
    rows, x, x_row, state, i, in_rows, n, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Σ_b x_b · (rows @ M_bᵀ) [BM, BD]: half of the gradient of φ(x)·M·rows with respect to x. Each step multiplies SLICES of M."""
    a, each, k = tl.arange(0, BD), tl.arange(0, SLICES), tl.arange(0, SLICES * BE)
    slice, column = k // BE, k % BE
    total = tl.zeros([rows.shape[0], BD], ACC)
    for b in range(0, D, SLICES):
        inside = in_rows
        if D % SLICES:
            inside = (b + each < D)[None, :] if in_rows is None else in_rows & (b + each < D)[None, :]
        numbers = load(x + i[:, None] * x_row + (b + each)[None, :], inside)
        at = state + packed(a[None, :], (b + slice)[:, None], n, TILE) * E + column[:, None]
        known = None if BD == D and BE == E else (a < D)[None, :] & ((column < E) & (b + slice < D))[:, None]
        matrix = load(at, known)
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
    first_chunk,  # the first that has a state
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
    EVEN: tl.constexpr,  # blocks of rows end where chunks do
    BM: tl.constexpr,
    TILES: tl.constexpr,
):
    n: tl.constexpr = D // TILE
    SPAN: tl.constexpr = n * (n + 1) // 2 * TILE * TILE
    chunk, batch, head, first, stop = block_of(first_chunk, h * groups, T, C, BM)
    if not EVEN:  # noqa: SIM102 (decided at compile time)
        if first >= stop:  # the last chunk is shorter, and has fewer blocks
            return
    i = places(first, BM, OFFSET)
    x += batch * multiple(x_batch, UNIT) + head * multiple(x_head, UNIT)
    x_step, column = multiple(x_row, UNIT), tl.arange(0, BE)
    inside, here = None if EVEN else (i < stop)[:, None], None if BE == E else (column < E)[None, :]
    at = (batch * chunks + chunk) * h + head // groups
    total = times_state(
        x, states + at * SPAN * E, i, column, inside, here, x_step, D, E, TILE, BM, BE, ACC, COMMON, PRECISION, TILES
    )
    row = (batch * h * groups + head) * T + i
    factor = tl.full([BM], 1, ACC)
    if factors is not None:
        factor = tl.load(factors + (batch * h + head // groups) * T + i, mask=i < stop, other=0)
        total *= factor[:, None]
    tl.store(sums + row[:, None] * E + column[None, :], total, mask=(i < stop)[:, None] & (column < E)[None, :])
    if norms is not None:
        toward = times_moments(x, moments + at * PARTS * D * D, i, inside, x_step, D, BD, PARTS, BM, ACC, COMMON, EXACT)
        queries = load_rows(x, i, None if EVEN else stop, x_step, D, BD, ACC)
        tl.store(norms + row, tl.sum(toward * queries, 1) * factor, mask=i < stop)


@triton.jit(do_not_specialize=[*SIZES, "first_chunk", *X, *Y])
def _past_gradients(
    x,  # as in `_past_sums`
    y,  # [B, h · groups, T, e], rows contiguous: gradients of results; or values
    rate,  # [B, h · groups, T]: ∂(φ(x)·state) is this times y; None stands for 1
    shift,  # [B, h · groups, T]: ∂(φ(x)·moments)
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
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    SLICES: tl.constexpr,
):
    n: tl.constexpr = D // TILE
    SPAN: tl.constexpr = n * (n + 1) // 2 * TILE * TILE
    chunk, batch, head, first, stop = block_of(first_chunk, h * groups, T, C, BM)
    if not EVEN:  # noqa: SIM102 (decided at compile time)
        if first >= stop:  # the last chunk is shorter, and has fewer blocks
            return
    i = places(first, BM, OFFSET)
    x += batch * multiple(x_batch, X_UNIT) + head * multiple(x_head, X_UNIT)
    y += batch * multiple(y_batch, Y_UNIT) + head * multiple(y_head, Y_UNIT)
    x_step, inside = multiple(x_row, X_UNIT), None if EVEN else (i < stop)[:, None]
    rows = load_rows(y, i, None if EVEN else stop, multiple(y_row, Y_UNIT), E, BE, COMMON)
    at = (batch * chunks + chunk) * h + head // groups
    row = (batch * h * groups + head) * T + i
    total = times_slices(rows, x, x_step, states + at * SPAN * E, i, inside, n, D, E, BD, BE, TILE, ACC, COMMON, PRECISION, SLICES)
    if rate is not None:  # before the moments: after them, registers of a Hopper spill
        total *= tl.load(rate + row, mask=i < stop, other=0)[:, None]
    toward = times_moments(x, moments + at * PARTS * D * D, i, inside, x_step, D, BD, PARTS, BM, ACC, COMMON, EXACT)
    if rate is not None:
        toward *= tl.load(shift + row, mask=i < stop, other=0)[:, None]
    column = tl.arange(0, BD)[None, :]
    tl.store(d_x + row[:, None] * D + column, 2 * (total + toward), mask=(i < stop)[:, None] & (column < D))
