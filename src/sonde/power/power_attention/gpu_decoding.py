"""Decoding: one token through one kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.powers import power_columns
from .._device.tiles import head_program
from .gpu_states import LEAST_GATE, is_rounding


@triton.jit(do_not_specialize=["h", "q_batch", "q_head", "k_batch", "k_head", "v_batch", "v_head", "g_batch", "g_head", "least"])
def _step(
    q,  # [B, h · GROUPS, d], rows contiguous
    k,  # [B, h, d]
    v,  # [B, h, e]
    log_gate,  # [B, h], or None
    S,  # [B, h, D, e]
    z,  # [B, h, D]
    norms,  # [B, h]
    tiles,  # [tiles, P]
    roots,  # [tiles]
    out,  # [B, h · GROUPS, e]
    new_S,
    new_z,
    new_norms,
    rates,  # [B, h · GROUPS]
    lost,  # as `out`, or None
    h,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    g_batch,
    g_head,
    least,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,  # of the state
    POWER: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    ACC: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
):
    """One token: the state is read once, written once, and applied to the queries on the way."""
    row_of, batch, head = head_program(h)
    column, number = tl.program_id(0) * BE + tl.arange(0, BE), tl.arange(0, BD)
    q += batch * q_batch + head * GROUPS * q_head
    k += batch * k_batch + head * k_head
    values = tl.load(v + batch * v_batch + head * v_head + column, mask=column < E, other=0).to(ACC)
    decay = tl.full([], 1, ACC)
    if log_gate is not None:
        gate = tl.load(log_gate + batch * g_batch + head * g_head).to(ACC)
        decay = tl.exp(tl.where(gate < LEAST_GATE, LEAST_GATE, gate))
    S += row_of * ROWS * E
    new_S += row_of * ROWS * E
    totals, sums = (), ()
    for _ in tl.static_range(GROUPS):
        totals = totals + (tl.zeros([BR, BE], ACC),)
        sums = sums + (tl.zeros([BR], ACC),)
    for first in range(0, ROWS, BR):
        r = first + tl.arange(0, BR)
        inside, at = (r < ROWS)[:, None] & (column < E)[None, :], r.to(tl.int64)[:, None] * E + column[None, :]
        phi = power_columns(k, 1, r, r < ROWS, tiles, roots, POWER, TILE, SPAN, True, ACC)
        state = tl.load(S + at, mask=inside, other=0).to(ACC) * decay + phi[:, None] * values[None, :]
        moments = tl.load(z + row_of * ROWS + r, mask=r < ROWS, other=0).to(ACC) * decay + phi
        tl.store(new_S + at, state, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(new_z + row_of * ROWS + r, moments, mask=r < ROWS)
        added, added_sums = (), ()
        for g in tl.static_range(GROUPS):
            phi = power_columns(q + g * q_head, 1, r, r < ROWS, tiles, roots, POWER, TILE, SPAN, True, ACC)
            added = added + (totals[g] + phi[:, None] * state,)
            added_sums = added_sums + (sums[g] + phi * moments,)
        totals, sums = added, added_sums
    x = tl.load(k + number, mask=number < D, other=0).to(ACC)
    length = tl.sum(x * x, 0)
    if POWER == 4:
        length = length * length
    norm = tl.load(norms + row_of).to(ACC) * decay + length
    if tl.program_id(0) == 0:
        tl.store(new_norms + row_of, norm)
    for g in tl.static_range(GROUPS):
        x = tl.load(q + g * q_head + number, mask=number < D, other=0).to(ACC)
        length = tl.sum(x * x, 0)
        if POWER == 4:
            length = length * length
        total, weights = tl.sum(totals[g], 0), tl.sum(sums[g], 0)
        most = norm * length
        dead = is_rounding(weights, most, least)
        rate = tl.where(dead, 0, 1 / weights)
        found = tl.where(dead, 0, total * rate)
        row = row_of * GROUPS + g
        rounded = found.to(out.dtype.element_ty)
        tl.store(out + row * E + column, rounded, mask=column < E)
        if lost is not None:
            tl.store(lost + row * E + column, (found - rounded.to(ACC)).to(lost.dtype.element_ty), mask=column < E)
        if tl.program_id(0) == 0:
            tl.store(rates + row, rate)
