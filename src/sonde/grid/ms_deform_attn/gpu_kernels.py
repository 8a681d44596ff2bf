"""The kernels of ``ms_deform_attn``, one for the value and one for all gradients.

A program has one head and a few queries, and loops over levels and blocks of points. Adjacent samples are points of one query in
one level, so that their locations are loaded in one access.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from .._device.long_sums import MANY, compensated, two_sum, zeros
from .._device.taps import corners
from .._pyramid.gpu_expected import gradients, host, portions
from .._pyramid.gpu_levels import level, locate, put, scatter, shares, slopes
from .gpu_configs import Problem, candidate_configs, default_config, fits, launch
from .gpu_parts import fetch_together, high, low, merged, packed, part, repeated, unpacked, whole

SIZES = ["S", "Q", "BATCH"]


@triton.jit(do_not_specialize=SIZES)
def _attend(
    value,  # [B, S, h, D], pixels ROW apart
    shapes,  # levels, see _pyramid.gpu_levels
    starts,
    locations,  # [B, Q, h, L, P, 2]
    weights,  # [B, Q, h, L, P]
    out,  # [B, Q, h, D]
    S,
    Q,
    BATCH,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    LOGITS: tl.constexpr,
    TABLE: tl.constexpr,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,  # logits of a query that are summed at a time
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    REPEAT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Accumulate TILES channel tiles over all samples of BLOCK_Q queries; accumulators stay in registers.

    One thread computes a sample's pixel position and corner weights, which are then broadcast to the threads that hold its
    channels, one of PARTS parts of the samples at a time; a row of a tile belongs to the same query in every part.
    """
    SAMPLES: tl.constexpr = BLOCK_Q * BLOCK_P
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    PAIRED: tl.constexpr = value.dtype.element_ty == tl.bfloat16 and D % 2 == 0 and ROW % 2 == 0 and VECTOR % 2 == 0
    PAIR: tl.constexpr = 2 if PAIRED else 1
    WIDTH: tl.constexpr = BLOCK_C // PAIR
    LONG: tl.constexpr = 4 * L * BLOCKS * PARTS > MANY
    b, h, q0 = which(Q, HEADS, BLOCK_Q * REPEAT)
    image = value + b * (BATCH // VECTOR * VECTOR) + h * D
    if PAIRED:
        image = image.to(tl.pointer_type(tl.int32), bitcast=True)
    i = tl.arange(0, SAMPLES)
    c = tl.arange(0, WIDTH)[None, :]
    c0 = tl.program_id(1) * (TILES * BLOCK_C) if TILES * BLOCK_C < D else 0
    for _ in range(REPEAT):
        in_q = q0 + i // BLOCK_P < Q
        first = ((b * Q + q0) * HEADS + h) * (L * P)  # the block's first sample
        row = (i // BLOCK_P).to(OFFSET) * (HEADS * L * P)
        if LOGITS:
            most, scale = normaliser(weights + first, q0, Q, HEADS, L * P, BLOCK_Q, BLOCK_P, BLOCK_S, ACC, OFFSET)
        totals = ()  # one accumulator per channel tile; bfloat16 pairs have two, for even and odd channels
        for _t in tl.static_range(TILES * PAIR):
            totals = totals + (tl.zeros([SAMPLES // PARTS, WIDTH], ACC),)
        if LONG:
            lost = zeros(totals[0], TILES * PAIR)
        for turn in tl.range(0, L * BLOCKS, loop_unroll_factor=UNROLL):
            lev, point = turn // BLOCKS, turn % BLOCKS * BLOCK_P + i % BLOCK_P
            sample, in_p = row + lev * P + point, in_q & (point < P)
            v, u = fetch_together(locations + 2 * first, sample, in_p, ACC)
            w = tl.load(weights + first + sample, mask=in_p, other=0).to(ACC)
            H, W, start = level(shapes, starts, lev, TABLE, MASK, OFFSET)
            pixel, fy, fx, k00, k01, k10, k11, _live = locate(v, u, in_p, H, W, start, S, ROW, MASK, OFFSET)
            if LOGITS:
                w = tl.exp(w - most) * scale
            s00, s01, s10, s11 = shares(fy, fx)
            s00, s01 = tl.where(k00, w * s00, 0), tl.where(k01, w * s01, 0)
            s10, s11 = tl.where(k10, w * s10, 0), tl.where(k11, w * s11, 0)
            there = packed(k00, k01, k10, k11)
            for j in tl.static_range(PARTS):
                at = part(pixel, j, PARTS)
                k00, k01, k10, k11 = unpacked(part(there, j, PARTS))
                p00, p01 = part(s00, j, PARTS), part(s01, j, PARTS)
                p10, p11 = part(s10, j, PARTS), part(s11, j, PARTS)
                sums = ()
                losses = ()
                for t in tl.static_range(TILES):
                    cs = c + (c0 + t * BLOCK_C) // PAIR
                    if PAIRED:
                        v00, v01, v10, v11 = corners(image, at, k00, k01, k10, k11, cs, cs < D // 2, W, ROW // 2, tl.int32)
                        if LONG:
                            even = p00 * low(v00) + p01 * low(v01) + p10 * low(v10) + p11 * low(v11)
                            odd = p00 * high(v00) + p01 * high(v01) + p10 * high(v10) + p11 * high(v11)
                            even, less = two_sum(totals[2 * t], lost[2 * t], even)
                            odd, fewer = two_sum(totals[2 * t + 1], lost[2 * t + 1], odd)
                            losses = losses + (less, fewer)
                        else:
                            even = totals[2 * t] + p00 * low(v00) + p01 * low(v01) + p10 * low(v10) + p11 * low(v11)
                            odd = totals[2 * t + 1] + p00 * high(v00) + p01 * high(v01) + p10 * high(v10) + p11 * high(v11)
                        sums = sums + (even, odd)
                    else:
                        v00, v01, v10, v11 = corners(image, at, k00, k01, k10, k11, cs, cs < D, W, ROW, ACC)
                        if LONG:
                            more, less = two_sum(totals[t], lost[t], p00 * v00 + p01 * v01 + p10 * v10 + p11 * v11)
                            sums = sums + (more,)
                            losses = losses + (less,)
                        else:
                            sums = sums + (totals[t] + p00 * v00 + p01 * v01 + p10 * v10 + p11 * v11,)
                totals = sums
                if LONG:
                    lost = losses
        q = q0 + tl.arange(0, BLOCK_Q)[:, None]
        if LONG:
            sums = ()
            for t in tl.static_range(TILES * PAIR):
                sums = sums + (compensated(totals[t], lost[t]),)
            totals = sums
        for t in tl.static_range(TILES):
            total = tl.sum(tl.reshape(totals[PAIR * t], [BLOCK_Q, BLOCK_P // PARTS, WIDTH]), 1)
            if PAIRED:
                total = tl.interleave(total, tl.sum(tl.reshape(totals[2 * t + 1], [BLOCK_Q, BLOCK_P // PARTS, WIDTH]), 1))
            cs = c0 + t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            put(out + ((b * Q + q) * HEADS + h) * D + cs, total, (q < Q) & (cs < D))
        q0 += BLOCK_Q


@triton.jit
def which(Q, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """The image, head and first query of a program. Programs run head by head, so that what they read fits into the cache."""
    blocks = tl.cdiv(Q, QUERIES)
    i = tl.program_id(0)
    return (i // blocks // HEADS).to(tl.int64), i // blocks % HEADS, i % blocks * QUERIES


@triton.jit
def normaliser(
    weights, q0, Q, HEADS: tl.constexpr, N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """For each sample of a block: the largest of its query's N logits, and one over the sum of exp(logit − largest)."""
    each = tl.arange(0, BLOCK_Q)[:, None]
    row, in_q = each.to(OFFSET) * (HEADS * N), q0 + each < Q
    most = tl.full(row.shape, float("-inf"), ACC)
    total = tl.zeros(row.shape, ACC)
    LONG: tl.constexpr = N > MANY * BLOCK
    if LONG:  # find the largest first: sums that are rescaled many times lose digits
        for s0 in range(0, N, BLOCK):
            s = s0 + tl.arange(0, BLOCK)[None, :]
            x = tl.load(weights + row + s, mask=in_q & (s < N), other=tl.where(in_q, float("-inf"), 0)).to(ACC)
            most = tl.maximum(most, tl.max(x, 1, keep_dims=True))
        lost = tl.zeros_like(total)
        for s0 in range(0, N, BLOCK):
            s = s0 + tl.arange(0, BLOCK)[None, :]
            x = tl.load(weights + row + s, mask=in_q & (s < N), other=tl.where(in_q, float("-inf"), 0)).to(ACC)
            part = tl.sum(tl.exp(x - tl.where(most == float("-inf"), 0, most)), 1, keep_dims=True)
            total, lost = two_sum(total, lost, part)
        total = compensated(total, lost)
    for s0 in range(0, 0 if LONG else N, BLOCK):
        s = s0 + tl.arange(0, BLOCK)[None, :]
        x = tl.load(weights + row + s, mask=in_q & (s < N), other=tl.where(in_q, float("-inf"), 0)).to(ACC)
        more = tl.maximum(most, tl.max(x, 1, keep_dims=True))
        shift = tl.where(more == float("-inf"), 0, more)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(x - shift), 1, keep_dims=True)
        most = more
    return repeated(most, BLOCK_P), repeated(1 / total, BLOCK_P)


@triton.jit(do_not_specialize=SIZES)
def _attend_gradients(
    grad,  # [B, Q, h, D]
    value,  # [B, S, h, D], pixels ROW apart
    shapes,
    starts,
    locations,  # [B, Q, h, L, P, 2]
    weights,  # [B, Q, h, L, P]
    d_value,  # [B, S, h, D]; None if not needed
    d_locations,
    d_weights,
    S,
    Q,
    BATCH,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    LOGITS: tl.constexpr,
    TABLE: tl.constexpr,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,  # at least the number of steps
    UNROLL: tl.constexpr,
    REPEAT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """All gradients in one pass over the samples, with all channels of each; one thread locates each sample, as in ``_attend``.

    Points of a block that add to the same pixel are merged into one addition.
    """
    SAMPLES: tl.constexpr = BLOCK_Q * BLOCK_P
    ROWS: tl.constexpr = SAMPLES // PARTS
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    READS: tl.constexpr = d_locations is not None or d_weights is not None
    SOFT: tl.constexpr = LOGITS and d_weights is not None
    LONG: tl.constexpr = READS and D > MANY * BLOCK_C
    b, h, q0 = which(Q, HEADS, BLOCK_Q * REPEAT)
    if READS:
        image = value + b * (BATCH // VECTOR * VECTOR) + h * D
    if d_value is not None:
        d_image = d_value + b * S * (HEADS * D) + h * D
    i = tl.arange(0, SAMPLES)
    c = tl.arange(0, BLOCK_C)[None, :]
    of_row = tl.arange(0, ROWS)[:, None] // (BLOCK_P // PARTS)  # the row's query
    for _ in range(REPEAT):
        in_q = q0 + i // BLOCK_P < Q
        first = ((b * Q + q0) * HEADS + h) * (L * P)
        row = (i // BLOCK_P).to(OFFSET) * (HEADS * L * P)
        g_row = grad + ((b * Q + q0) * HEADS + h) * D + of_row * (HEADS * D) + c
        if D <= BLOCK_C:
            g = tl.load(g_row, mask=(q0 + of_row < Q) & (c < D), other=0).to(ACC)
        if LOGITS:
            most, scale = normaliser(weights + first, q0, Q, HEADS, L * P, BLOCK_Q, BLOCK_P, BLOCK_S, ACC, OFFSET)
        if SOFT:
            products = tl.zeros([SAMPLES, BLOCK_S], ACC)  # dot products of grad and sample, one column per step
        for turn in tl.range(0, L * BLOCKS, loop_unroll_factor=UNROLL):
            lev, point = turn // BLOCKS, turn % BLOCKS * BLOCK_P + i % BLOCK_P
            sample, in_p = row + lev * P + point, in_q & (point < P)
            v, u = fetch_together(locations + 2 * first, sample, in_p, ACC)
            w = tl.load(weights + first + sample, mask=in_p, other=0).to(ACC)
            H, W, start = level(shapes, starts, lev, TABLE, MASK, OFFSET)
            pixel, fy, fx, k00, k01, k10, k11, live = locate(v, u, in_p, H, W, start, S, ROW, MASK, OFFSET)
            s00, s01, s10, s11 = shares(fy, fx)
            if LOGITS:
                w = tl.exp(w - most) * scale
            w = tl.where(live, w, 0)
            there = packed(k00, k01, k10, k11)
            if d_value is not None:
                t00, t01, t10, t11, a00, a01, a10, a11 = merged(v, u, w, H, W, BLOCK_P, OFFSET)
                adds = packed(k00 & a00, k01 & a01, k10 & a10, k11 & a11)
            d00, d01, d10, d11 = (), (), (), ()  # dot products of grad and each corner
            for j in tl.static_range(PARTS):
                at = part(pixel, j, PARTS)
                k00, k01, k10, k11 = unpacked(part(there, j, PARTS))
                if d_value is not None:
                    p00, p01, p10, p11 = part(t00, j, PARTS), part(t01, j, PARTS), part(t10, j, PARTS), part(t11, j, PARTS)
                    a00, a01, a10, a11 = unpacked(part(adds, j, PARTS))
                g00 = tl.zeros([ROWS, BLOCK_C], ACC)  # summed over tiles
                g01, g10, g11 = g00, g00, g00
                if LONG:
                    l00, l01, l10, l11 = zeros(g00, 4)
                for c0 in tl.range(0, D, BLOCK_C):
                    if D > BLOCK_C:
                        g = tl.load(g_row + c0, mask=(q0 + of_row < Q) & (c0 + c < D), other=0).to(ACC)
                    if READS:
                        v00, v01, v10, v11 = corners(image, at, k00, k01, k10, k11, c0 + c, c0 + c < D, W, ROW, ACC)
                        if LONG:
                            g00, l00 = two_sum(g00, l00, g * v00)
                            g01, l01 = two_sum(g01, l01, g * v01)
                            g10, l10 = two_sum(g10, l10, g * v10)
                            g11, l11 = two_sum(g11, l11, g * v11)
                        else:
                            g00, g01, g10, g11 = g00 + g * v00, g01 + g * v01, g10 + g * v10, g11 + g * v11
                    if d_value is not None:
                        to = d_image + at * (HEADS * D) + c0 + c
                        scatter(to, g, p00, p01, p10, p11, a00, a01, a10, a11, c0 + c < D, W, HEADS * D)
                if LONG:
                    g00, g01, g10, g11 = compensated(g00, l00), compensated(g01, l01), compensated(g10, l10), compensated(g11, l11)
                if READS:
                    d00, d01 = d00 + (tl.sum(g00, 1),), d01 + (tl.sum(g01, 1),)
                    d10, d11 = d10 + (tl.sum(g10, 1),), d11 + (tl.sum(g11, 1),)
            if READS:
                d00, d01, d10, d11 = whole(d00, PARTS), whole(d01, PARTS), whole(d10, PARTS), whole(d11, PARTS)
            if d_locations is not None:
                dy, dx = slopes(d00, d01, d10, d11, fy, fx)
                put(d_locations + 2 * first + 2 * sample, tl.where(live, w * dx * W, 0), in_p)
                put(d_locations + 2 * first + 2 * sample + 1, tl.where(live, w * dy * H, 0), in_p)
            if d_weights is not None:
                product = tl.where(live, s00 * d00 + s01 * d01 + s10 * d10 + s11 * d11, 0)
                if LOGITS:
                    products = tl.where(tl.arange(0, BLOCK_S)[None, :] == turn, product[:, None], products)
                else:
                    put(d_weights + first + sample, product, in_p)
        if SOFT:
            turn = tl.arange(0, BLOCK_S)[None, :]
            point = turn % BLOCKS * BLOCK_P + i[:, None] % BLOCK_P
            sample, in_p = row[:, None] + turn // BLOCKS * P + point, in_q[:, None] & (point < P) & (turn < L * BLOCKS)
            x = tl.load(weights + first + sample, mask=in_p, other=float("-inf")).to(ACC)
            w = tl.where(in_p, tl.exp(x - most[:, None]) * scale[:, None], 0)
            mean = tl.sum(tl.reshape(tl.sum(w * products, 1), [BLOCK_Q, BLOCK_P]), 1, keep_dims=True)
            put(d_weights + first + sample, w * (products - repeated(mean, BLOCK_P)[:, None]), in_p)
        q0 += BLOCK_Q


def _portions(p: Problem) -> list[slice]:
    return portions(p.Q, p.B * p.heads * p.L * p.P * p.D)


def expected(p: Problem, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, out: Tensor):
    from .reference import ms_deform_attn

    levels, wide = host(p.table, shapes, starts), value.to(p.wide)
    found = [ms_deform_attn(wide, None, None, locations[:, q], weights[:, q], levels, p.logits) for q in _portions(p)]
    return {5: torch.cat(found, 1).view(out.shape)}


def expected_gradients(
    p: Problem, grad: Tensor, value, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, *results
):
    from .reference import ms_deform_attn

    if value is None:
        value = torch.zeros(p.B, p.S, p.heads, p.D, device=grad.device)
    levels, rows = host(p.table, shapes, starts), grad.reshape(p.B, p.Q, -1)
    return gradients(ms_deform_attn, levels, p.logits, _portions(p), rows, value, locations, weights, results, p.wide)


attend = jit.kernel(
    _attend,
    "grid.ms_deform_attn",
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("S", "Q"),
    batch=("B", "batch"),
    writes=(5,),
    fits=fits,
    expected=expected,
)
attend_gradients = jit.kernel(
    _attend_gradients,
    "grid.ms_deform_attn_gradients",
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("S", "Q"),
    batch=("B", "batch"),
    writes=(6, 7, 8),
    adds=(6,),
    fits=fits,
    expected=expected_gradients,
)
