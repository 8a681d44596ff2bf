"""CPU kernels: ``per_query`` computes the gradients of queries, ``per_channel`` the gradient of blocks of image channels."""

from __future__ import annotations

import math

import numpy as np

from ...op.cpu import exact_part, jit, part
from ...op.simd import LANES, fma, load, spread, store, total
from .._scatter.cpu_sums import BLOCK, HITS, LENGTH, add_spilled, block_full, clear, flush, move, new_spill

TILE = 32  # samples of a query processed together: their taps stay in the L1 cache


@jit
def per_query(
    start,
    stop,
    H,
    W,
    pixels,  # [B*H*W, C]
    samples,  # [B, Q, D, 2]
    depths,  # [B, Q, D]
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C']
    octaves,  # 1, 2, 4, …
    g_samples,  # derivatives, shaped like their operands; empty if not wanted
    g_depths,
    g_coef,
    g_rows,
):
    """∂T/∂(samples, depths, coef, rows) of queries `start` to `stop`; sums over samples run tile by tile, in order."""
    Q, D, C, F = samples.shape[1], samples.shape[2], pixels.shape[1], len(octaves)
    want_samples, want_depths, want_coef, want_rows = g_samples.size > 0, g_depths.size > 0, g_coef.size > 0, g_rows.size > 0
    h = max(coef.shape[1], rows.shape[1])
    plain = C - 2 * F
    heads, padded = -(-h // 4) * 4, -(-C // LANES) * LANES
    dtype = pixels.dtype
    at = np.empty(TILE, np.int64)
    corner = np.empty((TILE, 4), np.int64)
    weight = np.empty((TILE, 12), dtype)
    wave = np.empty((1, TILE * 2 * F), dtype)
    tap = np.empty((TILE, padded), dtype)
    c = np.zeros((TILE, heads + 1), dtype)
    row = np.zeros((heads, plain), dtype)
    g_row = np.zeros((heads, padded), dtype)
    whole = np.zeros((heads if D > BLOCK else 0, padded), np.float64)  # the sum of finished blocks of g_row
    flat_row = g_row.reshape(1, g_row.size)
    dot = np.empty(heads, np.float64)

    for n in range(start, stop):
        b, q = n // Q, n % Q
        if want_coef or want_samples:
            for j in range(h):
                for k in range(plain):
                    row[j, k] = rows[b, j, q, k]
        if want_rows:
            for j in range(h):
                for k in range(padded):
                    g_row[j, k] = 0
            whole[:] = 0
        for first in range(0, D, TILE):
            m = locate(b, q, first, min(first + TILE, D), H, W, samples, at, corner, weight)
            if F:
                encode(b, q, m, at, depths, octaves, wave)
            if want_rows or want_samples or want_depths:
                pick(b, q, m, at, coef, c, h)
            if want_rows or want_coef or want_depths:
                take(m, pixels, corner, weight, tap)
            if want_rows:
                combine(m, c, tap, g_row)
                if D > BLOCK and (first + TILE) % BLOCK == 0:
                    for j in range(h):
                        move(flat_row, j * padded, (j + 1) * padded, whole, j)
            for i in range(m):
                d = at[i]
                if want_coef:
                    dots(i, plain, F, tap, row, wave, dot)
                    for j in range(h):
                        g_coef[b, j, q, d] = dot[j]
                if want_samples:
                    s0, s1, s2, s3 = corner_dots(i, h, plain, F, c, row, wave, pixels, corner)
                    g_samples[b, q, d, 0] = weight[i, 4] * s0 + weight[i, 5] * s1 + weight[i, 6] * s2 + weight[i, 7] * s3
                    g_samples[b, q, d, 1] = weight[i, 8] * s0 + weight[i, 9] * s1 + weight[i, 10] * s2 + weight[i, 11] * s3
                if want_depths:
                    slope = dtype.type(0)
                    for f in range(F):
                        k, w = plain + 2 * f, (i * F + f) * 2
                        slope += octaves[f] * (tap[i, k] * wave[0, w + 1] - tap[i, k + 1] * wave[0, w])
                    g_depths[b, q, d] = dtype.type(2 * math.pi) * c[i, h] * slope
        if want_rows:
            for j in range(h):
                for k in range(plain):
                    g_rows[b, j, q, k] = g_row[j, k] + whole[j, k] if D > BLOCK else g_row[j, k]


@jit
def per_channel(
    start,
    stop,
    width,
    H,
    W,
    C,
    samples,  # [B, Q, D, 2]
    depths,  # [B, Q, D]
    coef,  # [B, h, Q, D]
    rows,  # [B / views, h, Q, C']
    octaves,  # 1, 2, 4, …
    views,  # consecutive images that share their rows
    encoded,  # the number of heads, from the first, to which the encoding applies
    g_images,  # [B*C*H*W]
    stride_c,
    stride_x,
):
    """∂T/∂images of blocks `start` to `stop` of `width` channels; sums always run over queries, samples, corners in this order."""
    Q, D, h, F = samples.shape[1], samples.shape[2], coef.shape[1], len(octaves)
    blocks, plain = -(-C // width), C - 2 * F
    dtype = samples.dtype
    at = np.empty(TILE, np.int64)
    corner = np.empty((TILE, 4), np.int64)
    weight = np.empty((TILE, 12), dtype)
    wave = np.empty((1, TILE * 2 * F), dtype)
    c = np.zeros((TILE, h + 1), dtype)
    row = np.zeros((h, width), dtype)
    image = np.empty((H * W, width + LANES), dtype)  # padded, so that whole vectors can be stored
    flat, pitch = image.reshape(1, image.size), width + LANES
    spill = new_spill(H * W, Q * D, 4, width)

    for n in range(start, stop):
        b, low = n // blocks, n % blocks * width
        high = min(low + width, C)
        middle = min(max(low, plain), high)
        for p in range(H * W):
            for k in range(width + LANES):
                image[p, k] = 0
        clear(spill)
        for q in range(Q):
            for j in range(h):
                for k in range(middle - low):
                    row[j, k] = rows[b // views, j, q, low + k]
            for first in range(0, D, TILE):
                m = locate(b, q, first, min(first + TILE, D), H, W, samples, at, corner, weight)
                pick(b, q, m, at, coef, c, encoded)
                if middle < high:
                    encode(b, q, m, at, depths, octaves, wave)
                i = 0
                while i < m:
                    run_end = _run_end(i, m, corner)
                    _scatter(i, run_end, h, low, middle, high, b * H * W, 2 * F, plain, c, row, wave, corner, weight, image)
                    if block_full(corner[i, 0] - b * H * W, HITS, spill):
                        for j in range(4):
                            p = corner[i, j] - b * H * W
                            flush(p, flat, p * pitch, p * pitch + width, spill)
                    i = run_end
        add_spilled(flat, width, spill)
        for first in range(0, H * W, LANES):  # a transpose in tiles that stay in the cache
            for k in range(high - low):
                for p in range(first, min(first + LANES, H * W)):
                    g_images[b * C * H * W + (low + k) * stride_c + p * stride_x] = image[p, k]


@part
def locate(b, q, first, last, H, W, samples, at, corner, weight):
    """List the samples of `first` to `last` that see the image: index, corners, and the corners' weights and slopes in x and y."""
    real = samples.dtype.type
    m = 0
    if H * W == 0:
        return m
    for d in range(first, last):
        x, y = _position(samples[b, q, d, 0], real(W), real(1)), _position(samples[b, q, d, 1], real(H), real(1))
        if x >= real(-1) and x < real(W) and y >= real(-1) and y < real(H):
            xa, xb, ax, bx, sax, sbx = _axis(x, W, real(W), real(0.5))
            ya, yb, ay, by, say, sby = _axis(y, H, real(H), real(0.5))
            ya, yb = (b * H + ya) * W, (b * H + yb) * W
            at[m] = d
            corner[m, 0], corner[m, 1], corner[m, 2], corner[m, 3] = ya + xa, ya + xb, yb + xa, yb + xb
            weight[m, 0], weight[m, 1], weight[m, 2], weight[m, 3] = ay * ax, ay * bx, by * ax, by * bx
            weight[m, 4], weight[m, 5], weight[m, 6], weight[m, 7] = ay * sax, ay * sbx, by * sax, by * sbx
            weight[m, 8], weight[m, 9], weight[m, 10], weight[m, 11] = say * ax, say * bx, sby * ax, sby * bx
            m += 1
    return m


@exact_part
def _position(u, size, one):
    return ((u + one) * size - one) / (one + one)  # without FMA, so that the bits are the reference's


@part
def _axis(x, size, length, half):
    """Two corners along an axis, their weights and slopes; if one is outside, the other appears twice with half its weight."""
    i, f, one, slope = int(np.floor(x)), x - np.floor(x), half + half, half * length
    if i < 0:
        return 0, 0, half * f, half * f, half * slope, half * slope
    if i + 1 == size:
        return i, i, half * (one - f), half * (one - f), -half * slope, -half * slope
    return i, i + 1, one - f, f, -slope, slope


@part
def pick(b, q, m, at, coef, c, encoded):
    """c[i] = the coefficients of listed sample i for each head, then the sum of the first `encoded`."""
    h = coef.shape[1]
    for i in range(m):
        whole = 0.0
        for j in range(h):
            c[i, j] = coef[b, j, q, at[i]]
            if j < encoded:
                whole += c[i, j]
        c[i, h] = whole


@part
def take(m, pixels, corner, weight, tap):
    """tap[i] = listed sample i of all channels."""
    C = pixels.shape[1]
    for i in range(m):
        for k in range(0, C, LANES):
            v = spread(tap.dtype.type(0))
            for j in range(4):
                v = fma(weight[i, j], load(pixels, corner[i, j], k, C), v)
            store(v, tap, i, k)


@part
def combine(m, c, tap, g_row):
    """g_row[j] += Σ_i c[i, j]·tap[i], four heads at a time."""
    n = tap.shape[1]
    for j in range(0, g_row.shape[0], 4):
        for k in range(0, n, LANES):
            g0, g1, g2, g3 = load(g_row, j, k, n), load(g_row, j + 1, k, n), load(g_row, j + 2, k, n), load(g_row, j + 3, k, n)
            for i in range(m):
                v = load(tap, i, k, n)
                g0, g1, g2, g3 = fma(c[i, j], v, g0), fma(c[i, j + 1], v, g1), fma(c[i, j + 2], v, g2), fma(c[i, j + 3], v, g3)
            store(g0, g_row, j, k)
            store(g1, g_row, j + 1, k)
            store(g2, g_row, j + 2, k)
            store(g3, g_row, j + 3, k)


@part
def dots(i, n, F, tap, row, wave, dot):
    """dot[j] = tap[i]·row[j], four heads at a time; the dot product of the encoded channels is the same for all."""
    zero = spread(tap.dtype.type(0))
    shared = zero
    for k in range(0, 2 * F, LANES):
        shared = fma(load(tap, i, n + k, n + 2 * F), load(wave, 0, i * 2 * F + k, (i + 1) * 2 * F), shared)
    for j in range(0, row.shape[0], 4):
        s0, s1, s2, s3 = shared, shared, shared, shared
        t0, t1, t2, t3 = 0.0, 0.0, 0.0, 0.0
        for first in range(0, max(n, 1), LENGTH):
            for k in range(first, min(first + LENGTH, n), LANES):
                v = load(tap, i, k, n)
                s0, s1 = fma(v, load(row, j, k, n), s0), fma(v, load(row, j + 1, k, n), s1)
                s2, s3 = fma(v, load(row, j + 2, k, n), s2), fma(v, load(row, j + 3, k, n), s3)
            t0, t1, t2, t3 = t0 + total(s0), t1 + total(s1), t2 + total(s2), t3 + total(s3)
            s0, s1, s2, s3 = zero, zero, zero, zero
        dot[j], dot[j + 1], dot[j + 2], dot[j + 3] = t0, t1, t2, t3


@part
def _mix(i, k, n, h, c, row):
    """Σ_j c[i, j]·row[j] for the vector of channels at k."""
    v = spread(row.dtype.type(0))
    for j in range(h):
        v = fma(c[i, j], load(row, j, k, n), v)
    return v


@part
def corner_dots(i, h, n, F, c, row, wave, pixels, corner):
    """pixels[p]·(Σ_j c[i, j]·row[j]) for the four corners p."""
    p0, p1, p2, p3 = corner[i, 0], corner[i, 1], corner[i, 2], corner[i, 3]
    zero = spread(row.dtype.type(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    C = n + 2 * F
    for k in range(n, C, LANES):
        v = fma(c[i, h], load(wave, 0, i * 2 * F + k - n, (i + 1) * 2 * F), zero)
        s0, s1 = fma(v, load(pixels, p0, k, C), s0), fma(v, load(pixels, p1, k, C), s1)
        s2, s3 = fma(v, load(pixels, p2, k, C), s2), fma(v, load(pixels, p3, k, C), s3)
    t0, t1, t2, t3 = 0.0, 0.0, 0.0, 0.0
    for first in range(0, max(n, 1), LENGTH):
        for k in range(first, min(first + LENGTH, n), LANES):
            v = _mix(i, k, n, h, c, row)
            s0, s1 = fma(v, load(pixels, p0, k, n), s0), fma(v, load(pixels, p1, k, n), s1)
            s2, s3 = fma(v, load(pixels, p2, k, n), s2), fma(v, load(pixels, p3, k, n), s3)
        t0, t1, t2, t3 = t0 + total(s0), t1 + total(s1), t2 + total(s2), t3 + total(s3)
        s0, s1, s2, s3 = zero, zero, zero, zero
    return t0, t1, t2, t3


@part
def _run_end(i, m, corner):
    """One past the last of the consecutive samples that share the corners of sample i."""
    end = i + 1
    while end < m and corner[end, 0] == corner[i, 0] and corner[end, 3] == corner[i, 3]:
        end += 1
    return end


@part
def _scatter(first, last, h, low, middle, high, base, waves, plain, c, row, wave, corner, weight, image):
    """image[p] += Σ_i weight·(Σ_j c[i, j]·row[j]) for the four corners p that samples `first` to `last` share.

    They are summed before they are added to the pixel: the large sum of a pixel that thousands of samples share would round off
    their last digits.
    """
    zero = spread(row.dtype.type(0))
    for k in range(0, middle - low, LANES):
        s0, s1, s2, s3 = zero, zero, zero, zero
        for i in range(first, last):
            v = _mix(i, k, middle - low, h, c, row)
            s0, s1, s2, s3 = fma(weight[i, 0], v, s0), fma(weight[i, 1], v, s1), fma(weight[i, 2], v, s2), fma(weight[i, 3], v, s3)
        _add(first, k, base, corner, image, s0, s1, s2, s3)
    for k in range(middle, high, LANES):
        s0, s1, s2, s3 = zero, zero, zero, zero
        for i in range(first, last):
            v = fma(c[i, h], load(wave, 0, i * waves + k - plain, i * waves + high - plain), zero)
            s0, s1, s2, s3 = fma(weight[i, 0], v, s0), fma(weight[i, 1], v, s1), fma(weight[i, 2], v, s2), fma(weight[i, 3], v, s3)
        _add(first, k - low, base, corner, image, s0, s1, s2, s3)


@part
def _add(i, k, base, corner, image, s0, s1, s2, s3):
    """image[p] += s for the four corners p, one after the other, as they may be the same pixel."""
    n, one = image.shape[1], image.dtype.type(1)
    for j, s in enumerate((s0, s1, s2, s3)):
        p = corner[i, j] - base
        store(fma(one, s, load(image, p, k, n)), image, p, k)


# Taylor series sin 2πs = s·(A0 + A1·s² + …); its error is 3e-16 at a quarter turn
A0, A1, A2, A3, A4, A5, A6, A7, A8, A9 = ((-1) ** k * math.tau ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10))


@part
def encode(b, q, m, at, depths, octaves, wave):
    """Sine and cosine of 2πt, interleaved, for t = depth·octave; both are computed as a sine of at most a quarter turn."""
    real = wave.dtype.type
    F = len(octaves)
    for i in range(m):
        for f in range(F):
            t = depths[b, q, at[i]] * octaves[f]
            wave[0, (i * F + f) * 2], wave[0, (i * F + f) * 2 + 1] = t, t
    for k in range(m * F * 2):
        r = wave[0, k] - np.rint(wave[0, k])
        a = abs(r)
        s = real(0.25) - a if k & 1 else min(a, real(0.5) - a)  # the subtraction rounds only where the sine is flat
        z = s * s
        v = real(A4) + z * (real(A5) + z * (real(A6) + z * (real(A7) + z * (real(A8) + z * real(A9)))))
        v = s * (real(A0) + z * (real(A1) + z * (real(A2) + z * (real(A3) + z * v))))
        wave[0, k] = v if k & 1 or r >= 0 else -v
