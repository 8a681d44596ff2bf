"""Kernels for derivatives of the form T in ``gpu``, and their configurations."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, accumulator, cdiv, power_of_2
from .._device.axes import over_channels
from .._device.layout import as_images
from .._device.long_sums import MANY, compensated, two_sum, zeros
from .._device.taps import TAU, channel, corners, edges, fetch, interpolate, locate, octave, scatter, shared_cell, wave
from .reference import dots

BLOCK_C = 32  # channels of a tile: eight threads with one vector access each


class Problem(NamedTuple):
    """Sizes and dtypes of a launch."""

    B: int
    H: int
    W: int
    Q: int
    D: int
    C: int
    stride: int  # of the images, from pixel to pixel; 1 where each channel is a plane
    d_stride: int  # the same for their gradient; 0 if not needed
    heads: int
    octaves: int
    wide: torch.dtype
    int64: bool  # 64-bit offsets
    gradients: bool  # both coef and rows are given


class Config(NamedTuple):
    block_q: int  # consecutive queries of a program
    block_d: int  # samples of a query in flight
    tiles: int  # tiles of channels in flight
    num_warps: int


def _block_c(p: Problem) -> int:
    return min(BLOCK_C, power_of_2(p.C))


def _tiles(p: Problem) -> int:
    return cdiv(max(1, p.C - 2 * p.octaves), _block_c(p))


def form_config(p: Problem) -> Config:
    """Good on an H200 at pixelSplat's sizes and elsewhere: one warp, with four or eight samples of one query in flight.

    A forward pass has up to five tiles in flight; gradients, which need more registers, fewer. Whatever decides the order of a
    sum depends on the samples per query, never on the number of queries.
    """
    block_d = min(4 if p.gradients and p.D < 64 else 8, power_of_2(p.D))
    most = 5 if not p.gradients else 3 if p.d_stride and p.octaves and block_d <= 4 else 1  # elsewhere three tiles spill
    return Config(max(1, 4 // block_d), block_d, min(most, _tiles(p)), 1)


def rows_config(p: Problem) -> Config:
    """Two warps with up to five tiles in flight; one warp with two if queries are too few to fill the device. Independent of B."""
    block_d, few = min(4, power_of_2(p.D)), p.Q < 2048
    return Config(2 * (4 // block_d), block_d, min(2 if few else 5, _tiles(p)), 1 if few else 2)


def candidate_configs(default: Config, p: Problem) -> list[Config]:
    """The default, then the others, those that differ from it in the fewest fields first."""
    tiles = {1, 2, 3, 5, default.tiles} & set(range(1, _tiles(p) + 1))
    found = {default: 0}
    warp_rows = (4, 8) if p.stride > 1 else (2, 4, 8)  # planes allow few samples per program, see below
    for t, warps, rows, block_d in product(sorted(tiles), (1, 2, 4), warp_rows, (2, 4, 8)):
        if block_d <= min(power_of_2(p.D), warps * rows):
            config = Config(warps * rows // block_d, block_d, t, warps)
            found[config] = sum(x != y for x, y in zip(config, default))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """All fields but `tiles` are powers of two, and the accumulators of all tiles fit into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.block_q, config.block_d, config.num_warps))
    return powers and 0 < config.tiles <= _tiles(p) and config.block_q * config.block_d <= 16 * config.num_warps


# Triton 3.6 fails on prefetched samples ("operand #0 does not dominate this use") if images are planes and a program has this many
# samples or more: 32, or 16 in ``form`` without a gradient of the images.


def fits_rows(p: Problem, config: Config) -> bool:
    return fits(p, config) and (p.stride > 1 or config.block_q * config.block_d < 32)


def fits_form(p: Problem, config: Config) -> bool:
    most = 32 if p.d_stride else 16
    return fits(p, config) and (p.stride > 1 or not p.gradients or config.block_q * config.block_d < most)


def _constants(p: Problem, config: Config) -> tuple:
    offset = tl.int64 if p.int64 else tl.int32
    blocks = config.block_q, config.block_d, _block_c(p), config.tiles
    return p.C, p.stride, p.heads, p.octaves, accumulator(p.wide), offset, *blocks


def _sizes(p: Problem) -> tuple[int, int, int, int]:
    """Images without pixels get width −1, within which no sample lies: with width 0, one at −½ would count as live."""
    return p.H, p.W if p.H * p.W else -1, p.Q, p.D


def launch_form(p: Problem, config: Config) -> Launch:
    grid = (p.B * cdiv(p.Q, config.block_q), 1, 1)
    return Launch(grid, _sizes(p), (*_constants(p, config), p.d_stride), config.num_warps)


def launch_rows(p: Problem, config: Config) -> Launch:
    grid = (p.B * cdiv(p.Q, config.block_q), cdiv(_tiles(p), config.tiles), 1)
    long = cdiv(p.D, config.block_d) > MANY.value
    return Launch(grid, _sizes(p), (*_constants(p, config), p.d_stride, long), config.num_warps)


def expected(p: Problem, images: Tensor, samples: Tensor, coef, rows, depths, *results) -> dict[int, Tensor]:
    """Reference results for the search. T = Σ coef · dots: dots is ∂T/∂coef, its gradient gives the rest; in slices of queries."""
    memory, images = results[0], _unpadded(p, images, p.stride)
    results = (_unpadded(p, memory, p.d_stride), *results[1:])
    wanted = {name: i for i, name in enumerate(("images", "samples", "coef", "depths", "rows")) if results[i] is not None}
    sums = {name: torch.zeros(results[i].shape, dtype=p.wide, device=images.device) for name, i in wanted.items()}
    step = max(1, (1 << 24) // max(1, p.B * p.D * p.C))
    for q in range(0, p.Q, step):
        part = slice(q, q + step)
        if rows is None:
            row = torch.zeros(p.B, p.heads, samples[:, part].shape[1], p.C - 2 * p.octaves, dtype=p.wide, device=images.device)
        else:
            row = rows[:, :, part]
        given = dict(images=images, samples=samples[:, part], rows=row, depths=None if depths is None else depths[:, part])
        leaves: dict[str, Any] = {k: v if v is None else v.detach().to(p.wide).requires_grad_() for k, v in given.items()}
        with torch.enable_grad():
            value = dots(leaves["images"], leaves["samples"], leaves["rows"], leaves["depths"], p.octaves, p.wide)
        if "coef" in wanted:
            sums["coef"][:, :, part] = value.detach()
        if names := [name for name in wanted if name != "coef"]:
            found = torch.autograd.grad(value, [leaves[name] for name in names], coef[:, :, part].to(p.wide))
            for name, grad in zip(names, found):
                target = {"images": sums[name], "rows": sums[name][:, :, part]}.get(name, sums[name][:, part])
                target += grad
    if memory is not None and memory.dim() == 1:
        padded = torch.zeros_like(memory, dtype=p.wide)
        _unpadded(p, padded, p.d_stride).copy_(sums["images"])
        sums["images"] = padded
    return {wanted[name]: total for name, total in sums.items()}


def _unpadded(p: Problem, images, stride: int):
    """The images in a flat buffer of padded pixels; others are returned as they are."""
    return images if images is None or images.dim() > 1 else as_images(images, (p.B, p.C, p.H, p.W), stride)


def expected_rows(p: Problem, images: Tensor, samples: Tensor, coef: Tensor, d_rows: Tensor, d_images) -> dict[int, Tensor]:
    """The same for ``_rows``, which leaves out the channels of the encoding."""
    C, images = p.C - 2 * p.octaves, _unpadded(p, images, p.stride)
    found = expected(p._replace(C=C, octaves=0), images[:, :C], samples, coef, None, None, *[None] * 4, d_rows)
    return {3: found[4], **({} if d_images is None else {4: torch.zeros_like(d_images)})}


@triton.jit(do_not_specialize=["H", "W", "Q", "D"])
def _form(
    images,  # [B, H, W, C]
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C − 2·OCTAVES]
    depths,  # [B, Q, D]
    d_images,  # derivatives of T, shaped like their operands; None if not wanted
    d_samples,
    d_coef,
    d_depths,
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    STRIDE: tl.constexpr,  # from pixel to pixel; 1 where each channel is a plane
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    UNROLL: tl.constexpr,  # tiles of channels in flight
    D_STRIDE: tl.constexpr,
):
    """All derivatives of T but ∂T/∂rows, for all samples of BLOCK_Q queries: BLOCK_D samples per query at a time.

    Each block of samples loops over all tiles of channels, then over those of the encoding. ∂T/∂(coef, samples, depths) are
    summed in registers per channel of the tile and reduced over channels last; ∂T/∂images is added atomically, tile by tile.
    Tensors are [samples, channels]; values per head are tuples of them.
    """
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    LONG: tl.constexpr = ROW_C > MANY * BLOCK_C
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    in_q = q < Q
    hq = b * HEADS * Q + q  # the query's row in the first head
    image = images + b * H * W * (C if STRIDE == 1 else STRIDE)
    if d_images is not None:
        d_image = d_images + b * H * W * (C if D_STRIDE == 1 else D_STRIDE)

    PREFETCH: tl.constexpr = d_images is None  # the scatter needs the registers
    if PREFETCH:
        y, x = fetch(samples, (b * Q + q) * D + i % BLOCK_D, in_q & (i % BLOCK_D < D), ACC)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + i % BLOCK_D
        in_qd = in_q & (d < D)
        qd = (b * Q + q) * D + d  # index of the sample
        if not PREFETCH:
            y, x = fetch(samples, qd, in_qd, ACC)
        live, y0, x0, fy, fx = locate(y, x, H, W, OFFSET)
        if PREFETCH:
            y, x = fetch(samples, qd + BLOCK_D, in_q & (d + BLOCK_D < D), ACC)
        k00, k01, k10, k11 = edges(live, y0, x0, H, W)
        pixel = y0 * W + x0
        if d_images is not None:
            one_cell, cell = shared_cell(live, pixel)
        w = ()
        g_coef = ()  # accumulators are per channel of the tile until the end
        for h in tl.static_range(HEADS):
            if coef is not None:
                w = w + (tl.load(coef + (hq + h * Q) * D + d, mask=live, other=0).to(ACC),)
            if d_coef is not None:
                g_coef = g_coef + (tl.zeros([ROWS, BLOCK_C], ACC),)
        g_y = tl.zeros([ROWS, BLOCK_C], ACC)
        g_x = tl.zeros([ROWS, BLOCK_C], ACC)
        if LONG:
            lost_coef = zeros(g_y, len(g_coef))
            lost_y, lost_x = zeros(g_y, 2)

        for c0 in tl.range(0, ROW_C, BLOCK_C, loop_unroll_factor=UNROLL):
            c = c0 + tl.arange(0, BLOCK_C)[None, :]
            in_c = c < ROW_C
            if d_samples is not None or d_coef is not None:
                at = channel(c, H, W, STRIDE, OFFSET)
                v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, at, in_c, W, STRIDE, ACC)
                s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
            a = tl.zeros([ROWS, BLOCK_C], ACC)
            if HEADS > MANY:
                lost_a = tl.zeros_like(a)
            sums = ()
            losses = ()
            for h in tl.static_range(HEADS):
                r = tl.load(rows + (hq + h * Q) * ROW_C + c, mask=in_q & in_c, other=0).to(ACC)
                if d_coef is not None:
                    if LONG:
                        total, lost = two_sum(g_coef[h], lost_coef[h], r * s)
                        sums = sums + (total,)
                        losses = losses + (lost,)
                    else:
                        sums = sums + (g_coef[h] + r * s,)
                if d_samples is not None or d_images is not None:
                    if HEADS > MANY:
                        a, lost_a = two_sum(a, lost_a, w[h] * r)
                    else:
                        a += w[h] * r
            if HEADS > MANY:
                a = compensated(a, lost_a)
            if d_coef is not None:
                g_coef = sums
                if LONG:
                    lost_coef = losses
            if d_samples is not None:
                if LONG:
                    g_y, lost_y = two_sum(g_y, lost_y, a * dy)
                    g_x, lost_x = two_sum(g_x, lost_x, a * dx)
                else:
                    g_y += a * dy
                    g_x += a * dx
            if d_images is not None:
                at = channel(c, H, W, D_STRIDE, OFFSET)
                scatter(d_image, a, fy, fx, pixel, k00, k01, k10, k11, one_cell, cell, at, in_c, W, D_STRIDE)

        if OCTAVES > 0:
            depth = tl.load(depths + qd, mask=live, other=0).to(ACC)
            g_depth = tl.zeros([ROWS, BLOCK_C], ACC)
            w_all = tl.zeros([ROWS, 1], ACC)
            if coef is not None:
                if HEADS > MANY:
                    lost_w = tl.zeros_like(w_all)
                for h in tl.static_range(HEADS):
                    if HEADS > MANY:
                        w_all, lost_w = two_sum(w_all, lost_w, w[h])
                    else:
                        w_all += w[h]
                if HEADS > MANY:
                    w_all = compensated(w_all, lost_w)
            for c0 in range(0, 2 * OCTAVES, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)[None, :]
                in_c = c < 2 * OCTAVES
                cosine = c % 2 == 1
                turns, power = octave(depth, c // 2)
                r = wave(turns, cosine)
                if d_samples is not None or d_coef is not None or d_depths is not None:
                    at = channel(ROW_C + c, H, W, STRIDE, OFFSET)
                    v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, at, in_c, W, STRIDE, ACC)
                    s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
                if d_coef is not None:
                    sums = ()
                    for h in tl.static_range(HEADS):
                        sums = sums + (g_coef[h] + r * s,)
                    g_coef = sums
                if d_depths is not None:
                    slope = wave(turns, c % 2 == 0) * tl.where(cosine, -power, power)
                    g_depth += w_all * s * slope
                a = w_all * r
                if d_samples is not None:
                    g_y += a * dy
                    g_x += a * dx
                if d_images is not None:
                    at = channel(ROW_C + c, H, W, D_STRIDE, OFFSET)
                    scatter(d_image, a, fy, fx, pixel, k00, k01, k10, k11, one_cell, cell, at, in_c, W, D_STRIDE)
            if d_depths is not None:
                total = over_channels(g_depth, live) * TAU
                tl.store(d_depths + qd, total.to(d_depths.dtype.element_ty), mask=in_qd)

        if LONG:
            g_y, g_x = compensated(g_y, lost_y), compensated(g_x, lost_x)
        if d_coef is not None:
            for h in tl.static_range(HEADS):
                total = over_channels(compensated(g_coef[h], lost_coef[h]) if LONG else g_coef[h], live)
                tl.store(d_coef + (hq + h * Q) * D + d, total.to(d_coef.dtype.element_ty), mask=in_qd)
        if d_samples is not None:
            total = over_channels(g_x, live) * (0.5 * W)
            tl.store(d_samples + 2 * qd, total.to(d_samples.dtype.element_ty), mask=in_qd)
            total = over_channels(g_y, live) * (0.5 * H)
            tl.store(d_samples + 2 * qd + 1, total.to(d_samples.dtype.element_ty), mask=in_qd)


@triton.jit
def clear(x, N, BLOCK: tl.constexpr):
    """Zero N elements, shared among all programs of the launch."""
    program = tl.program_id(0) + tl.program_id(1).to(tl.int64) * tl.num_programs(0)
    step = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * BLOCK
    for first in range(program * BLOCK, N, step):
        at = first + tl.arange(0, BLOCK)
        tl.store(x + at, tl.zeros([BLOCK], x.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["H", "W", "Q", "D"])
def _rows(
    images,  # [B, H, W, C]
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    d_rows,  # [B, h, Q, C − 2·OCTAVES]
    d_images,  # [B, H, W, C], cleared for ``_form``, which adds to it; or None
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    STRIDE: tl.constexpr,  # from pixel to pixel; 1 where each channel is a plane
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
    D_STRIDE: tl.constexpr,
    LONG: tl.constexpr,  # sums over samples are long enough to need compensation
):
    """∂T/∂rows for TILES tiles of channels of BLOCK_Q queries, all heads; accumulators stay in registers.

    The loop takes BLOCK_D samples of each query per step, each with an accumulator of its own; these are reduced last.
    """
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    c = tl.program_id(1) * (TILES * BLOCK_C) + tl.arange(0, BLOCK_C)[None, :]
    image = images + b * H * W * (C if STRIDE == 1 else STRIDE)
    totals = ()
    for _ in tl.static_range(TILES * HEADS):
        totals = totals + (tl.zeros([ROWS, BLOCK_C], ACC),)
    if LONG:
        lost = zeros(totals[0], TILES * HEADS)
    y, x = fetch(samples, (b * Q + q) * D + i % BLOCK_D, (q < Q) & (i % BLOCK_D < D), ACC)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + i % BLOCK_D
        live, y0, x0, fy, fx = locate(y, x, H, W, OFFSET)
        y, x = fetch(samples, (b * Q + q) * D + d + BLOCK_D, (q < Q) & (d + BLOCK_D < D), ACC)  # prefetch
        k00, k01, k10, k11 = edges(live, y0, x0, H, W)
        w = ()
        for h in tl.static_range(HEADS):
            w = w + (tl.load(coef + (b * HEADS * Q + h * Q + q) * D + d, mask=live, other=0).to(ACC),)
        sums = ()
        losses = ()
        for t in tl.static_range(TILES):
            at = channel(c + t * BLOCK_C, H, W, STRIDE, OFFSET)
            in_c = c + t * BLOCK_C < ROW_C
            v00, v01, v10, v11 = corners(image, y0 * W + x0, k00, k01, k10, k11, at, in_c, W, STRIDE, ACC)
            s, _dy, _dx = interpolate(v00, v01, v10, v11, fy, fx)
            for h in tl.static_range(HEADS):
                if LONG:
                    more, less = two_sum(totals[t * HEADS + h], lost[t * HEADS + h], w[h] * s)
                    sums = sums + (more,)
                    losses = losses + (less,)
                else:
                    sums = sums + (totals[t * HEADS + h] + w[h] * s,)
        totals = sums
        if LONG:
            lost = losses
    q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    for t in tl.static_range(TILES):
        at = c + t * BLOCK_C
        for h in tl.static_range(HEADS):
            total = compensated(totals[t * HEADS + h], lost[t * HEADS + h]) if LONG else totals[t * HEADS + h]
            total = tl.sum(tl.reshape(total, [BLOCK_Q, BLOCK_D, BLOCK_C]), 1)
            to = d_rows + (b * HEADS * Q + h * Q + q) * ROW_C + at
            tl.store(to, total.to(d_rows.dtype.element_ty), mask=(q < Q) & (at < ROW_C))
    if d_images is not None:
        clear(d_images, (tl.num_programs(0) // blocks).to(tl.int64) * H * W * (C if D_STRIDE == 1 else D_STRIDE), 1024)


SIZES = ("H", "W", "Q", "D")
form = jit.kernel(
    _form,
    "grid.form",
    default=form_config,
    candidates=lambda p: candidate_configs(form_config(p), p),
    launch=launch_form,
    sizes=SIZES,
    batch=("B",),
    writes=(5, 6, 7, 8),
    adds=(5,),
    fits=fits_form,
    expected=lambda p, *tensors: {5 + i: x for i, x in expected(p, *tensors, None).items()},
)
rows = jit.kernel(
    _rows,
    "grid.rows",
    default=rows_config,
    candidates=lambda p: candidate_configs(rows_config(p), p),
    launch=launch_rows,
    sizes=SIZES,
    batch=("B",),
    writes=(3, 4),
    fits=fits_rows,
    expected=expected_rows,
)
