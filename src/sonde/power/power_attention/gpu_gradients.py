"""Power attention's gradients: through the weights of a chunk, which are recomputed, and through the states between chunks.

The state of power 2 is a symmetric matrix M of vectors: φ(q)·S = Σ_ab q_a q_b M_ab. So ∂q_a = 2 Σ_b q_b M_ab·∂, a product of
rows that are scaled by one number of q at a time with M's slice b. Nothing of φ's size is formed, and sums stay in the accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.tiles import load_rows, multiple, places
from .gpu_kernels import QKV, fade, times_moments, times_state
from .gpu_states import LEAST_GATE, SIZES, packed

GRAD = ["g_batch", "g_head", "g_row"]


@triton.jit(do_not_specialize=[*SIZES, "o_batch", "o_head", "o_row", *GRAD])
def _row_factors(
    out,  # [B, h · groups, T, e], rows contiguous
    lost,  # as `out`, contiguous; or None
    grad,  # [B, h · groups, T, e], rows contiguous
    rates,  # [B, T, h · groups]
    high,  # [B, h, T], or None
    low,
    rate,  # [B, h · groups, T], ∂(Σ w v) is this times ∂out
    shift,  # and ∂(Σ w) this
    past_rate,  # the same for the state before the chunk; None if nobody needs it
    past_shift,
    h,
    groups,
    T,
    C,
    chunks,
    o_batch,
    o_head,
    o_row,
    g_batch,
    g_head,
    g_row,
    E: tl.constexpr,
    BE: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BM: tl.constexpr,
):
    heads = h * groups
    row_of = tl.program_id(1).to(tl.int64)
    batch, head = row_of // heads, row_of % heads
    i = places(tl.program_id(0) * BM, BM, OFFSET)
    inside = i < T
    at = batch * multiple(o_batch, UNITS[3]) + head * multiple(o_head, UNITS[3])
    x = load_rows(out + at, i, T, multiple(o_row, UNITS[3]), E, BE, ACC)
    if lost is not None:
        x += load_rows(lost + (batch * T * heads + head) * E, i, T, heads * E, E, BE, ACC)
    y = load_rows(
        grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4]), i, T, multiple(g_row, UNITS[4]), E, BE, ACC
    )
    found = tl.load(rates + (batch * T + i) * heads + head, mask=inside, other=0)
    moved = -tl.sum(x * y, 1) * found
    tl.store(rate + row_of * T + i, found, mask=inside)
    tl.store(shift + row_of * T + i, moved, mask=inside)
    if past_rate is not None:
        if high is not None:
            gates = (batch * h + head // groups) * T + i
            since = tl.exp(tl.load(high + gates, mask=inside, other=0) + tl.load(low + gates, mask=inside, other=0))
            found, moved = found * since, moved * since
        tl.store(past_rate + row_of * T + i, found, mask=inside)
        if past_shift is not None:
            tl.store(past_shift + row_of * T + i, moved, mask=inside)


@triton.jit
def times_slices(
    rows, x, x_row, state, i, stop, n, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_b x_b · (rows @ M_bᵀ) [BM, BD]: half the gradient of φ(x)·M·rows by x."""
    a, column = tl.arange(0, BD), tl.arange(0, BE)
    total = tl.zeros([rows.shape[0], BD], ACC)
    for b in range(D):
        factor = tl.load(x + i * x_row + b, mask=i < stop, other=0).to(COMMON)
        at = state + packed(a, b, n, TILE)[:, None] * E + column[None, :]
        if BD == D and BE == E:
            matrix = tl.load(at)
        else:
            matrix = tl.load(at, mask=(a < D)[:, None] & (column < E)[None, :], other=0)
        total = tl.dot(rows * factor[:, None], matrix.to(COMMON).T, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def slope(products, POWER: tl.constexpr):
    """p · (q·k)^{p−1}."""
    return products * 2 if POWER == 2 else products * products * products * 4


@triton.jit(do_not_specialize=[*SIZES, *QKV, *GRAD])
def _query_gradients(
    q,  # as in `_outputs`
    k,
    v,
    grad,  # [B, h · groups, T, e], of the result, rows contiguous
    high,
    low,
    rate,  # [B, h · groups, T]
    shift,
    states,
    moments,
    past,  # [B, h · groups, T, d], the gradient through the states, if other kernels computed it; or None
    d_q,  # [B, T, h · groups, d], or None
    balanced,  # [B, h · groups, T], `shift` so that Σ_j w_ij ∂w_ij = 0
    past_shift,  # the same for the state before the chunk, or None
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
    g_batch,
    g_head,
    g_row,
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
    """∂q_i = Σ_j ∂w_ij · p (q_i·k_j)^{p−1} e^{G_i − G_j} k_j, where ∂w_ij = rate_i · ∂out_i·v_j + shift_i.

    Σ_j w_ij ∂w_ij should be 0. It is not, since weights were rounded for `out`, from which `shift` comes, and these errors would
    add up in the gradients of gates. So the other gradients get a `shift` that makes it 0.
    """
    n: tl.constexpr = D // TILE
    blocks = tl.cdiv(C, BM)
    chunk, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    heads = h * groups
    row_of = tl.program_id(1).to(tl.int64)
    batch, head = row_of // heads, row_of % heads
    shared = head // groups
    start, first = chunk * C, chunk * C + block * BM
    stop = tl.minimum(start + C, T)
    i = places(first, BM, OFFSET)
    k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
    q += batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0])
    grad += batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4])
    q_step, k_step, v_step = multiple(q_row, UNITS[0]), multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    queries = load_rows(q, i, stop, q_step, D, BD, COMMON)
    incoming = load_rows(grad, i, stop, multiple(g_row, UNITS[4]), E, BE, COMMON)
    rate_i = tl.load(rate + row_of * T + i, mask=i < stop, other=0)
    shift_i = tl.load(shift + row_of * T + i, mask=i < stop, other=0)
    total = tl.zeros([BM, BD], ACC)
    GATED: tl.constexpr = high is not None
    if GATED:
        high += (batch * h + shared) * T
        low += (batch * h + shared) * T
        high_i, low_i = tl.load(high + i, mask=i < stop, other=0), tl.load(low + i, mask=i < stop, other=0)
    else:
        high_i, low_i = tl.zeros([BM], ACC), tl.zeros([BM], ACC)
    if states is not None:
        if (chunk > 0) | BEGUN:
            at = ((batch * chunks + chunk) * h + shared) * (n * (n + 1) // 2 * TILE * TILE)
            total = times_slices(
                incoming, q, q_step, states + at * E, i, stop, n, D, E, BD, BE, TILE, ACC, COMMON, PRECISION
            )  # fmt: skip
            since = 2 * tl.exp(high_i + low_i)
            toward = times_moments(q, moments + at, i, (i < stop)[:, None], q_step, n, D, BD, TILE, BM, ACC, COMMON, EXACT)
            total = total * (rate_i * since)[:, None] + toward * (shift_i * since)[:, None]
    elif past is not None:
        total = load_rows(past + row_of * T * D, i, stop, D, D, BD, ACC)
    excess = tl.sum(total * queries.to(ACC), 1)  # p Σ_j w_ij ∂w_ij, by Euler's theorem
    whole = start + (first - start) // BN * BN
    for begin in range(start, tl.minimum(first + BM, stop), BN):
        j = places(begin, BN, OFFSET)
        keys = load_rows(k, j, stop, k_step, D, BD, COMMON)
        values = load_rows(v, j, stop, v_step, E, BE, COMMON)
        products = tl.dot(queries, keys.T, input_precision=PRECISION, out_dtype=ACC)
        toward = tl.dot(incoming, values.T, input_precision=PRECISION, out_dtype=ACC)
        d_products = slope(products, POWER) * (toward * rate_i[:, None] + shift_i[:, None])
        if GATED:
            high_j, low_j = tl.load(high + j, mask=j < stop, other=0), tl.load(low + j, mask=j < stop, other=0)
            if begin < whole:
                later, earlier = fade(high_i, low_i, high_j, low_j, high, low, begin + BN - 1)
                d_products *= later[:, None] * earlier[None, :]
            else:
                d_products *= tl.exp((high_i[:, None] - high_j[None, :]) + (low_i[:, None] - low_j[None, :]))
        d_products = tl.where(j[None, :] <= i[:, None], d_products, 0)
        excess += tl.sum(d_products * products, 1)
        total = tl.dot(d_products.to(COMMON), keys, total, input_precision=PRECISION, out_dtype=ACC)
    if d_q is not None:
        column = tl.arange(0, BD)[None, :]
        row = (batch * T + i) * heads + head
        tl.store(d_q + row[:, None] * D + column, total.to(d_q.dtype.element_ty), mask=(i < stop)[:, None] & (column < D))
    shift_i -= rate_i * excess * (1.0 / POWER)
    tl.store(balanced + row_of * T + i, shift_i, mask=i < stop)
    if past_shift is not None:
        tl.store(past_shift + row_of * T + i, shift_i * tl.exp(high_i + low_i), mask=i < stop)


@triton.jit(do_not_specialize=[*SIZES, *QKV, *GRAD])
def _key_gradients(
    q,
    k,
    v,
    grad,
    high,
    low,
    until,  # [B, h, T], e to the gates from there to the end of the chunk
    rate,
    shift,
    states,  # [B, chunks, h, D, e], the gradients of the states after each chunk; or None
    moments,
    past_k,  # [B, h, T, d] and [B, h, T, e], the gradients through the states, if other kernels computed them; or None
    past_v,
    d_k,  # [B, T, h, d]
    d_v,  # [B, T, h, e]
    passed,  # [B, h, T], Σ_i w_ij ∂w_ij, or None
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
    g_batch,
    g_head,
    g_row,
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
    RETURNED: tl.constexpr,  # the state after the last chunk has a gradient
    BM: tl.constexpr,  # keys
    BN: tl.constexpr,  # queries at a time
):
    """∂k_j and ∂v_j = Σ_i rate_i w_ij ∂out_i, over the heads of queries that share the keys."""
    n: tl.constexpr = D // TILE
    blocks = tl.cdiv(C, BM)
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks  # long columns first
    row_of = tl.program_id(1).to(tl.int64)
    batch, shared = row_of // h, row_of % h
    heads = h * groups
    first = chunk * C + block * BM
    stop = tl.minimum(chunk * C + C, T)
    j = places(first, BM, OFFSET)
    k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
    q_step, k_step, v_step = multiple(q_row, UNITS[0]), multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    g_step = multiple(g_row, UNITS[4])
    keys, values = load_rows(k, j, stop, k_step, D, BD, COMMON), load_rows(v, j, stop, v_step, E, BE, COMMON)
    to_keys, to_values, kept = tl.zeros([BM, BD], ACC), tl.zeros([BM, BE], ACC), tl.zeros([BM], ACC)
    GATED: tl.constexpr = high is not None
    if GATED:
        high += row_of * T
        low += row_of * T
        high_j, low_j = tl.load(high + j, mask=j < stop, other=0), tl.load(low + j, mask=j < stop, other=0)
    else:
        high_j, low_j = kept, kept
    if states is not None:
        if (chunk < chunks - 1) | RETURNED:
            at = ((batch * chunks + chunk) * h + shared) * (n * (n + 1) // 2 * TILE * TILE)
            column = tl.arange(0, BE)
            to_values = times_state(
                k, states + at * E, j, column, (j < stop)[:, None], (column < E)[None, :], k_step, n, E, TILE, BM, BE, ACC, COMMON,
                PRECISION,
            )  # fmt: skip
            to_keys = times_slices(values, k, k_step, states + at * E, j, stop, n, D, E, BD, BE, TILE, ACC, COMMON, PRECISION)
            to_keys = 2 * (
                to_keys + times_moments(k, moments + at, j, (j < stop)[:, None], k_step, n, D, BD, TILE, BM, ACC, COMMON, EXACT)
            )
            if GATED:
                later = tl.load(until + row_of * T + j, mask=j < stop, other=0)
                to_values, to_keys = to_values * later[:, None], to_keys * later[:, None]
            kept = tl.sum(to_keys * keys.to(ACC), 1) * 0.5  # by Euler's theorem
    elif past_k is not None:
        to_keys = load_rows(past_k + row_of * T * D, j, stop, D, D, BD, ACC)
        to_values = load_rows(past_v + row_of * T * E, j, stop, E, E, BE, ACC)
        kept = tl.sum(to_keys * keys.to(ACC), 1) * (1.0 / POWER)
    for member in range(groups):
        head = shared * groups + member
        rows, vectors = q + batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0]), (batch * heads + head) * T
        grads = grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4])
        for begin in range(first, stop, BN):
            i = places(begin, BN, OFFSET)
            queries = load_rows(rows, i, stop, q_step, D, BD, COMMON)
            incoming = load_rows(grads, i, stop, g_step, E, BE, COMMON)
            rate_i = tl.load(rate + vectors + i, mask=i < stop, other=0)
            shift_i = tl.load(shift + vectors + i, mask=i < stop, other=0)
            products = tl.dot(keys, queries.T, input_precision=PRECISION, out_dtype=ACC)
            seen = (i[None, :] >= j[:, None]) & (i < stop)[None, :]
            weights = products * products
            slopes = slope(products, POWER)
            if POWER == 4:
                weights = weights * weights
            if GATED:
                high_i, low_i = tl.load(high + i, mask=i < stop, other=0), tl.load(low + i, mask=i < stop, other=0)
                if begin >= first + BM:
                    later, earlier = fade(high_i, low_i, high_j, low_j, high, low, first + BM - 1)
                    decay = earlier[:, None] * later[None, :]
                else:
                    decay = tl.exp((high_i[None, :] - high_j[:, None]) + (low_i[None, :] - low_j[:, None]))
                weights, slopes = weights * decay, slopes * decay
            weights = tl.where(seen, weights, 0)
            to_values = tl.dot(
                (weights * rate_i[None, :]).to(COMMON), incoming, to_values, input_precision=PRECISION, out_dtype=ACC
            )
            toward = tl.dot(values, incoming.T, input_precision=PRECISION, out_dtype=ACC) * rate_i[None, :] + shift_i[None, :]
            if passed is not None:
                kept += tl.sum(tl.where(seen, weights * toward, 0), 1)
            d_products = tl.where(seen, slopes * toward, 0).to(COMMON)
            to_keys = tl.dot(d_products, queries, to_keys, input_precision=PRECISION, out_dtype=ACC)
    row = (batch * T + j) * h + shared
    if d_k is not None:
        column = tl.arange(0, BD)[None, :]
        tl.store(d_k + row[:, None] * D + column, to_keys.to(d_k.dtype.element_ty), mask=(j < stop)[:, None] & (column < D))
    if d_v is not None:
        column = tl.arange(0, BE)[None, :]
        tl.store(d_v + row[:, None] * E + column, to_values.to(d_v.dtype.element_ty), mask=(j < stop)[:, None] & (column < E))
    if passed is not None:
        tl.store(passed + row_of * T + j, kept, mask=j < stop)


@triton.jit(do_not_specialize=[*SIZES, "g_batch", "g_head", "g_row", "flow_columns"])
def _gate_gradient(
    passed,  # [B, h, T], Σ_i w_ij ∂w_ij of each key
    flows,  # [B · h, chunks + 1, flow_columns], the sums over keys before each chunk and queries from it on, in parts; or None
    log_gate,  # [B, h, T], any strides
    d_log_gate,  # [B, T, h]
    h,
    groups,
    T,
    C,
    chunks,
    g_batch,
    g_head,
    g_row,
    flow_columns,
    BT: tl.constexpr,
):
    """A gate scales the weights between all keys before it and all queries from it on. From token to token, Σ w ∂w of these gains
    the token's key, and loses its queries, whose sum is 0."""
    chunk, row_of = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row_of // h, row_of % h
    start = chunk * C
    stop = tl.minimum(start + C, T)
    total, t = tl.zeros([], tl.float64), tl.arange(0, BT)
    if flows is not None:
        flows += row_of * (chunks + 1) * flow_columns
        for first in range(0, flow_columns, BT):
            column = first + t
            flow = tl.load(flows + chunk * flow_columns + column, mask=column < flow_columns, other=0).to(tl.float64)
            if chunk > 0:
                flow += tl.load(flows + chunks * flow_columns + column, mask=column < flow_columns, other=0).to(tl.float64)
            total += tl.sum(flow, 0)
    for first in range(start, stop, BT):
        i = first + t
        inside = i < stop
        gain = tl.load(passed + row_of * T + i, mask=inside, other=0).to(tl.float64)
        found = total + tl.cumsum(gain, 0) - gain
        total += tl.sum(gain, 0)
        gate = tl.load(log_gate + batch * g_batch + head * g_head + i * g_row, mask=inside, other=0)
        found = tl.where(gate < LEAST_GATE, 0, found)
        tl.store(d_log_gate + (batch * T + i) * h + head, found.to(d_log_gate.dtype.element_ty), mask=inside)
