"""The kernels of ``ms_deform_attn``, one for the value and one for all gradients, and the configurations that they run in.

A program has one head and a few queries, and a tile ``[samples, channels]``: neighbouring rows are the points that one query has in
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
    """One warp; its threads have one access of four values for a gradient, else two of 16 bytes, of two points of a query.

    Where queries are few, each is a program and has four levels in flight; else several take turns in one, whose neighbours read
    much the same. What decides the order of a sum does not depend on the batch.
    """
    few, block_c = p.Q * p.heads <= FEW, block_of(max(1, p.D))
    vector = vector_of(4 if p.gradients else 16 // p.itemsize, p.row, p.D, block_c)
    rows = (1 if p.gradients or few else 2) * 32 * vector // block_c
    block_p = min(power_of_2(p.P), rows, 8 if p.gradients or few else 2)
    block_q = max(1, min(rows // block_p, power_of_2(p.Q)))
    unroll, repeat = (2, 1 if few else 4) if p.gradients else (4, 1) if few else (1, 2)
    return Config(block_q, block_p, unroll, repeat, 1)


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
):
    """Some tiles of channels, all samples in turn; a thread's sums stay in it until the end."""
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_P
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    b, h, q0 = which(Q, HEADS, BLOCK_Q * REPEAT)
    image = value + b * (BATCH // VECTOR * VECTOR) + h * D
    i = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    if TILES * BLOCK_C < D:
        c += tl.program_id(1) * (TILES * BLOCK_C)
    for _ in range(REPEAT):
        in_q = q0 + i // BLOCK_P < Q
        first = ((b * Q + q0) * HEADS + h) * (L * P)  # sample of the block
        row = (i // BLOCK_P).to(OFFSET) * (HEADS * L * P)
        if LOGITS:
            most, scale = normaliser(weights + first, row, in_q, L * P, BLOCK_S, ACC)
        totals = ()
        for _ in tl.static_range(TILES):
            totals = totals + (tl.zeros([ROWS, BLOCK_C], ACC),)
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
            sums = ()
            for t in tl.static_range(TILES):
                at = c + t * BLOCK_C
                v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, at, at < D, W, ROW, ACC)
                sums = sums + (totals[t] + s00 * v00 + s01 * v01 + s10 * v10 + s11 * v11,)
            totals = sums
        q = q0 + tl.arange(0, BLOCK_Q)[:, None]
        for t in tl.static_range(TILES):
            at = c + t * BLOCK_C
            total = tl.sum(tl.reshape(totals[t], [BLOCK_Q, BLOCK_P, BLOCK_C]), 1)
            put(out + ((b * Q + q) * HEADS + h) * D + at, total, (q < Q) & (at < D))
        q0 += BLOCK_Q


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
