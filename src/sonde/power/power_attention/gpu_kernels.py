"""Power attention's results: the weighted sum within a chunk, added to the contribution of earlier chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.product import nearest
from .._device.tiles import head_program, load, load_columns, load_rows, multiple, places
from .gpu_states import SIZES, is_rounding

QKV = ["q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"]


@triton.jit
def add_keys(
    total, norm, divisor, queries, k, v, high, low, high_i, low_i, early, chunk, first, last, i, stop, k_step, v_step,
    MASKED: tl.constexpr, GATED: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys from `first` to `last` of the chunk that begins at `chunk`. Keys from `stop` on are masked; if it is
    None, there are none.

    Without MASKED, all keys come before all queries, so e^{G_i − G_j} is a product of three factors: from the key to the end of its
    BLOCK, which `early` holds; from there to the first query, a single number (`high_i` and `low_i` are then G of the first query);
    and from there to query i, by which the caller multiplies.
    """
    for start in range(first, last, BN):
        j = places(start, BN, OFFSET)
        keys, values = load_columns(k, j, stop, k_step, D, BD, COMMON), load_rows(v, j, stop, v_step, E, BE, COMMON)
        products = tl.dot(queries, keys, input_precision=PRECISION, out_dtype=total.dtype)
        weights = products * products
        if POWER == 4:
            weights = weights * weights
        if GATED and MASKED:
            inside = None if stop is None else j < stop
            high_j, low_j = load(high + j, inside), load(low + j, inside)
            weights *= tl.exp((high_i[:, None] - high_j[None, :]) + (low_i[:, None] - low_j[None, :]))
        elif GATED:
            end = chunk + (start - chunk) // BLOCK * BLOCK + BLOCK - 1
            between = tl.exp((high_i - tl.load(high + end)) + (low_i - tl.load(low + end)))
            weights *= (tl.load(early + j) * between)[None, :]
        if MASKED:
            weights = tl.where(j[None, :] <= i[:, None], weights, 0)
        norm += tl.sum(weights, 1)
        weights = nearest(weights, COMMON, PRECISION)
        if total.dtype != COMMON or PRECISION == "tf32":  # sum the rounded weights, so that the result is an average of values
            divisor += tl.sum(weights.to(total.dtype), 1)
        total = tl.dot(weights, values, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total, norm, divisor


@triton.jit(do_not_specialize=[*SIZES, *QKV, "least"])
def _outputs(
    q,  # [B, h · groups, T, d], rows contiguous
    k,  # [B, h, T, d], rows contiguous
    v,  # [B, h, T, e], rows contiguous
    high,  # [B, h, T], sums of gates in the chunk; None without gates
    low,
    early,  # [B, h, T], the decay from there to the end of its BLOCK
    lengths,  # [B, h, T]
    past,  # [B, h · groups, T, e], the sums over earlier chunks; or None
    past_norms,  # [B, h · groups, T], their sums of weights
    norms,  # [B, h, chunks], Σ ‖k‖^p before each chunk
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
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BEGUN: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # blocks of rows end where chunks do
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """σ does not appear, since it cancels."""
    blocks = tl.cdiv(C, BM)
    chunk, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks  # long rows first
    heads = h * groups
    query_row, batch, head = head_program(heads)
    shared = head // groups
    start, first = chunk * C, chunk * C + block * BM
    stop = tl.minimum(start + C, T)
    if not EVEN:  # noqa: SIM102 (decided at compile time)
        if first >= stop:  # the last chunk is shorter, and has fewer blocks
            return
    i = places(first, BM, OFFSET)
    row_of = batch * h + shared
    k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
    q += batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0])
    q_step, k_step, v_step = multiple(q_row, UNITS[0]), multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    limit = None if EVEN else stop
    queries = load_rows(q, i, limit, q_step, D, BD, COMMON)
    column = tl.arange(0, BE)
    total, norm, divisor = tl.zeros([BM, BE], ACC), tl.zeros([BM], ACC), tl.zeros([BM], ACC)
    most = tl.load(lengths + row_of * T + i, mask=i < stop, other=0)
    GATED: tl.constexpr = high is not None
    later = norm + 1  # e^{G_i − G}, where G is that of the first query
    high_i, low_i, high_first, low_first = norm, norm, norm, norm
    if GATED:
        high += row_of * T
        low += row_of * T
        early += row_of * T
        high_i, low_i = tl.load(high + i, mask=i < stop, other=0), tl.load(low + i, mask=i < stop, other=0)
        high_first, low_first = tl.load(high + first), tl.load(low + first)
        later = tl.exp((high_i - high_first) + (low_i - low_first))
    # keys that all queries see, in whole blocks; with gates, only where BLOCKs and blocks of keys and queries line up
    whole = start + (first - start) // BN * BN if not GATED or (BM % BLOCK == 0 and BLOCK % BN == 0) else start
    total, norm, divisor = add_keys(
        total, norm, divisor, queries, k, v, high, low, high_first, low_first, early, start, start, whole, i, limit, k_step,
        v_step, False, GATED, POWER, D, E, BD, BE, BN, BLOCK, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    total, norm, divisor = total * later[:, None], norm * later, divisor * later
    if past is not None:  # noqa: SIM102 (decided at compile time)
        if (chunk > 0) | BEGUN:
            row = query_row * T + i
            total += tl.load(past + row[:, None] * E + column[None, :], mask=(i < stop)[:, None] & (column < E)[None, :], other=0)
            through = tl.load(past_norms + row, mask=i < stop, other=0)
            norm, divisor = norm + through, divisor + through
            most += tl.exp(high_i + low_i) * tl.load(norms + row_of * chunks + chunk)
    total, norm, divisor = add_keys(
        total, norm, divisor, queries, k, v, high, low, high_i, low_i, early, start, whole, tl.minimum(first + BM, stop), i, limit,
        k_step, v_step, True, GATED, POWER, D, E, BD, BE, BN, BLOCK, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    x = queries.to(ACC)
    length = tl.sum(x * x, 1)
    if POWER == 4:
        length = length * length
    most *= length
    dead = is_rounding(norm, most, least)
    rate = tl.where(dead, 0, 1 / norm)
    if COMMON == ACC and PRECISION != "tf32":
        divisor = norm
    divisor = tl.where(divisor == 0, 1, divisor)  # all weights underflow in half precision
    found = tl.where(dead[:, None], 0, total * (1 / divisor)[:, None])
    row = (batch * T + i) * heads + head
    inside = (i < stop)[:, None] & (column < E)[None, :]
    rounded = found.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * E + column[None, :], rounded, mask=inside)
    tl.store(rates + row, rate, mask=i < stop)
    if lost is not None:
        tl.store(lost + row[:, None] * E + column[None, :], (found - rounded.to(ACC)).to(lost.dtype.element_ty), mask=inside)
