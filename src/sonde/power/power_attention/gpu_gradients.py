"""Power attention's gradients through the weights of a chunk, which are recomputed, added to those through states."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.product import nearest
from .._device.tiles import head_program, load, load_rows, multiple, places
from .gpu_kernels import QKV
from .gpu_states import LEAST_GATE, SIZES

GRAD = ["g_batch", "g_head", "g_row"]
DOUBT = tl.constexpr(64)  # the rounding error of a sum over a chunk boundary, as a multiple of one token's


@triton.jit(do_not_specialize=[*SIZES, "o_batch", "o_head", "o_row", *GRAD])
def _row_factors(
    out,  # [B, h · groups, T, e], rows contiguous
    lost,  # as `out`, contiguous; or None
    grad,  # [B, h · groups, T, e], rows contiguous
    rates,  # [B, T, h · groups]
    since,  # [B, h, T], the decay since the beginning of the chunk; None without gates
    rate,  # [B, h · groups, T]: ∂(Σ w v) is this times ∂out
    shift,  # [B, h · groups, T]: ∂(Σ w)
    past_rate,  # the same for the state before the chunk; None if not needed
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
    row_of, batch, head = head_program(heads)
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
        if since is not None:
            factor = tl.load(since + (batch * h + head // groups) * T + i, mask=inside, other=0)
            found, moved = found * factor, moved * factor
        tl.store(past_rate + row_of * T + i, found, mask=inside)
        tl.store(past_shift + row_of * T + i, moved, mask=inside)


@triton.jit
def slope(products, POWER: tl.constexpr):
    """p · (q·k)^{p−1}."""
    return products * 2 if POWER == 2 else products * products * products * 4


@triton.jit
def add_from_keys(
    total, excess, queries, incoming, rate_i, shift_i, k, v, high, low, high_i, low_i, early, chunk, first, last, i, stop, k_step,
    v_step, MASKED: tl.constexpr, GATED: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the queries' gradients through the weights of keys from `first` to `last`: ∂q, and p Σ_j w_ij ∂w_ij.

    For keys that are not MASKED, the queries' own factor of e^{G_i − G_j} is left out, as in `add_keys`.
    """
    for start in range(first, last, BN):
        j = places(start, BN, OFFSET)
        keys, values = load_rows(k, j, stop, k_step, D, BD, COMMON), load_rows(v, j, stop, v_step, E, BE, COMMON)
        products = tl.dot(queries, keys.T, input_precision=PRECISION, out_dtype=total.dtype)
        toward = tl.dot(incoming, values.T, input_precision=PRECISION, out_dtype=total.dtype)
        d_products = slope(products, POWER) * (toward * rate_i[:, None] + shift_i[:, None])
        if GATED and MASKED:
            inside = None if stop is None else j < stop
            high_j, low_j = load(high + j, inside), load(low + j, inside)
            d_products *= tl.exp((high_i[:, None] - high_j[None, :]) + (low_i[:, None] - low_j[None, :]))
        elif GATED:
            end = chunk + (start - chunk) // BLOCK * BLOCK + BLOCK - 1
            between = tl.exp((high_i - tl.load(high + end)) + (low_i - tl.load(low + end)))
            d_products *= (tl.load(early + j) * between)[None, :]
        if MASKED:
            d_products = tl.where(j[None, :] <= i[:, None], d_products, 0)
        excess += tl.sum(d_products * products, 1)
        total = tl.dot(nearest(d_products, COMMON, PRECISION), keys, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total, excess


@triton.jit(do_not_specialize=[*SIZES, *QKV, *GRAD])
def _query_gradients(
    q,  # as in `_outputs`
    k,
    v,
    grad,  # [B, h · groups, T, e], of the result, rows contiguous
    high,
    low,
    early,
    rate,  # [B, h · groups, T]
    shift,
    past,  # [B, h · groups, T, d], the gradient through the states; or None
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
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BEGUN: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """∂q_i = Σ_j ∂w_ij · p (q_i·k_j)^{p−1} e^{G_i − G_j} k_j, where ∂w_ij = rate_i · ∂out_i·v_j + shift_i.

    Σ_j w_ij ∂w_ij should be 0. It is not, since `shift` comes from `out`, which was computed from rounded weights, and these
    errors would add up in the gradients of gates. So the other gradients use `balanced`, a shift that makes the sum 0.
    """
    blocks = tl.cdiv(C, BM)
    chunk, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    heads = h * groups
    row_of, batch, head = head_program(heads)
    shared = head // groups
    start, first = chunk * C, chunk * C + block * BM
    stop = tl.minimum(start + C, T)
    if not EVEN:  # noqa: SIM102 (decided at compile time)
        if first >= stop:  # the last chunk is shorter, and has fewer blocks
            return
    i = places(first, BM, OFFSET)
    k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
    q += batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0])
    grad += batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4])
    q_step, k_step, v_step = multiple(q_row, UNITS[0]), multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    limit = None if EVEN else stop
    queries = load_rows(q, i, limit, q_step, D, BD, COMMON)
    incoming = load_rows(grad, i, limit, multiple(g_row, UNITS[4]), E, BE, COMMON)
    rate_i = tl.load(rate + row_of * T + i, mask=i < stop, other=0)
    shift_i = tl.load(shift + row_of * T + i, mask=i < stop, other=0)
    total = tl.zeros([BM, BD], ACC)
    excess = tl.zeros([BM], ACC)
    GATED: tl.constexpr = high is not None
    later = excess + 1  # e^{G_i − G}, where G is that of the first query
    high_i, low_i, high_first, low_first = excess, excess, excess, excess
    if GATED:
        high += (batch * h + shared) * T
        low += (batch * h + shared) * T
        early += (batch * h + shared) * T
        high_i, low_i = tl.load(high + i, mask=i < stop, other=0), tl.load(low + i, mask=i < stop, other=0)
        high_first, low_first = tl.load(high + first), tl.load(low + first)
        later = tl.exp((high_i - high_first) + (low_i - low_first))
    whole = start + (first - start) // BN * BN if not GATED or (BM % BLOCK == 0 and BLOCK % BN == 0) else start
    total, excess = add_from_keys(
        total, excess, queries, incoming, rate_i, shift_i, k, v, high, low, high_first, low_first, early, start, start, whole, i,
        limit, k_step, v_step, False, GATED, POWER, D, E, BD, BE, BN, BLOCK, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    total, excess = total * later[:, None], excess * later
    if past is not None:  # noqa: SIM102 (decided at compile time)
        if (chunk > 0) | BEGUN:
            through = load_rows(past + row_of * T * D, i, stop, D, D, BD, ACC)
            total, excess = total + through, excess + tl.sum(through * queries.to(ACC), 1)  # by Euler's theorem
    total, excess = add_from_keys(
        total, excess, queries, incoming, rate_i, shift_i, k, v, high, low, high_i, low_i, early, start, whole,
        tl.minimum(first + BM, stop), i, limit, k_step, v_step, True, GATED, POWER, D, E, BD, BE, BN, BLOCK, COMMON, PRECISION,
        OFFSET,
    )  # fmt: skip
    if d_q is not None:
        column = tl.arange(0, BD)[None, :]
        row = (batch * T + i) * heads + head
        tl.store(d_q + row[:, None] * D + column, total.to(d_q.dtype.element_ty), mask=(i < stop)[:, None] & (column < D))
    shift_i -= rate_i * excess * (1.0 / POWER)
    tl.store(balanced + row_of * T + i, shift_i, mask=i < stop)
    if past_shift is not None:
        tl.store(past_shift + row_of * T + i, shift_i * tl.exp(high_i + low_i), mask=i < stop)


@triton.jit
def add_from_queries(
    to_keys, to_values, kept, keys, values, q, grad, rate, shift, high, low, high_j, low_j, late, chunk, first, last, stop, q_step,
    g_step, j, MASKED: tl.constexpr, GATED: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the gradients through the weights of one head's queries from `first` to `last`: ∂k, ∂v, and p Σ_i w_ij ∂w_ij.

    Queries that are not MASKED come after all keys. Then `high_j` and `low_j` are G of the last key, e^{G_i − G_j} is a product of
    three factors as in `add_keys`, and the caller multiplies by the keys' own.
    """
    ACC: tl.constexpr = to_keys.dtype
    for start in range(first, last, BN):
        i = places(start, BN, OFFSET)
        queries, incoming = load_rows(q, i, stop, q_step, D, BD, COMMON), load_rows(grad, i, stop, g_step, E, BE, COMMON)
        inside = None if stop is None else i < stop
        rate_i, shift_i = load(rate + i, inside), load(shift + i, inside)
        products = tl.dot(keys, queries.T, input_precision=PRECISION, out_dtype=ACC)
        toward = tl.dot(values, incoming.T, input_precision=PRECISION, out_dtype=ACC)
        slopes = slope(products, POWER)
        if GATED and MASKED:
            high_i, low_i = load(high + i, inside), load(low + i, inside)
            if stop is not None:  # e^{0 − G_j} would overflow
                high_i = tl.where(inside, high_i, -float("inf"))
            slopes *= tl.exp((high_i[None, :] - high_j[:, None]) + (low_i[None, :] - low_j[:, None]))
        elif GATED:
            begin = chunk + (start - chunk) // BLOCK * BLOCK
            between = tl.exp((tl.load(high + begin) - high_j) + (tl.load(low + begin) - low_j))
            later = load(late + i, inside) * between
            rate_i, shift_i = rate_i * later, shift_i * later
        if MASKED:
            slopes = tl.where(i[None, :] >= j[:, None], slopes, 0)
        weights = slopes * products * (rate_i * (1.0 / POWER))[None, :]
        d_products = slopes * (toward * rate_i[None, :] + shift_i[None, :])
        if MASKED:  # a masked pair may be 0 · ∞
            unseen = slopes == 0
            weights, d_products, products = (
                tl.where(unseen, 0, weights),
                tl.where(unseen, 0, d_products),
                tl.where(unseen, 0, products),
            )
        to_values = tl.dot(nearest(weights, COMMON, PRECISION), incoming, to_values, input_precision=PRECISION, out_dtype=ACC)
        kept += tl.sum(d_products * products, 1)
        to_keys = tl.dot(nearest(d_products, COMMON, PRECISION), queries, to_keys, input_precision=PRECISION, out_dtype=ACC)
    return to_keys, to_values, kept


@triton.jit(do_not_specialize=[*SIZES, *QKV, *GRAD])
def _key_gradients(
    q,
    k,
    v,
    grad,
    high,
    low,
    late,  # [B, h, T], the decay since the first row of its BLOCK
    rate,
    shift,
    past_k,  # [B, h, T, d] and [B, h, T, e], the gradients through the states; or None
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
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    RETURNED: tl.constexpr,  # the state after the last chunk has a gradient
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,  # keys
    BN: tl.constexpr,  # queries at a time
):
    """∂k_j and ∂v_j = Σ_i rate_i w_ij ∂out_i, over the heads of queries that share the keys."""
    blocks = tl.cdiv(C, BM)
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks  # long columns first
    row_of, batch, shared = head_program(h)
    heads = h * groups
    first = chunk * C + block * BM
    stop = tl.minimum(chunk * C + C, T)
    if not EVEN:  # noqa: SIM102 (decided at compile time)
        if first >= stop:  # the last chunk is shorter, and has fewer blocks
            return
    j = places(first, BM, OFFSET)
    k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
    q_step, k_step, v_step = multiple(q_row, UNITS[0]), multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    g_step = multiple(g_row, UNITS[4])
    limit = None if EVEN else stop
    keys, values = load_rows(k, j, limit, k_step, D, BD, COMMON), load_rows(v, j, limit, v_step, E, BE, COMMON)
    to_keys, to_values, kept = tl.zeros([BM, BD], ACC), tl.zeros([BM, BE], ACC), tl.zeros([BM], ACC)
    GATED: tl.constexpr = high is not None
    earlier = kept + 1  # e^{G − G_j}, where G is that of the last key
    high_j, low_j, high_last, low_last = kept, kept, kept, kept
    last = tl.minimum(first + BM, stop)
    # queries that see all keys; with gates, only where blocks of queries begin and blocks of keys end with a BLOCK
    whole = first + BM if not GATED or (BM % BLOCK == 0 and BLOCK % BN == 0) else stop
    if GATED:
        high += row_of * T
        low += row_of * T
        late += row_of * T
        high_j, low_j = tl.load(high + j, mask=j < stop, other=0), tl.load(low + j, mask=j < stop, other=0)
        high_last, low_last = tl.load(high + last - 1), tl.load(low + last - 1)
        earlier = tl.exp((high_last - high_j) + (low_last - low_j))
    for member in range(groups):
        head = shared * groups + member
        vectors = (batch * heads + head) * T
        to_keys, to_values, kept = add_from_queries(
            to_keys, to_values, kept, keys, values, q + batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0]),
            grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4]), rate + vectors, shift + vectors, high,
            low, high_last, low_last, late, chunk * C, whole, stop, limit, q_step, g_step, j, False, GATED, POWER, D, E, BD, BE, BN,
            BLOCK, COMMON, PRECISION, OFFSET,
        )  # fmt: skip
    to_keys, to_values, kept = to_keys * earlier[:, None], to_values * earlier[:, None], kept * earlier
    if past_k is not None:  # noqa: SIM102 (decided at compile time)
        if (chunk < chunks - 1) | RETURNED:
            through = load_rows(past_k + row_of * T * D, j, stop, D, D, BD, ACC)
            to_keys, kept = to_keys + through, kept + tl.sum(through * keys.to(ACC), 1)
            to_values += load_rows(past_v + row_of * T * E, j, stop, E, E, BE, ACC)
    for member in range(groups):
        head = shared * groups + member
        vectors = (batch * heads + head) * T
        to_keys, to_values, kept = add_from_queries(
            to_keys, to_values, kept, keys, values, q + batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0]),
            grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4]), rate + vectors, shift + vectors, high,
            low, high_j, low_j, late, chunk * C, first, tl.minimum(whole, stop), limit, q_step, g_step, j, True, GATED, POWER, D, E,
            BD, BE, BN, BLOCK, COMMON, PRECISION, OFFSET,
        )  # fmt: skip
    row = (batch * T + j) * h + shared
    if d_k is not None:
        column = tl.arange(0, BD)[None, :]
        tl.store(d_k + row[:, None] * D + column, to_keys.to(d_k.dtype.element_ty), mask=(j < stop)[:, None] & (column < D))
    if d_v is not None:
        column = tl.arange(0, BE)[None, :]
        tl.store(d_v + row[:, None] * E + column, to_values.to(d_v.dtype.element_ty), mask=(j < stop)[:, None] & (column < E))
    if passed is not None:
        tl.store(passed + row_of * T + j, kept * (1.0 / POWER), mask=j < stop)


@triton.jit
def flow_before(flows, chunk, chunks, flow_columns, BT: tl.constexpr):
    """The sum over keys before a chunk and queries from it on."""
    total = tl.zeros([], tl.float64)
    for first in range(0, flow_columns, BT):
        column = first + tl.arange(0, BT)
        flow = tl.load(flows + chunk * flow_columns + column, mask=column < flow_columns, other=0).to(tl.float64)
        if chunk > 0:
            flow += tl.load(flows + chunks * flow_columns + column, mask=column < flow_columns, other=0).to(tl.float64)
        total += tl.sum(flow, 0)
    return total


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
    BEGUN: tl.constexpr,
    RETURNED: tl.constexpr,
    BT: tl.constexpr,
):
    """A gate scales the weights between all keys before it and all queries from it on; its gradient is their Σ w ∂w. From one token
    to the next, this sum gains the token's key and loses its queries, whose own sum is 0.

    The sums before and after a chunk are both known, from rounded states. Where they disagree, the difference is spread over the
    chunk. If it is not finite, the sum starts from the end, so that gates after an infinite query have finite gradients.
    """
    chunk = tl.program_id(0)
    row_of, batch, head = head_program(h)
    start = chunk * C
    stop = tl.minimum(start + C, T)
    before, after, gains = tl.zeros([], tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    doubt_before, doubt_after = 0, 0  # the rounding errors of these sums, as multiples of one token's
    if flows is not None:
        flows += row_of * (chunks + 1) * flow_columns
        before += flow_before(flows, chunk, chunks, flow_columns, BT)
        if (chunk > 0) | BEGUN:
            doubt_before += DOUBT
        if chunk < chunks - 1:
            after += flow_before(flows, chunk + 1, chunks, flow_columns, BT)
            doubt_after += DOUBT
    t = tl.arange(0, BT)
    for first in range(start, stop, BT):
        gains += tl.sum(tl.load(passed + row_of * T + first + t, mask=first + t < stop, other=0).to(tl.float64), 0)
    drift = after - before - gains
    if RETURNED:
        drift = tl.where(chunk < chunks - 1, drift, 0)
    backwards = drift - drift != 0
    total = tl.where(backwards, after, before)
    for first in range(0, stop - start, BT):
        i = tl.where(backwards, stop - 1 - first - t, start + first + t)
        inside = (i >= start) & (i < stop)
        gain = tl.load(passed + row_of * T + i, mask=inside, other=0).to(tl.float64)
        share = (first + t + doubt_before).to(tl.float64) / (stop - start + doubt_before + doubt_after)
        found = tl.where(backwards, total - tl.cumsum(gain, 0), total + tl.cumsum(gain, 0) - gain + drift * share)
        total += tl.where(backwards, -tl.sum(gain, 0), tl.sum(gain, 0))
        gate = tl.load(log_gate + batch * g_batch + head * g_head + i.to(tl.int64) * g_row, mask=inside, other=0)
        found = tl.where(gate < LEAST_GATE, 0, found)
        tl.store(d_log_gate + (batch * T + i) * h + head, found.to(d_log_gate.dtype.element_ty), mask=inside)
