"""The kernels of ``ms_deform_attn``, one for the value and one for all gradients, and the configurations that they run in.

A program has one head and a few queries, and a tile ``[samples, channels]``: neighbouring rows are points that one query has in
one level, so that their locations are one access. Levels and blocks of points take turns.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...op.gpu import Launch, accumulator, cdiv, power_of_2, vector_of
from .._gpu_pyramid import block_of, fetch, level, locate, put, scatter, shares, slopes
from .._gpu_pyramid_expected import gradients, host, parts
from .._gpu_taps import corners

FEW = 4096  # queries times heads that leave a device idle unless each is a program
CHUNK = 8  # tiles of channels whose sums one program keeps


class Problem(NamedTuple):
    """What a launch computes, apart from how."""

    B: int
    S: int
    Q: int
    heads: int
    D: int
    L: int
    P: int
    row: int  # of the values, from pixel to pixel
    batch: int  # from image to image
    vector: int  # which is a multiple of this
    itemsize: int  # of a value
    logits: bool
    table: bool
    mask: bool
    wide: torch.dtype
    int64: bool  # offsets
    gradients: bool


class Config(NamedTuple):
    block_q: int  # queries that are in flight together
    block_p: int  # points of a query and a level that are
    unroll: int  # turns that are
    repeat: int  # blocks of queries of a program, one after the other
    num_warps: int


def default_config(p: Problem) -> Config:
    """One warp. For a gradient, or where queries are few, its threads have one access of a tile, of four numbers or of 16 bytes.

    Where queries are few, each is a program and has four levels in flight; else a thread finds a sample for all that have its
    channels, or, for a gradient, several blocks take turns, whose neighbours add to much the same. What decides the order of a sum
    does not depend on the batch.
    """
    few, block_c = p.Q * p.heads <= FEW, block_of(max(1, p.D))
    block_p = min(power_of_2(p.P), 8)
    if p.gradients or few:
        rows = 32 * vector_of(4 if p.gradients else 16 // p.itemsize, p.row, p.D, block_c) // block_c
    else:
        sums = min(CHUNK, cdiv(p.D, block_c)) * block_c * (p.wide.itemsize // 4)  # of a row, in registers
        rows = min(32, 256 * block_p // block_c, power_of_2(1024 // sums + 1) // 2)  # the largest power of two
    block_p = min(block_p, rows)
    unroll, repeat = (2, 1 if few else 4) if p.gradients else (4, 1) if few else (1, 1)
    return Config(max(1, min(rows // block_p, power_of_2(p.Q))), block_p, unroll, repeat, 1)


def candidate_configs(p: Problem) -> list[Config]:
    """The default, then others, those that differ in the fewest respects first."""
    default = default_config(p)
    found = {default: 0}
    for warps, rows, block_p, unroll, repeat in product((1, 2, 4), (4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        config = Config(max(1, warps * rows // block_p), block_p, unroll, repeat, warps)
        if block_p <= power_of_2(p.P) and config.block_q <= power_of_2(p.Q):
            found.setdefault(config, sum(x != y for x, y in zip(config, default)))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """Every number is a power of two, and a tile fits into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in config)
    return powers and config.block_q * config.block_p * block_of(max(1, p.D)) <= 2048 * config.num_warps


def launch(p: Problem, config: Config) -> Launch:
    block_c, tiles = block_of(max(1, p.D)), cdiv(p.D, block_of(max(1, p.D)))
    chunk = max(1, min(CHUNK, tiles))
    grid = (p.B * p.heads * cdiv(p.Q, config.block_q * config.repeat), 1 if p.gradients else cdiv(tiles, chunk), 1)
    turns = p.L * cdiv(p.P, config.block_p)
    block_s = max(block_c, power_of_2(turns)) if p.gradients else min(32, power_of_2(p.L * p.P))
    constants = (
        *(p.D, p.heads, p.L, p.P, p.row, p.vector, p.logits, p.table, p.mask),
        *(accumulator(p.wide), tl.int64 if p.int64 else tl.int32),
        *(config.block_q, config.block_p, block_c, block_s, chunk, max(1, min(config.unroll, turns)), config.repeat),
    )
    if not p.gradients:
        each = config.block_q * config.block_p * block_c // (32 * config.num_warps)  # numbers of a tile that a thread has
        constants = (*constants, max(1, min(each // 8, config.block_p)))
    return Launch(grid, (p.S, p.Q, p.batch), constants, config.num_warps)


SIZES = ["S", "Q", "BATCH"]


@triton.jit(do_not_specialize=SIZES)
def _attend(
    value,  # [B, S, h, D], pixels ROW apart
    shapes,  # levels, as _gpu_pyramid has them
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
    BLOCK_S: tl.constexpr,  # logits of a query that are summed together
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    REPEAT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Some tiles of channels, all samples in turn; a thread's sums stay in it until the end.

    Where samples lie and what their corners weigh is found by one thread for each, and then told to those that have their channels,
    PARTS of the samples in turn: rows of a tile are the same query's in all parts.
    """
    SAMPLES: tl.constexpr = BLOCK_Q * BLOCK_P
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    PAIRED: tl.constexpr = value.dtype.element_ty == tl.bfloat16 and D % 2 == 0 and ROW % 2 == 0 and VECTOR % 2 == 0
    PAIR: tl.constexpr = 2 if PAIRED else 1
    WIDTH: tl.constexpr = BLOCK_C // PAIR
    b, h, q0 = which(Q, HEADS, BLOCK_Q * REPEAT)
    image = value + b * (BATCH // VECTOR * VECTOR) + h * D
    if PAIRED:
        image = image.to(tl.pointer_type(tl.int32), bitcast=True)
    i = tl.arange(0, SAMPLES)
    c = tl.arange(0, WIDTH)[None, :]
    c0 = tl.program_id(1) * (TILES * BLOCK_C) if TILES * BLOCK_C < D else 0
    for _ in range(REPEAT):
        in_q = q0 + i // BLOCK_P < Q
        first = ((b * Q + q0) * HEADS + h) * (L * P)  # sample of the block
        row = (i // BLOCK_P).to(OFFSET) * (HEADS * L * P)
        if LOGITS:
            each = tl.arange(0, BLOCK_Q)[:, None]
            most, scale = normaliser(weights + first, each.to(OFFSET) * (HEADS * L * P), q0 + each < Q, L * P, BLOCK_S, ACC)
            most, scale = repeated(most, BLOCK_P), repeated(scale, BLOCK_P)
        totals = ()  # of each tile; of pairs, those of the first and of the second
        for _ in tl.static_range(TILES * PAIR):
            totals = totals + (tl.zeros([SAMPLES // PARTS, WIDTH], ACC),)
        for turn in tl.range(0, L * BLOCKS, loop_unroll_factor=UNROLL):
            lev, point = turn // BLOCKS, turn % BLOCKS * BLOCK_P + i % BLOCK_P
            sample, in_p = row + lev * P + point, in_q & (point < P)
            v, u = fetch(locations + 2 * first, sample, in_p, ACC)
            w = tl.load(weights + first + sample, mask=in_p, other=0).to(ACC)
            H, W, start = level(shapes, starts, lev, TABLE, MASK, OFFSET)
            pixel, fy, fx, k00, k01, k10, k11, _live = locate(v, u, in_p, H, W, start, S, MASK, OFFSET)
            if LOGITS:
                w = tl.exp(w - most) * scale
            s00, s01, s10, s11 = shares(fy, fx)
            s00, s01 = tl.where(k00, w * s00, 0), tl.where(k01, w * s01, 0)
            s10, s11 = tl.where(k10, w * s10, 0), tl.where(k11, w * s11, 0)
            there = k00.to(tl.int32) + 2 * k01.to(tl.int32) + 4 * k10.to(tl.int32) + 8 * k11.to(tl.int32)
            for j in tl.static_range(PARTS):
                at, k = part(pixel, j, PARTS), part(there, j, PARTS)
                k00, k01, k10, k11 = (k & 1) != 0, (k & 2) != 0, (k & 4) != 0, (k & 8) != 0
                p00, p01 = part(s00, j, PARTS), part(s01, j, PARTS)
                p10, p11 = part(s10, j, PARTS), part(s11, j, PARTS)
                sums = ()
                for t in tl.static_range(TILES):
                    cs = c + (c0 + t * BLOCK_C) // PAIR
                    if PAIRED:
                        v00, v01, v10, v11 = corners(image, at, k00, k01, k10, k11, cs, cs < D // 2, W, ROW // 2, tl.int32)
                        even = totals[2 * t] + p00 * low(v00) + p01 * low(v01) + p10 * low(v10) + p11 * low(v11)
                        odd = totals[2 * t + 1] + p00 * high(v00) + p01 * high(v01) + p10 * high(v10) + p11 * high(v11)
                        sums = sums + (even, odd)
                    else:
                        v00, v01, v10, v11 = corners(image, at, k00, k01, k10, k11, cs, cs < D, W, ROW, ACC)
                        sums = sums + (totals[t] + p00 * v00 + p01 * v01 + p10 * v10 + p11 * v11,)
                totals = sums
        q = q0 + tl.arange(0, BLOCK_Q)[:, None]
        for t in tl.static_range(TILES):
            total = tl.sum(tl.reshape(totals[PAIR * t], [BLOCK_Q, BLOCK_P // PARTS, WIDTH]), 1)
            if PAIRED:
                total = tl.interleave(total, tl.sum(tl.reshape(totals[2 * t + 1], [BLOCK_Q, BLOCK_P // PARTS, WIDTH]), 1))
            cs = c0 + t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            put(out + ((b * Q + q) * HEADS + h) * D + cs, total, (q < Q) & (cs < D))
        q0 += BLOCK_Q


@triton.jit
def repeated(x, TIMES: tl.constexpr):
    """Each number of a column so many times."""
    return tl.reshape(tl.broadcast_to(x, [x.shape[0], TIMES]), [x.shape[0] * TIMES])


@triton.jit
def part(x, j: tl.constexpr, PARTS: tl.constexpr):
    """A column of one in PARTS of `x`."""
    if PARTS == 1:
        column = x[:, None]
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        column = part(odd if j % 2 else even, j // 2, PARTS // 2)
    return column


@triton.jit
def low(pair):
    """Of two bfloat16 in 32 bits the first, which takes one instruction; as a number of its own it takes two."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def which(Q, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """The image, head and first query of a program. Heads take turns, so that what is read at one time fits into the cache."""
    blocks = tl.cdiv(Q, QUERIES)
    i = tl.program_id(0)
    return (i // blocks // HEADS).to(tl.int64), i // blocks % HEADS, i % blocks * QUERIES


@triton.jit
def normaliser(weights, row, in_q, N: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """The largest of each row's N logits, and one over the sum of exp(logit − largest)."""
    most = tl.full(row.shape, float("-inf"), ACC)
    total = tl.zeros(row.shape, ACC)
    for s0 in range(0, N, BLOCK):
        s = s0 + tl.arange(0, BLOCK)[None, :]
        x = tl.load(weights + row + s, mask=in_q & (s < N), other=tl.where(in_q, float("-inf"), 0)).to(ACC)
        more = tl.maximum(most, tl.max(x, 1, keep_dims=True))
        shift = tl.where(more == float("-inf"), 0, more)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(x - shift), 1, keep_dims=True)
        most = more
    return most, 1 / total


@triton.jit(do_not_specialize=SIZES)
def _attend_gradients(
    grad,  # [B, Q, h, D]
    value,  # [B, S, h, D], pixels ROW apart
    shapes,
    starts,
    locations,  # [B, Q, h, L, P, 2]
    weights,  # [B, Q, h, L, P]
    d_value,  # [B, S, h, D]; None where nobody asked
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
    BLOCK_S: tl.constexpr,  # no fewer than there are turns
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """All gradients in one pass over the samples, for each all channels."""
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_P
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    READS: tl.constexpr = d_locations is not None or d_weights is not None
    SOFT: tl.constexpr = LOGITS and d_weights is not None
    b, h, q0 = which(Q, HEADS, BLOCK_Q * REPEAT)
    if READS:
        image = value + b * (BATCH // VECTOR * VECTOR) + h * D
    if d_value is not None:
        d_image = d_value + b * S * (HEADS * D) + h * D
    i = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    for _ in range(REPEAT):
        in_q = q0 + i // BLOCK_P < Q
        first = ((b * Q + q0) * HEADS + h) * (L * P)
        row = (i // BLOCK_P).to(OFFSET) * (HEADS * L * P)
        g_row = grad + ((b * Q + q0) * HEADS + h) * D + (i // BLOCK_P) * (HEADS * D) + c
        if D <= BLOCK_C:
            g = tl.load(g_row, mask=in_q & (c < D), other=0).to(ACC)
        if LOGITS:
            most, scale = normaliser(weights + first, row, in_q, L * P, BLOCK_S, ACC)
        if SOFT:
            products = tl.zeros([ROWS, BLOCK_S], ACC)  # of grad and sample, turn by turn
        for turn in tl.range(0, L * BLOCKS, loop_unroll_factor=UNROLL):
            lev, point = turn // BLOCKS, turn % BLOCKS * BLOCK_P + i % BLOCK_P
            sample, in_p = row + lev * P + point, in_q & (point < P)
            v, u = fetch(locations + 2 * first, sample, in_p, ACC)
            w = tl.load(weights + first + sample, mask=in_p, other=0).to(ACC)
            H, W, start = level(shapes, starts, lev, TABLE, MASK, OFFSET)
            pixel, fy, fx, k00, k01, k10, k11, live = locate(v, u, in_p, H, W, start, S, MASK, OFFSET)
            s00, s01, s10, s11 = shares(fy, fx)
            if LOGITS:
                w = tl.exp(w - most) * scale
            w = tl.where(live, w, 0)
            g00 = tl.zeros([ROWS, BLOCK_C], ACC)  # products of grad and each corner, summed over tiles
            g01, g10, g11 = g00, g00, g00
            for c0 in tl.range(0, D, BLOCK_C):
                if D > BLOCK_C:
                    g = tl.load(g_row + c0, mask=in_q & (c0 + c < D), other=0).to(ACC)
                if READS:
                    v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, c0 + c, c0 + c < D, W, ROW, ACC)
                    g00, g01, g10, g11 = g00 + g * v00, g01 + g * v01, g10 + g * v10, g11 + g * v11
                if d_value is not None:
                    p = d_image + pixel * (HEADS * D) + c0 + c
                    scatter(p, w * g, s00, s01, s10, s11, k00, k01, k10, k11, c0 + c < D, W, HEADS * D)
            if READS:
                d00, d01 = tl.sum(g00, 1, keep_dims=True), tl.sum(g01, 1, keep_dims=True)
                d10, d11 = tl.sum(g10, 1, keep_dims=True), tl.sum(g11, 1, keep_dims=True)
            if d_locations is not None:
                dy, dx = slopes(d00, d01, d10, d11, fy, fx)
                put(d_locations + 2 * first + 2 * sample, tl.where(live, w * dx * W, 0), in_p)
                put(d_locations + 2 * first + 2 * sample + 1, tl.where(live, w * dy * H, 0), in_p)
            if d_weights is not None:
                product = tl.where(live, s00 * d00 + s01 * d01 + s10 * d10 + s11 * d11, 0)
                if LOGITS:
                    products = tl.where(tl.arange(0, BLOCK_S)[None, :] == turn, product, products)
                else:
                    put(d_weights + first + sample, product, in_p)
        if SOFT:
            turn = tl.arange(0, BLOCK_S)[None, :]
            point = turn % BLOCKS * BLOCK_P + i % BLOCK_P
            sample, in_p = row + turn // BLOCKS * P + point, in_q & (point < P) & (turn < L * BLOCKS)
            x = tl.load(weights + first + sample, mask=in_p, other=float("-inf")).to(ACC)
            w = tl.where(in_p, tl.exp(x - most) * scale, 0)
            mean = tl.sum(tl.reshape(tl.sum(w * products, 1), [BLOCK_Q, BLOCK_P]), 1, keep_dims=True)
            mean = tl.reshape(tl.broadcast_to(mean, [BLOCK_Q, BLOCK_P]), [ROWS, 1])
            put(d_weights + first + sample, w * (products - mean), in_p)
        q0 += BLOCK_Q


def _parts(p: Problem) -> list[slice]:
    return parts(p.Q, p.B * p.heads * p.L * p.P * p.D)


def expected(p: Problem, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, out: Tensor):
    from .reference import ms_deform_attn

    levels, wide = host(p.table, shapes, starts), value.to(p.wide)
    parts = [ms_deform_attn(wide, None, None, locations[:, q], weights[:, q], levels, p.logits) for q in _parts(p)]
    return {5: torch.cat(parts, 1).view(out.shape)}


def expected_gradients(
    p: Problem, grad: Tensor, value, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, *results
):
    from .reference import ms_deform_attn

    if value is None:
        value = torch.zeros(p.B, p.S, p.heads, p.D, device=grad.device)
    levels, rows = host(p.table, shapes, starts), grad.reshape(p.B, p.Q, -1)
    return gradients(ms_deform_attn, levels, p.logits, _parts(p), rows, value, locations, weights, results, p.wide)


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
