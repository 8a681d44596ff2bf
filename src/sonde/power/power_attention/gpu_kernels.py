"""Power attention's results: the state before a chunk, applied to its queries, and the weights within the chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.product import add_exactly, nearest
from .._device.tiles import load_columns, load_rows, multiple, places
from .._sympow.gpu_kernels import add_pair
from .gpu_states import SIZES, packed

QKV = ["q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"]


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
    x, moments, row, in_rows, x_step, n, D: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
    COMMON: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """x @ Z [BM, BD], where Z is the symmetric matrix of the moments z, which is not rounded."""
    BLOCK: tl.constexpr = 16
    a, b = tl.arange(0, BLOCK), tl.arange(0, BD)
    total = tl.zeros([BM, BD], ACC)
    for first in range(0, D, BLOCK):
        left = tl.load(x + row[:, None] * x_step + (first + a)[None, :], mask=in_rows & (first + a < D)[None, :], other=0).to(
            COMMON
        )
        inside = (first + a < D)[:, None] & (b < D)[None, :]
        right = tl.load(moments + packed((first + a)[:, None], b[None, :], n, TILE), mask=inside, other=0)
        total = add_exactly(total, left, right, COMMON, EXACT)
    return total


@triton.jit
def add_keys(
    total, norm, queries, k, v, high, low, high_i, low_i, first, last, i, stop, k_step, v_step, MASKED: tl.constexpr,
    GATED: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Blocks of keys from `first` to `last` of the queries' own chunk; only MASKED ones may have keys after some query.

    Keys that are not MASKED come before all queries, so e^{G_i − G_j} is a product of one factor for each: `high_i` and `low_i` are
    then G of the first query, and the caller multiplies by the queries' factors.
    """
    for start in range(first, last, BN):
        j = places(start, BN, OFFSET)
        keys, values = load_columns(k, j, stop, k_step, D, BD, COMMON), load_rows(v, j, stop, v_step, E, BE, COMMON)
        products = tl.dot(queries, keys, input_precision=PRECISION, out_dtype=total.dtype)
        weights = products * products
        if POWER == 4:
            weights = weights * weights
        if GATED:
            high_j, low_j = tl.load(high + j, mask=j < stop, other=0), tl.load(low + j, mask=j < stop, other=0)
            if MASKED:
                weights *= tl.exp((high_i[:, None] - high_j[None, :]) + (low_i[:, None] - low_j[None, :]))
            else:
                weights *= tl.exp((high_i - high_j) + (low_i - low_j))[None, :]
        if MASKED:
            weights = tl.where(j[None, :] <= i[:, None], weights, 0)
        weights = nearest(weights, COMMON, PRECISION)
        norm += tl.sum(weights.to(total.dtype), 1)  # as they are multiplied: the result is an average of values, exactly
        total = tl.dot(weights, values, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total, norm


@triton.jit(do_not_specialize=[*SIZES, *QKV, "least"])
def _outputs(
    q,  # [B, h · groups, T, d], rows contiguous
    k,  # [B, h, T, d], rows contiguous
    v,  # [B, h, T, e], rows contiguous
    high,  # [B, h, T], sums of gates in the chunk; None without gates
    low,
    lengths,  # [B, h, T]
    states,  # [B, chunks, h, D, e], before each chunk; or None
    moments,  # [B, chunks, h, D]
    norms,  # [B, h, chunks]
    past,  # [B, h · groups, T, e + 1], sums and sums of weights that other kernels computed from states; or None
    out,  # [B, T, h · groups, e]
    rates,  # [B, T, h · groups], one over the sums of weights
    lost,  # [B, T, h · groups, e], the rounding error of `out`; None if there is none
    h,
    groups,
    T,
    C,
    chunks,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    least,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    POWER: tl.constexpr,
    TILE: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BEGUN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """σ cancels, so it appears nowhere."""
    n: tl.constexpr = D // TILE
    blocks = tl.cdiv(C, BM)
    chunk, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks  # long rows first
    heads = h * groups
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    shared = head // groups
    start, first = chunk * C, chunk * C + block * BM
    stop = tl.minimum(start + C, T)
    i = places(first, BM, OFFSET)
    row_of = batch * h + shared
    k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
    q += batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0])
    q_step, k_step, v_step = multiple(q_row, UNITS[0]), multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    queries = load_rows(q, i, stop, q_step, D, BD, COMMON)
    column = tl.arange(0, BE)
    total, norm = tl.zeros([BM, BE], ACC), tl.zeros([BM], ACC)
    most = tl.load(lengths + row_of * T + i, mask=i < stop, other=0)
    GATED: tl.constexpr = high is not None
    later, since_first = norm + 1, 1.0  # e^{G_i − G} and e^G, where G is that of the first query
    high_i, low_i, high_first, low_first = norm, norm, norm, norm
    if GATED:
        high += row_of * T
        low += row_of * T
        high_i, low_i = tl.load(high + i, mask=i < stop, other=0), tl.load(low + i, mask=i < stop, other=0)
        high_first, low_first = tl.load(high + first, mask=first < stop, other=0), tl.load(low + first, mask=first < stop, other=0)
        later, since_first = tl.exp((high_i - high_first) + (low_i - low_first)), tl.exp(high_first + low_first)
    if states is not None:
        if (chunk > 0) | BEGUN:
            at = (batch * chunks + chunk) * h + shared
            total = times_state(
                q, states + at * (n * (n + 1) // 2 * TILE * TILE * E), i, column, (i < stop)[:, None], (column < E)[None, :],
                q_step, n, E, TILE, BM, BE, ACC, COMMON, PRECISION,
            )  # fmt: skip
            toward = times_moments(
                q, moments + at * (n * (n + 1) // 2 * TILE * TILE), i, (i < stop)[:, None], q_step, n, D, BD, TILE, BM, ACC, COMMON,
                EXACT,
            )  # fmt: skip
            norm = tl.sum(toward * queries.to(ACC), 1) * since_first
            total *= since_first
            most += later * since_first * tl.load(norms + row_of * chunks + chunk)
    whole = start + (first - start) // BN * BN  # keys that all queries see, in blocks
    total, norm = add_keys(
        total, norm, queries, k, v, high, low, high_first, low_first, start, whole, i, stop, k_step, v_step, False, GATED, POWER, D,
        E, BD, BE, BN, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    total, norm = total * later[:, None], norm * later
    if past is not None:
        row = (tl.program_id(1).to(tl.int64) * T + i) * (E + 1)
        total += tl.load(past + row[:, None] + column[None, :], mask=(i < stop)[:, None] & (column < E)[None, :], other=0)
        norm += tl.load(past + row + E, mask=i < stop, other=0)
        most += later * since_first * tl.load(norms + row_of * chunks + chunk)
    total, norm = add_keys(
        total, norm, queries, k, v, high, low, high_i, low_i, whole, tl.minimum(first + BM, stop), i, stop, k_step, v_step, True,
        GATED, POWER, D, E, BD, BE, BN, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    x = queries.to(ACC)
    length = tl.sum(x * x, 1)
    if POWER == 4:
        length = length * length
    most *= length
    dead = (norm <= least * most) & (most < float("inf"))
    rate = tl.where(dead, 0, 1 / norm)
    found = tl.where(dead[:, None], 0, total * rate[:, None])
    row = (batch * T + i) * heads + head
    inside = (i < stop)[:, None] & (column < E)[None, :]
    rounded = found.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * E + column[None, :], rounded, mask=inside)
    tl.store(rates + row, rate, mask=i < stop)
    if lost is not None:
        tl.store(lost + row[:, None] * E + column[None, :], (found - rounded.to(ACC)).to(lost.dtype.element_ty), mask=inside)
