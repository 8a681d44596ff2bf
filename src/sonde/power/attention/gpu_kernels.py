"""Attention's kernels: the forward pass, and the gradients of queries and of keys and values, which recompute the weights."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.powers import exact
from .._device.softmax import add_block
from .._device.tiles import head_program, load_columns, load_rows, multiple, places

HEADS = ["B_h", "groups", "T", "S"]  # B_h: heads of keys and values
QKV = ["q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"]
REST = ["o_batch", "o_head", "o_row", "g_batch", "g_head", "g_row"]
SCALE = ["scale", "scale_low"]


@triton.jit
def sees(i, j, S, CAUSAL: tl.constexpr):
    """Whether query i sees key j."""
    there = j < S
    if CAUSAL:
        there = there & (j <= i)
    return there


@triton.jit
def add_keys(
    total, norm, most, queries, k, v, batch, shared, first, last, i, S, k_step, v_step, factor, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, DESCRIBED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, COMMON: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys from `first` to `last`; without MASKED, every query must see all of these keys."""
    for start in range(first, last, BN):
        j = places(start, BN, OFFSET)
        if DESCRIBED:
            keys = k.load([batch.to(tl.int32), shared.to(tl.int32), start, 0]).reshape(BN, BD).T
            values = v.load([batch.to(tl.int32), shared.to(tl.int32), start, 0]).reshape(BN, BE)
        else:
            keys, values = load_columns(k, j, S, k_step, D, BD, COMMON), load_rows(v, j, S, v_step, E, BE, COMMON)
        logits = tl.dot(queries, keys, input_precision=PRECISION, out_dtype=total.dtype)
        if NEGATIVE:  # a negative scale: the largest product would not be the largest logit
            logits = -logits
        if MASKED:
            logits = tl.where(sees(i[:, None], j[None, :], S, CAUSAL), logits, -float("inf"))
        total, norm, most = add_block(total, norm, most, logits, factor, values, COMMON, PRECISION)
    return total, norm, most


@triton.jit(do_not_specialize=[*HEADS, *QKV, *SCALE])
def _attend(
    q,  # [B, h · groups, T, d], rows contiguous; or a descriptor, as k and v
    k,  # [B, h, S, d], rows contiguous
    v,  # [B, h, S, e], rows contiguous
    out,  # [B, h · groups, T, e], contiguous
    lse,  # [B, h · groups, T]
    lost,  # [B, h · groups, T, e], the rounding error of `out`; None if there is none
    B_h,
    groups,
    T,
    S,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    scale,
    scale_low,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,  # the scale is negative, and is passed without its sign
    DESCRIBED: tl.constexpr,  # q, k and v are descriptors of [B, heads, rows, numbers]
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    heads = B_h * groups
    query_row, batch, head = head_program(heads)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # long rows first
    i = places(first, BM, OFFSET)
    shared = head // groups
    k_step, v_step = multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    if DESCRIBED:
        queries = q.load([batch.to(tl.int32), head.to(tl.int32), first, 0]).reshape(BM, BD)
    else:
        k += batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1])
        v += batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2])
        q += batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0])
        queries = load_rows(q, i, T, multiple(q_row, UNITS[0]), D, BD, COMMON)
    factor = exact(scale, scale_low, ACC) * 1.4426950408889634  # logits are exponents of two
    total = tl.zeros([BM, BE], ACC)
    norm = tl.zeros([BM], ACC)
    most = tl.full([BM], -float("inf"), ACC)
    end = tl.minimum(S, first + BM) if CAUSAL else S
    whole = (tl.minimum(end, first + 1) if CAUSAL else S) // BN * BN  # keys that all queries see, in blocks
    total, norm, most = add_keys(
        total, norm, most, queries, k, v, batch, shared, 0, whole, i, S, k_step, v_step, factor, False, CAUSAL, NEGATIVE, DESCRIBED,
        D, E, BD, BE, BN, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    total, norm, most = add_keys(
        total, norm, most, queries, k, v, batch, shared, whole, end, i, S, k_step, v_step, factor, True, CAUSAL, NEGATIVE,
        DESCRIBED, D, E, BD, BE, BN, COMMON, PRECISION, OFFSET,
    )  # fmt: skip
    row = query_row * T + i
    column = tl.arange(0, BE)[None, :]
    found = total / tl.where(S == 0, 1, norm)[:, None]
    rounded, inside = found.to(out.dtype.element_ty), (i < T)[:, None] & (column < E)
    tl.store(out + row[:, None] * E + column, rounded, mask=inside)
    if lost is not None:
        tl.store(lost + row[:, None] * E + column, (found - rounded.to(ACC)).to(lost.dtype.element_ty), mask=inside)
    tl.store(lse + row, (most + tl.log2(norm)) * 0.6931471805599453, mask=i < T)


@triton.jit(do_not_specialize=[*HEADS, *REST])
def _dots(
    out,  # [B, h · groups, T, e], rows contiguous
    lost,  # [B, h · groups, T, e], contiguous, or None
    grad,  # as `out`
    dots,  # [B, h · groups, T], Σ out · grad
    B_h,
    groups,
    T,
    S,
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
    heads = B_h * groups
    query_row, batch, head = head_program(heads)
    i = places(tl.program_id(0) * BM, BM, OFFSET)
    x = load_rows(
        out + batch * multiple(o_batch, UNITS[3]) + head * multiple(o_head, UNITS[3]), i, T, multiple(o_row, UNITS[3]), E, BE, ACC
    )
    if lost is not None:
        x += load_rows(lost + query_row * T * E, i, T, E, E, BE, ACC)
    y = load_rows(
        grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4]), i, T, multiple(g_row, UNITS[4]), E, BE, ACC
    )
    tl.store(dots + query_row * T + i, tl.sum(x * y, 1), mask=i < T)


@triton.jit(do_not_specialize=[*HEADS, *QKV, *REST, *SCALE])
def _query_gradients(
    q,
    k,
    v,
    grad,  # of the result, rows contiguous
    lse,
    dots,
    d_q,  # contiguous
    B_h,
    groups,
    T,
    S,
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
    scale,
    scale_low,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """∂q of some rows: Σ_j ∂logit · k_j, where ∂logit = weight · (∂out · v_j − ∂out · out)."""
    heads = B_h * groups
    query_row, batch, head = head_program(heads)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = places(first, BM, OFFSET)
    row = query_row * T + i
    k_step, v_step = multiple(k_row, UNITS[1]), multiple(v_row, UNITS[2])
    k += batch * multiple(k_batch, UNITS[1]) + head // groups * multiple(k_head, UNITS[1])
    v += batch * multiple(v_batch, UNITS[2]) + head // groups * multiple(v_head, UNITS[2])
    queries = load_rows(
        q + batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0]), i, T, multiple(q_row, UNITS[0]), D, BD, COMMON
    )
    incoming = load_rows(
        grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4]),
        i,
        T,
        multiple(g_row, UNITS[4]),
        E,
        BE,
        COMMON,
    )
    factor = exact(scale, scale_low, ACC)
    level = tl.load(lse + row, mask=i < T, other=0) * 1.4426950408889634
    level += level - level  # NaN if it is not finite
    dot = tl.load(dots + row, mask=i < T, other=0)
    total = tl.zeros([BM, BD], ACC)
    end = tl.minimum(S, first + BM) if CAUSAL else S
    for start in range(0, end, BN):
        j = places(start, BN, OFFSET)
        keys = load_rows(k, j, S, k_step, D, BD, COMMON)
        logits = tl.dot(queries, keys.T, input_precision=PRECISION, out_dtype=ACC) * (factor * 1.4426950408889634)
        weights = tl.where(sees(i[:, None], j[None, :], S, CAUSAL), tl.exp2(logits - level[:, None]), 0)
        toward = tl.dot(incoming, load_columns(v, j, S, v_step, E, BE, COMMON), input_precision=PRECISION, out_dtype=ACC)
        d_logits = (weights * (toward - dot[:, None])).to(COMMON)
        total = tl.dot(d_logits, keys, total, input_precision=PRECISION, out_dtype=ACC)
    column = tl.arange(0, BD)[None, :]
    tl.store(d_q + row[:, None] * D + column, (total * factor).to(d_q.dtype.element_ty), mask=(i < T)[:, None] & (column < D))


@triton.jit(do_not_specialize=[*HEADS, *QKV, *REST, *SCALE])
def _key_gradients(
    q,
    k,
    v,
    grad,
    lse,
    dots,
    d_k,  # contiguous; None if not needed
    d_v,
    B_h,
    groups,
    T,
    S,
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
    scale,
    scale_low,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """∂k = Σ_i ∂logit · q_i and ∂v = Σ_i weight · ∂out_i of some keys, over the heads of queries that share them."""
    key_row, batch, shared = head_program(B_h)
    first = tl.program_id(0) * BN
    j = places(first, BN, OFFSET)
    q_step, g_step = multiple(q_row, UNITS[0]), multiple(g_row, UNITS[4])
    keys = load_rows(
        k + batch * multiple(k_batch, UNITS[1]) + shared * multiple(k_head, UNITS[1]),
        j,
        S,
        multiple(k_row, UNITS[1]),
        D,
        BD,
        COMMON,
    )
    values = load_rows(
        v + batch * multiple(v_batch, UNITS[2]) + shared * multiple(v_head, UNITS[2]),
        j,
        S,
        multiple(v_row, UNITS[2]),
        E,
        BE,
        COMMON,
    )
    factor = exact(scale, scale_low, ACC)
    to_keys, to_values = tl.zeros([BN, BD], ACC), tl.zeros([BN, BE], ACC)
    begin = first // BM * BM if CAUSAL else 0
    for member in range(0, groups):
        head = shared * groups + member
        rows = (batch * B_h * groups + head) * T
        for start in range(begin, T, BM):
            i = places(start, BM, OFFSET)
            queries = load_rows(
                q + batch * multiple(q_batch, UNITS[0]) + head * multiple(q_head, UNITS[0]), i, T, q_step, D, BD, COMMON
            )
            incoming = load_rows(
                grad + batch * multiple(g_batch, UNITS[4]) + head * multiple(g_head, UNITS[4]), i, T, g_step, E, BE, COMMON
            )
            level = tl.load(lse + rows + i, mask=i < T, other=0) * 1.4426950408889634
            level += level - level  # NaN if it is not finite
            logits = tl.dot(keys, queries.T, input_precision=PRECISION, out_dtype=ACC) * (factor * 1.4426950408889634)
            there = sees(i[None, :], j[:, None], S, CAUSAL) & (i < T)[None, :]
            weights = tl.where(there, tl.exp2(logits - level[None, :]), 0)
            if d_v is not None:
                to_values = tl.dot(weights.to(COMMON), incoming, to_values, input_precision=PRECISION, out_dtype=ACC)
            if d_k is not None:
                dot = tl.load(dots + rows + i, mask=i < T, other=0)
                toward = tl.dot(values, incoming.T, input_precision=PRECISION, out_dtype=ACC)
                d_logits = (weights * (toward - dot[None, :])).to(COMMON)
                to_keys = tl.dot(d_logits, queries, to_keys, input_precision=PRECISION, out_dtype=ACC)
    row = key_row * S + j
    if d_k is not None:
        column = tl.arange(0, BD)[None, :]
        tl.store(d_k + row[:, None] * D + column, (to_keys * factor).to(d_k.dtype.element_ty), mask=(j < S)[:, None] & (column < D))
    if d_v is not None:
        column = tl.arange(0, BE)[None, :]
        tl.store(d_v + row[:, None] * E + column, to_values.to(d_v.dtype.element_ty), mask=(j < S)[:, None] & (column < E))
