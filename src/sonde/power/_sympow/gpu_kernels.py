"""Kernels of symmetric powers: φ itself, φ times a matrix, the sums of φ's outer products with rows, and φ's gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.powers import choose, exact, outer_columns, outer_rows, power_columns
from .._device.product import landed
from .._device.tiles import batch_program, load, multiple, places, step

STRIDES = ["x_batch", "x_row", "x_column", "y_batch", "y_row", "y_column", "z_batch", "z_row", "z_column"]
SIZES = ["R", "N", *STRIDES]
FACTORS = ["alpha", "alpha_low", "beta", "beta_low"]


@triton.jit(do_not_specialize=["R", "x_row", "x_column"])
def _expand(
    x,  # [R, d], any strides
    tiles,  # [tiles, P]
    roots,  # [tiles]
    out,  # [R, D]
    R,
    x_row,
    x_column,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    across = tl.cdiv(D, BD)
    tile = tl.program_id(0) % across
    row = places(tl.program_id(0) // across * BR, BR, tl.int64)[:, None]
    column = tile * BD + tl.arange(0, BD)[None, :]
    inside = (row < R) & (column < D)
    x_rows, x_step = x + row * step(x_row, UNITS[0]), step(x_column, UNITS[1], OFFSET)
    if PAIRED:
        s, t = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
        pieces = x_rows + tl.arange(0, T)[None, :] * x_step
        u = tl.load(pieces + s * T * x_step, mask=row < R, other=0).to(ACC)
        v = tl.load(pieces + t * T * x_step, mask=row < R, other=0).to(ACC)
        phi = outer_rows(u, v)
        if SCALED:
            phi *= tl.where(s == t, tl.full([], 1, ACC), tl.full([], 1.4142135623730951, ACC))
    else:
        phi = power_columns(x_rows, x_step, column, inside, tiles, roots, P, T, SPAN, SCALED, ACC)
    tl.store(out + row * D + column, phi.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_pair(
    total, x, y, s, t, n, x_step, y_step, in_rows, in_columns, T: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the product of φ's tile (s, t), s ≤ t, without its root; `x` points to the rows' first pieces."""
    first = (s * n - s * (s - 1) // 2 + t - s) * (T * T)
    u, v = load(x + s * T * x_step, in_rows).to(COMMON), load(x + t * T * x_step, in_rows).to(COMMON)
    below = load(y + first * y_step, in_columns).to(COMMON)
    return tl.dot(outer_rows(u, v), below, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit(do_not_specialize=[*SIZES, *FACTORS])
def _times(
    x,  # [B, R, d], any strides
    y,  # [B, D, N], any strides
    z,  # [B, R, N], any strides; None if nothing is added
    tiles,
    roots,
    out,  # [B, R, N], contiguous: alpha · φ(x) @ y + beta · z
    R,
    N,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    z_batch,
    z_row,
    z_column,
    alpha,
    alpha_low,
    beta,
    beta_low,
    d: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    N = multiple(N, UNITS[6])
    across = tl.cdiv(N, BN)
    batch = batch_program()
    row = places(tl.program_id(0) // across * BR, BR, OFFSET)
    column = places(tl.program_id(0) % across * BN, BN, OFFSET)
    in_rows, in_columns = (row < R)[:, None], (column < N)[None, :]
    x_step, y_step = step(x_column, UNITS[1], OFFSET), step(y_row, UNITS[2], OFFSET)
    x_rows = x + batch * multiple(x_batch, max(UNITS[0], UNITS[1])) + row[:, None] * step(x_row, UNITS[0])
    y_columns = y + batch * multiple(y_batch, max(UNITS[2], UNITS[3])) + column[None, :] * step(y_column, UNITS[3])
    total = tl.zeros([BR, BN], ACC)
    if PAIRED:  # pairs of different pieces first, then the squares: the sum of the pairs is multiplied by the root
        n: tl.constexpr = d // T
        x_rows += tl.arange(0, T)[None, :] * x_step
        y_columns += places(0, SPAN, OFFSET)[:, None] * y_step
        s, t = 0, 1
        for pair in range(n * (n - 1) // 2):
            total = add_pair(total, x_rows, y_columns, s, t, n, x_step, y_step, in_rows, in_columns, T, COMMON, PRECISION)
            total = landed(total, pair)
            last = t == n - 1
            s = tl.where(last, s + 1, s)
            t = tl.where(last, s + 1, t + 1)
        if SCALED:
            total *= 1.4142135623730951
        for s in range(n):
            total = add_pair(total, x_rows, y_columns, s, s, n, x_step, y_step, in_rows, in_columns, T, COMMON, PRECISION)
            total = landed(total, s)
    else:
        for first in range(0, D, BD):
            k = first + tl.arange(0, BD)
            phi = power_columns(x_rows, x_step, k[None, :], in_rows & (k < D)[None, :], tiles, roots, P, T, SPAN, SCALED, ACC)
            below = tl.load(y_columns + k[:, None].to(OFFSET) * y_step, mask=in_columns & (k < D)[:, None], other=0).to(COMMON)
            total = landed(tl.dot(phi.to(COMMON), below, total, input_precision=PRECISION, out_dtype=ACC), first)
    total = total * exact(alpha, alpha_low, ACC)
    inside = in_rows & in_columns
    if z is not None:
        z += batch * multiple(z_batch, max(UNITS[4], UNITS[5])) + (
            row[:, None] * step(z_row, UNITS[4]) + column[None, :] * step(z_column, UNITS[5])
        )
        total += exact(beta, beta_low, ACC) * tl.load(z, mask=inside, other=0).to(ACC)
    tl.store(out + batch * R * N + (row[:, None] * N + column[None, :]), total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*SIZES, *FACTORS])
def _sums(
    x,  # [B, R, d], any strides
    y,  # [B, R, N], any strides
    z,  # [B, D, N], any strides; None if nothing is added
    tiles,
    roots,
    out,  # [B, D, N], contiguous: alpha · φ(x)ᵀ @ y + beta · z
    R,
    N,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    z_batch,
    z_row,
    z_column,
    alpha,
    alpha_low,
    beta,
    beta_low,
    d: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    N = multiple(N, UNITS[6])
    across = tl.cdiv(N, BN)
    batch = batch_program()
    tile = tl.program_id(0) // across
    k = tile * BD + tl.arange(0, BD)  # columns of φ
    column = places(tl.program_id(0) % across * BN, BN, OFFSET)
    in_columns = (column < N)[None, :]
    x_step, y_step = step(x_column, UNITS[1], OFFSET), step(y_row, UNITS[2], OFFSET)
    x += batch * multiple(x_batch, max(UNITS[0], UNITS[1]))
    y_rows = y + batch * multiple(y_batch, max(UNITS[2], UNITS[3])) + column[None, :] * step(y_column, UNITS[3])
    factor = exact(alpha, alpha_low, ACC)
    if PAIRED:
        s, t = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
        pieces = x + tl.arange(0, T)[:, None] * x_step
        if SCALED:
            factor *= tl.where(s == t, tl.full([], 1, ACC), tl.full([], 1.4142135623730951, ACC))
    total = tl.zeros([BD, BN], ACC)
    for first in range(0, R, BR):
        row = places(first, BR, OFFSET)
        in_rows = (row < R)[None, :]
        if PAIRED:
            here = pieces + row[None, :] * step(x_row, UNITS[0])
            u = tl.load(here + s * T * x_step, mask=in_rows, other=0).to(COMMON)
            v = tl.load(here + t * T * x_step, mask=in_rows, other=0).to(COMMON)
            phi = outer_columns(u, v)
        else:
            here = x + row[None, :] * step(x_row, UNITS[0])
            phi = power_columns(here, x_step, k[:, None], in_rows & (k < D)[:, None], tiles, roots, P, T, SPAN, SCALED, ACC).to(
                COMMON
            )
        right = tl.load(y_rows + row[:, None] * y_step, mask=(row < R)[:, None] & in_columns, other=0).to(COMMON)
        total = landed(tl.dot(phi, right, total, input_precision=PRECISION, out_dtype=ACC), first)
    total = total * factor
    inside = (k < D)[:, None] & in_columns
    k = k.to(OFFSET)[:, None]
    if z is not None:
        z += batch * multiple(z_batch, max(UNITS[4], UNITS[5])) + (
            k * step(z_row, UNITS[4]) + column[None, :] * step(z_column, UNITS[5])
        )
        total += exact(beta, beta_low, ACC) * tl.load(z, mask=inside, other=0).to(ACC)
    tl.store(out + batch * D * N + (k * N + column[None, :]), total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def power_gradient(y, z, k, y_column, z_row, z_step, in_rows, known, N, FUSED: tl.constexpr, ACC: tl.constexpr,
                   COMMON: tl.constexpr, PRECISION: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
                   BD: tl.constexpr):  # fmt: skip
    """∂φ of some rows and columns [BR, BD]: loaded or, if FUSED, computed as the product of rows of y and of z."""
    if FUSED:
        total = tl.zeros([BR, BD], ACC)
        for first in range(0, N, BN):
            n = first + tl.arange(0, BN)
            left = tl.load(y + n[None, :] * y_column, mask=in_rows & (n < N)[None, :], other=0).to(COMMON)
            right = tl.load(z + k[None, :] * z_row + n[:, None] * z_step, mask=known[None, :] & (n < N)[:, None], other=0).to(
                COMMON
            )
            total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=ACC)
        return total
    else:
        return tl.load(y + k[None, :] * y_column, mask=in_rows & known[None, :], other=0).to(ACC)


@triton.jit(do_not_specialize=[*SIZES, "alpha", "alpha_low"])
def _gradient(
    x,  # [B, R, d], any strides
    y,  # [B, R, N], any strides, the first factor of ∂φ; without z, [B, R, D], all of it
    z,  # [B, D, N], any strides, the other factor; or None
    others,  # tiles of the power P − 1
    roots,  # of the tiles of this power
    out,  # [B, R, d], laid out as STRAIGHT says
    R,
    N,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    z_batch,
    z_row,
    z_column,
    alpha,
    alpha_low,
    d: tl.constexpr,
    STRAIGHT: tl.constexpr,  # the result is contiguous along rows, not along columns
    D_LESS: tl.constexpr,  # columns of the power P − 1
    P: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,
    SPAN_LESS: tl.constexpr,
    SCALED: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """∂x_j: insert j at every position of every product of P − 1 other indices; each resulting column of φ occurs once."""
    n: tl.constexpr = d // T
    N = multiple(N, UNITS[6])
    batch, blocks = batch_program(), tl.cdiv(R, BR)
    row = places(tl.program_id(0) % blocks * BR, BR, OFFSET)
    j = tl.program_id(0) // blocks
    s, digit = j // T, j % T
    in_rows = (row < R)[:, None]
    x_step = step(x_column, UNITS[1], OFFSET)
    x_rows = x + batch * multiple(x_batch, max(UNITS[0], UNITS[1])) + row[:, None] * step(x_row, UNITS[0])
    y_rows = y + batch * multiple(y_batch, max(UNITS[2], UNITS[3])) + row[:, None] * step(y_row, UNITS[2])
    if z is not None:
        z += batch * multiple(z_batch, max(UNITS[4], UNITS[5]))
    total = tl.zeros([BR], ACC)
    for first in range(0, D_LESS, BD):
        o = first + tl.arange(0, BD)
        tile, digits = o // SPAN_LESS, o % SPAN_LESS
        product = tl.full([BR, BD], 1, ACC)
        u, a = (), ()  # tiles and digits of the others
        span = SPAN_LESS
        for i in tl.static_range(P - 1):
            span = span // T
            u_i = tl.load(others + tile * (P - 1) + i, mask=o < D_LESS, other=0)
            a_i = digits // span % T
            at = x_rows + (u_i * T + a_i)[None, :] * x_step
            product = product * tl.load(at, mask=in_rows & (o < D_LESS)[None, :], other=0).to(ACC)
            u = u + (u_i,)
            a = a + (a_i,)
        for i in tl.static_range(P):
            known = o < D_LESS
            if i > 0:
                known = known & (u[i - 1] <= s)
            if i < P - 1:
                known = known & (s <= u[i])
            rank, within, before = o * 0, o * 0, o * 0
            for q in tl.static_range(P):
                if q < i:
                    u_q, a_q = u[q], a[q]
                elif q == i:
                    u_q, a_q = o * 0 + s, o * 0 + digit
                else:
                    u_q, a_q = u[q - 1], a[q - 1]
                rank += choose(n - before + P - 1 - q, P - q) - choose(n - u_q + P - 1 - q, P - q)
                within = within * T + a_q
                before = u_q
            k = (rank * SPAN + within).to(OFFSET)
            phi = power_gradient(
                y_rows, z, k, step(y_column, UNITS[3], OFFSET), step(z_row, UNITS[4]), step(z_column, UNITS[5], OFFSET), in_rows,
                known, N, z is not None, ACC, COMMON, PRECISION, BR, BN, BD,
            )  # fmt: skip
            if SCALED:
                phi *= tl.load(roots + rank, mask=known, other=0).to(ACC)[None, :]
            total += tl.sum(tl.where(known[None, :], phi * product, 0), 1)
    total = total * exact(alpha, alpha_low, ACC)
    at = row * d + j if STRAIGHT else row + j.to(OFFSET) * R
    tl.store(out + batch * R * d + at, total.to(out.dtype.element_ty), mask=row < R)


@triton.jit(do_not_specialize=[*SIZES, "alpha", "alpha_low"])
def _paired_gradient(
    x,  # as in `_gradient`
    y,
    z,
    out,
    R,
    N,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    z_batch,
    z_row,
    z_column,
    alpha,
    alpha_low,
    d: tl.constexpr,
    STRAIGHT: tl.constexpr,
    T: tl.constexpr,
    PIECES: tl.constexpr,  # at least d / T
    SCALED: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
):
    """The same for power 2: one fragment of ∂φ gives the gradients of both pieces, which are summed in registers."""
    n: tl.constexpr = d // T
    N = multiple(N, UNITS[6])
    batch = batch_program()
    row = places(tl.program_id(0) * BR, BR, OFFSET)
    in_rows = (row < R)[:, None]
    x_step = step(x_column, UNITS[1], OFFSET)
    pieces = (
        x
        + batch * multiple(x_batch, max(UNITS[0], UNITS[1]))
        + row[:, None] * step(x_row, UNITS[0])
        + tl.arange(0, T)[None, :] * x_step
    )
    y_rows = y + batch * multiple(y_batch, max(UNITS[2], UNITS[3])) + row[:, None] * step(y_row, UNITS[2])
    if z is not None:
        z += batch * multiple(z_batch, max(UNITS[4], UNITS[5]))
    piece = tl.arange(0, PIECES)[None, :, None]
    total = tl.zeros([BR, PIECES, T], ACC)
    s, t = 0, 0
    for tile in range(n * (n + 1) // 2):
        k = (tile * (T * T) + tl.arange(0, T * T)).to(OFFSET)
        phi = power_gradient(
            y_rows, z, k, step(y_column, UNITS[3], OFFSET), step(z_row, UNITS[4]), step(z_column, UNITS[5], OFFSET), in_rows,
            k >= 0, N, z is not None, ACC, COMMON, PRECISION, BR, BN, T * T,
        )  # fmt: skip
        if SCALED:
            phi *= tl.where(s == t, tl.full([], 1, ACC), tl.full([], 1.4142135623730951, ACC))
        phi = phi.reshape(BR, T, T)
        u = tl.load(pieces + s * T * x_step, mask=in_rows, other=0).to(ACC)
        v = tl.load(pieces + t * T * x_step, mask=in_rows, other=0).to(ACC)
        total += tl.where(piece == s, tl.sum(phi * v[:, None, :], 2)[:, None, :], 0)
        total += tl.where(piece == t, tl.sum(phi * u[:, :, None], 1)[:, None, :], 0)
        last = t == n - 1
        s = tl.where(last, s + 1, s)
        t = tl.where(last, s, t + 1)
    total = (total * exact(alpha, alpha_low, ACC)).reshape(BR, PIECES * T)
    j = tl.arange(0, PIECES * T)[None, :]
    at = row[:, None] * d + j if STRAIGHT else row[:, None] + j.to(OFFSET) * R
    tl.store(out + batch * R * d + at, total.to(out.dtype.element_ty), mask=in_rows & (j < d))
