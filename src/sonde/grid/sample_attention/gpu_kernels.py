"""Triton kernels of ``sample_attention``: the value, and the gradients of queries, pixels, coordinates and depths."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ... import jit
from ...jit.launch import number
from .._device.axes import over_channels
from .._device.long_sums import compensated, two_sum, zeros
from .._device.taps import TAU, channel, corners, edges, octave, scatter, shared_cell, wave
from . import gpu_configs as configs
from .gpu_expected import expected, expected_gradients
from .gpu_parts import cell_of, dot, encoded, look, of_query, reach, row_of, tap, taps

ROOM = tl.constexpr(8.0)  # see ``_attend``
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))


@triton.jit(do_not_specialize=["H", "W", "Q", "D", "V", "S_HIGH", "S_LOW"])
def _attend(
    images,  # [B·V, H, W, C + 2·OCTAVES]
    values,  # [B·V, H, W, C_V]; None where they are the first channels of the images
    samples,  # [B·V, Q, D, 2]
    queries,  # [B, h, Q, C]
    depths,  # [B·V, Q, D]
    mask,  # [B·V, Q, D]
    out,  # [B, h, Q, C_V]
    lse,  # [B, h, Q]
    total,  # like out, before rounding; None where nothing is rounded
    H,
    W,
    Q,
    D,
    V,
    S_HIGH,
    S_LOW,
    C: tl.constexpr,
    C_V: tl.constexpr,
    STRIDE: tl.constexpr,  # from pixel to pixel; 1 where each channel is a plane
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
    V_TILES: tl.constexpr,
    EMPTY: tl.constexpr,  # images without pixels
    GROUP: tl.constexpr,  # heads of this program
    LONG: tl.constexpr,  # True if sums over samples are long enough to need compensation
):
    """GROUP heads of BLOCK_Q queries: one walk over the samples of all views, BLOCK_D of each query per step.

    Each sample in flight has its own online softmax: m, the score that is subtracted, norm, the sum of weights, and acc, the
    weighted sum; those of a query are merged at the end. Scores are subtracted before they are scaled, so large ones keep their
    differences. m follows the maximum only if weights would exceed 2^ROOM: sums are as exact, and rescaling at every step
    costs a fifth.
    """
    PIXEL: tl.constexpr = C + 2 * OCTAVES if STRIDE == 1 else STRIDE
    V_PIXEL: tl.constexpr = C_V if V_STRIDE == 1 else V_STRIDE
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    scale = (number(S_HIGH, S_LOW) * LOG2_E).to(ACC)
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h0 = tl.program_id(1) * GROUP
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    in_q = q < Q
    hq = (b * HEADS + h0) * Q + q
    tile = tl.zeros([ROWS, BLOCK_C], ACC)
    column = tl.zeros([ROWS, 1], ACC)
    acc = zeros(tile, GROUP * V_TILES)
    norm = zeros(column, GROUP)
    lost = zeros(tile, GROUP * V_TILES if LONG else 0)
    lost_norm = zeros(column, GROUP if LONG else 0)
    m = ()
    for _ in tl.static_range(GROUP):
        m = m + (column - float("inf"),)
    some = tl.zeros([ROWS, 1], tl.int32)
    for v in range(V):
        bv = b * V + v
        image, first = images + bv * H * W * PIXEL, (bv * Q + q) * D
        there, y, x = look(samples, mask, first + i % BLOCK_D, in_q & (i % BLOCK_D < D), ACC)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + i % BLOCK_D
            live, pixels, shares, _cell = cell_of(y, x, H, W, OFFSET)
            now = there
            there, y, x = look(samples, mask, first + d + BLOCK_D, in_q & (d + BLOCK_D < D), ACC)  # prefetch
            if mask is not None:
                some = tl.maximum(some, now.to(tl.int32))
            keys = taps(image, live, pixels, shares, H, W, C, STRIDE, ACC, OFFSET, BLOCK_C, TILES, EMPTY)
            shared = tile
            if OCTAVES > 0:
                depth = tl.load(depths + first + d, mask=live, other=0).to(ACC)
                shared = encoded(image, live, pixels, shares, depth, H, W, C, STRIDE, OCTAVES, ACC, OFFSET, BLOCK_C, EMPTY)
            seen = keys
            if values is not None:
                value = values + bv * H * W * V_PIXEL
                seen = taps(value, live, pixels, shares, H, W, C_V, V_STRIDE, ACC, OFFSET, BLOCK_C, V_TILES, EMPTY)
            scores = ()
            grows = tl.zeros([ROWS, 1], tl.int32)
            for g in tl.static_range(GROUP):
                row = row_of(queries, hq + g * Q, in_q & (h0 + g < HEADS), C, ACC, BLOCK_C, TILES)
                scores = scores + (tl.where(now, score(row, keys, shared, live), -float("inf")),)
                grows = tl.maximum(grows, ((scores[g] - m[g]) * scale > ROOM).to(tl.int32))
            if tl.max(grows) > 0:
                rescaled = rescale(m, norm, acc, lost_norm, lost, scores, scale, GROUP, V_TILES, LONG)
                m, norm, acc, lost_norm, lost = rescaled
            added = add(m, norm, acc, lost_norm, lost, scores, scale, seen, GROUP, V_TILES, LONG)
            norm, acc, lost_norm, lost = added

    n = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    seen_any = (n < Q) & (D > 0)
    if mask is not None:
        seen_any = tl.max(tl.reshape(some, [BLOCK_Q, BLOCK_D]), 1)[:, None] > 0
    for g in tl.static_range(GROUP):
        top = tl.max(tl.reshape(m[g], [BLOCK_Q, BLOCK_D]), 1)[:, None]
        base = tl.where(top == -float("inf"), 0, top)
        every = tl.reshape(tl.broadcast_to(base, [BLOCK_Q, BLOCK_D]), [ROWS, 1])
        share = tl.exp2((m[g] - every) * scale)
        weight = of_query((compensated(norm[g], lost_norm[g]) if LONG else norm[g]) * share, BLOCK_Q, BLOCK_D)
        to = (b * HEADS + h0 + g) * Q + n
        here = (n < Q) & (h0 + g < HEADS)
        tl.store(lse + to, tl.where(seen_any, (base * scale + tl.log2(weight)) * LN_2, -float("inf")), mask=here)
        for t in tl.static_range(V_TILES):
            c = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            part = acc[g * V_TILES + t]
            if LONG:
                part = compensated(part, lost[g * V_TILES + t])
            found = tl.where(seen_any, of_query(part * share, BLOCK_Q, BLOCK_D) / weight, 0)
            tl.store(out + to * C_V + c, found.to(out.dtype.element_ty), mask=here & (c < C_V))
            if total is not None:
                tl.store(total + to * C_V + c, found, mask=here & (c < C_V))


@triton.jit
def rescale(m, norm, acc, lost_norm, lost, scores, scale, GROUP: tl.constexpr, V_TILES: tl.constexpr, LONG: tl.constexpr):
    """Rescale the sums to these scores where weights would exceed 2^ROOM."""
    tops, norms, sums, losses, norm_losses = (), (), (), (), ()
    for g in tl.static_range(GROUP):
        grows = (scores[g] - m[g]) * scale > ROOM
        tops = tops + (tl.where(grows, scores[g], m[g]),)
        keep = tl.where(grows, tl.exp2((m[g] - scores[g]) * scale), 1)
        norms = norms + (norm[g] * keep,)
        if LONG:
            norm_losses = norm_losses + (lost_norm[g] * keep,)
        for t in tl.static_range(g * V_TILES, (g + 1) * V_TILES):
            sums = sums + (acc[t] * keep,)
            if LONG:
                losses = losses + (lost[t] * keep,)
    return tops, norms, sums, norm_losses, losses


@triton.jit
def add(m, norm, acc, lost_norm, lost, scores, scale, seen, GROUP: tl.constexpr, V_TILES: tl.constexpr, LONG: tl.constexpr):
    """Add one sample to every sum; its weight is 0 where its score is −∞."""
    norms, sums, losses, norm_losses = (), (), (), ()
    for g in tl.static_range(GROUP):
        p = tl.exp2((scores[g] - tl.where(m[g] == -float("inf"), 0, m[g])) * scale)
        if LONG:
            more, less = two_sum(norm[g], lost_norm[g], p)
            norms, norm_losses = norms + (more,), norm_losses + (less,)
        else:
            norms = norms + (norm[g] + p,)
        for t in tl.static_range(V_TILES):
            if LONG:
                more, less = two_sum(acc[g * V_TILES + t], lost[g * V_TILES + t], p * seen[t])
                sums, losses = sums + (more,), losses + (less,)
            else:
                sums = sums + (acc[g * V_TILES + t] + p * seen[t],)
    return norms, sums, norm_losses, losses


@triton.jit
def score(row, keys, shared, live):
    """Scores before scaling; exactly 0 where a sample sees nothing."""
    return tl.where(live, dot(row, keys, shared), 0)


@triton.jit(do_not_specialize=["H", "W", "Q", "D", "V", "S_HIGH", "S_LOW"])
def _attend_queries(
    images,  # as in ``_attend``
    values,
    samples,
    queries,
    depths,
    mask,
    grad,  # [B, h, Q, C_V]
    total,  # [B, h, Q, C_V]
    lse,  # [B, h, Q]
    d_queries,  # [B, h, Q, C]; None if not wanted
    delta,  # [B, h, Q], Σ grad · total, which ``_attend_pixels`` reads
    H,
    W,
    Q,
    D,
    V,
    S_HIGH,
    S_LOW,
    C: tl.constexpr,
    C_V: tl.constexpr,
    STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
    V_TILES: tl.constexpr,
    EMPTY: tl.constexpr,  # images without pixels
    GROUP: tl.constexpr,
    LONG: tl.constexpr,
):
    """The gradient of GROUP heads of BLOCK_Q queries; weights are recomputed from the log-sum-exp."""
    PIXEL: tl.constexpr = C + 2 * OCTAVES if STRIDE == 1 else STRIDE
    V_PIXEL: tl.constexpr = C_V if V_STRIDE == 1 else V_STRIDE
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    scale = number(S_HIGH, S_LOW).to(ACC)
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h0 = tl.program_id(1) * GROUP
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    in_q = q < Q
    hq = (b * HEADS + h0) * Q + q
    tile = tl.zeros([ROWS, BLOCK_C], ACC)
    level = ()
    mean = ()
    for g in tl.static_range(GROUP):
        in_hq = in_q & (h0 + g < HEADS)
        pulls = row_of(grad, hq + g * Q, in_hq, C_V, ACC, BLOCK_C, V_TILES)
        whole = row_of(total, hq + g * Q, in_hq, C_V, ACC, BLOCK_C, V_TILES)
        mean = mean + (dot(pulls, whole, tile),)
        level = level + (tl.load(lse + hq + g * Q, mask=in_hq, other=0),)
        tl.store(delta + hq + g * Q, mean[g], mask=in_hq & (i % BLOCK_D == 0))
    if d_queries is not None:
        acc = zeros(tile, GROUP * TILES)
        lost = zeros(tile, GROUP * TILES if LONG else 0)
        for v in range(V):
            bv = b * V + v
            image, first = images + bv * H * W * PIXEL, (bv * Q + q) * D
            _, y, x = look(samples, mask, first + i % BLOCK_D, in_q & (i % BLOCK_D < D), ACC)
            for d0 in range(0, D, BLOCK_D):
                d = d0 + i % BLOCK_D
                live, pixels, shares, _cell = cell_of(y, x, H, W, OFFSET)
                _, y, x = look(samples, mask, first + d + BLOCK_D, in_q & (d + BLOCK_D < D), ACC)  # prefetch
                keys = taps(image, live, pixels, shares, H, W, C, STRIDE, ACC, OFFSET, BLOCK_C, TILES, EMPTY)
                shared = tile
                if OCTAVES > 0:
                    depth = tl.load(depths + first + d, mask=live, other=0).to(ACC)
                    shared = encoded(image, live, pixels, shares, depth, H, W, C, STRIDE, OCTAVES, ACC, OFFSET, BLOCK_C, EMPTY)
                seen = keys
                if values is not None:
                    value = values + bv * H * W * V_PIXEL
                    seen = taps(value, live, pixels, shares, H, W, C_V, V_STRIDE, ACC, OFFSET, BLOCK_C, V_TILES, EMPTY)
                sums = ()
                losses = ()
                for g in tl.static_range(GROUP):
                    in_hq = in_q & (h0 + g < HEADS)
                    row = row_of(queries, hq + g * Q, in_hq, C, ACC, BLOCK_C, TILES)
                    pulls = row_of(grad, hq + g * Q, in_hq, C_V, ACC, BLOCK_C, V_TILES)
                    _p, slope = slopes(row, pulls, keys, seen, shared, live, level[g], mean[g], scale, tile)
                    for t in tl.static_range(TILES):
                        if LONG:
                            more, less = two_sum(acc[g * TILES + t], lost[g * TILES + t], slope * keys[t])
                            sums, losses = sums + (more,), losses + (less,)
                        else:
                            sums = sums + (acc[g * TILES + t] + slope * keys[t],)
                acc = sums
                if LONG:
                    lost = losses
        n = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
        for g in tl.static_range(GROUP):
            to = (b * HEADS + h0 + g) * Q + n
            for t in tl.static_range(TILES):
                c = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                part = acc[g * TILES + t]
                if LONG:
                    part = compensated(part, lost[g * TILES + t])
                found = of_query(part, BLOCK_Q, BLOCK_D)
                here = (n < Q) & (h0 + g < HEADS) & (c < C)
                tl.store(d_queries + to * C + c, found.to(d_queries.dtype.element_ty), mask=here)


@triton.jit
def slopes(row, pulls, keys, seen, shared, live, level, mean, scale, tile):
    """→ the weights of these samples, and the gradients of their scores before scaling."""
    logit = score(row, keys, shared, live) * scale
    p = tl.where(live, tl.exp(logit - level), 0)
    return p, tl.where(live, p * (dot(pulls, seen, tile) - mean) * scale, 0)


@triton.jit(do_not_specialize=["H", "W", "Q", "D", "V", "S_HIGH", "S_LOW"])
def _attend_pixels(
    images,  # as in ``_attend_queries``
    values,
    samples,
    queries,
    depths,
    mask,
    grad,
    lse,
    delta,
    d_images,  # like their operands; None if not wanted
    d_values,
    d_samples,
    d_depths,
    d_scores,  # [B·V, h, Q, D], gradients of the scores, and weights; None unless sums are deterministic
    weights,
    H,
    W,
    Q,
    D,
    V,
    S_HIGH,
    S_LOW,
    C: tl.constexpr,
    C_V: tl.constexpr,
    STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
    V_TILES: tl.constexpr,
    EMPTY: tl.constexpr,  # images without pixels
    D_STRIDE: tl.constexpr,
    D_V_STRIDE: tl.constexpr,
):
    """Add each sample of BLOCK_Q queries to the gradients of pixels; write the gradients of its coordinates and depth.

    With w the gradient of a sample's scores and p its weights, Σ_h w·queries is spread over its four pixels of the images, and
    Σ_h p·grad over those of the values.
    """
    SHARED: tl.constexpr = values is None
    PIXEL: tl.constexpr = C + 2 * OCTAVES if STRIDE == 1 else STRIDE
    V_PIXEL: tl.constexpr = C_V if V_STRIDE == 1 else V_STRIDE
    D_PIXEL: tl.constexpr = C + 2 * OCTAVES if D_STRIDE == 1 else D_STRIDE
    D_V_PIXEL: tl.constexpr = C_V if D_V_STRIDE == 1 else D_V_STRIDE
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    scale = number(S_HIGH, S_LOW).to(ACC)
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    in_q = q < Q
    hq = b * HEADS * Q + q
    tile = tl.zeros([ROWS, BLOCK_C], ACC)
    for step in range(V * tl.cdiv(D, BLOCK_D)):
        bv = b * V + step // tl.cdiv(D, BLOCK_D)
        d = step % tl.cdiv(D, BLOCK_D) * BLOCK_D + i % BLOCK_D
        in_qd = in_q & (d < D)
        at = (bv * Q + q) * D + d
        _, y, x = look(samples, mask, at, in_qd, ACC)
        live, pixels, shares, cell = cell_of(y, x, H, W, OFFSET)
        image = images + bv * H * W * PIXEL
        k00, k01, k10, k11 = edges(live, cell[0], cell[1], H, W)
        pixel = cell[0] * W + cell[1]
        one_cell, first = shared_cell(live, pixel)
        corner = pixel, k00, k01, k10, k11, cell[2], cell[3]
        shared = tile
        if OCTAVES > 0:
            depth = tl.load(depths + at, mask=live, other=0).to(ACC)
            shared = encoded(image, live, pixels, shares, depth, H, W, C, STRIDE, OCTAVES, ACC, OFFSET, BLOCK_C, EMPTY)
        keys = taps(image, live, pixels, shares, H, W, C, STRIDE, ACC, OFFSET, BLOCK_C, TILES, EMPTY)
        seen = keys
        if not SHARED:
            value = values + bv * H * W * V_PIXEL
            seen = taps(value, live, pixels, shares, H, W, C_V, V_STRIDE, ACC, OFFSET, BLOCK_C, V_TILES, EMPTY)
        a = zeros(tile, TILES)
        a_v = zeros(tile, 0 if SHARED else V_TILES)
        every = tl.zeros([ROWS, 1], ACC)
        for h in range(HEADS):
            level = tl.load(lse + hq + h * Q, mask=live, other=0)
            mean = tl.load(delta + hq + h * Q, mask=live, other=0)
            row = row_of(queries, hq + h * Q, live, C, ACC, BLOCK_C, TILES)
            pulls = row_of(grad, hq + h * Q, live, C_V, ACC, BLOCK_C, V_TILES)
            p, slope = slopes(row, pulls, keys, seen, shared, live, level, mean, scale, tile)
            if d_scores is not None:
                to = ((bv * HEADS + h) * Q + q) * D + d
                tl.store(d_scores + to, slope, mask=in_qd)
                tl.store(weights + to, p, mask=in_qd)
            every += slope
            sums = ()
            for t in tl.static_range(TILES):
                more = a[t] + slope * row[t]
                if SHARED:
                    more += p * pulls[t]
                sums = sums + (more,)
            a = sums
            if not SHARED:
                sums = ()
                for t in tl.static_range(V_TILES):
                    sums = sums + (a_v[t] + p * pulls[t],)
                a_v = sums

        g_y = tile
        g_x = tile
        for t in tl.static_range(TILES):
            c = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            g_y, g_x = spread(
                image, d_images, bv * H * W * D_PIXEL, a[t], corner, one_cell, first, c, c < C, g_y, g_x, H, W,
                STRIDE, D_STRIDE, d_samples is not None, ACC, OFFSET,
            )  # fmt: skip
        if not SHARED:
            for t in tl.static_range(V_TILES):
                c = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                g_y, g_x = spread(
                    value, d_values, bv * H * W * D_V_PIXEL, a_v[t], corner, one_cell, first, c, c < C_V,
                    g_y, g_x, H, W, V_STRIDE, D_V_STRIDE, d_samples is not None, ACC, OFFSET,
                )  # fmt: skip
        if OCTAVES > 0:
            g_depth = tile
            near = reach(image, pixels, STRIDE, BLOCK_C)
            for c0 in tl.static_range(0, 2 * OCTAVES, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)[None, :]
                turns, power = octave(depth, c // 2)
                g_y, g_x = spread(
                    image, d_images, bv * H * W * D_PIXEL, every * wave(turns, c % 2 == 1), corner, one_cell, first, C + c,
                    c < 2 * OCTAVES, g_y, g_x, H, W, STRIDE, D_STRIDE, d_samples is not None, ACC, OFFSET,
                )  # fmt: skip
                if d_depths is not None:
                    s = tap(near, live, shares, C + c0, C + 2 * OCTAVES, H, W, STRIDE, ACC, OFFSET, BLOCK_C, EMPTY)
                    g_depth += every * s * wave(turns, c % 2 == 0) * tl.where(c % 2 == 1, -power, power)
            if d_depths is not None:
                total = over_channels(g_depth, live) * TAU
                tl.store(d_depths + at, total.to(d_depths.dtype.element_ty), mask=in_qd)
        if d_samples is not None:
            total = over_channels(g_x, live) * (0.5 * W)
            tl.store(d_samples + 2 * at, total.to(d_samples.dtype.element_ty), mask=in_qd)
            total = over_channels(g_y, live) * (0.5 * H)
            tl.store(d_samples + 2 * at + 1, total.to(d_samples.dtype.element_ty), mask=in_qd)


@triton.jit
def spread(
    image, d_images, d_offset, a, corner, one_cell, first, c, in_c, g_y, g_x, H, W, STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    PLACES: tl.constexpr, ACC: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add `a`, the gradient of a tile of samples, to their pixels, and `a` times the image's slopes to g_y and g_x."""
    pixel, k00, k01, k10, k11, fy, fx = corner
    if PLACES:
        v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, channel(c, H, W, STRIDE, OFFSET), in_c, W, STRIDE, ACC)
        right, down = v01 - v00, v10 - v00
        twist = v11 - v10 - right
        g_x += a * (right + fy * twist)
        g_y += a * (down + fx * twist)
    if d_images is not None:
        at = channel(c, H, W, D_STRIDE, OFFSET)
        scatter(d_images + d_offset, a, fy, fx, pixel, k00, k01, k10, k11, one_cell, first, at, in_c, W, D_STRIDE)
    return g_y, g_x


attend = jit.kernel(
    _attend,
    "grid.attend",
    default=configs.attend_config,
    candidates=lambda p: configs.candidates(configs.attend_config(p), p),
    launch=configs.launch_attend,
    sizes=("H", "W", "Q", "D"),
    batch=("B", "scale"),
    writes=(6, 7, 8),
    fits=configs.fits,
    expected=expected,
)
attend_queries = jit.kernel(
    _attend_queries,
    "grid.attend_queries",
    default=configs.queries_config,
    candidates=lambda p: configs.candidates(configs.queries_config(p), p),
    launch=configs.launch_queries,
    sizes=("H", "W", "Q", "D"),
    batch=("B", "scale"),
    writes=(9, 10),
    fits=configs.fits,
    expected=lambda p, *tensors: expected_gradients(p, tensors, queries=9, delta=10),
)
attend_pixels = jit.kernel(
    _attend_pixels,
    "grid.attend_pixels",
    default=configs.pixels_config,
    candidates=lambda p: configs.candidates(configs.pixels_config(p), p, grouped=False),
    launch=configs.launch_pixels,
    sizes=("H", "W", "Q", "D"),
    batch=("B", "scale"),
    writes=(9, 10, 11, 12, 13, 14),
    adds=(9, 10),
    fits=configs.fits,
    expected=lambda p, *tensors: expected_gradients(
        p, tensors, images=9, values=10, samples=11, depths=12, d_scores=13, weights=14
    ),
)
