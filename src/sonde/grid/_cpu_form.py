"""The form behind the epipolar operators, and its derivatives.

T(images, samples, depths, coef, rows) = Σ_{bhqd} coef_{bhqd} · Σ_c tap_c(b,q,d) · row_c(b,h,q,d), where row_c is rows_{bhqc} for
the first C' channels and the encoding of the depth, one for all heads, for the last 2·octaves.

``sample_sum`` is ∂T/∂rows, ``sample_dot`` is ∂T/∂coef, and their gradients are the other derivatives: two kernels serve
both operators in both directions. `per_query` works query by query; `per_channel` owns channels of the images' gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..op.cpu import jit, run
from ..op.lanes import LANES, fma, load, spread, store, total
from ..op.library import memory_format
from ..op.plan import Determinism, Kernel
from ._reference import accumulator

TILE = 32  # samples of a query in work at one time: their taps stay in the first cache


def derivatives(
    of: Sequence[str],
    images: Tensor,
    samples: Tensor,
    depths: Tensor | None = None,
    octaves: int = 0,
    *,
    coef: Tensor | None = None,
    rows: Tensor | None = None,
) -> list[Tensor]:
    """∂T/∂x for each x in `of`, in the accumulator's dtype."""
    wide = accumulator(images, samples, depths, coef, rows)
    B, C, H, W = images.shape
    _, Q, D, _ = samples.shape
    h = (rows if coef is None else coef).shape[1]  # type: ignore[union-attr]
    shapes = dict(samples=(B, Q, D, 2), depths=(B, Q, D), coef=(B, h, Q, D), rows=(B, h, Q, C - 2 * octaves))
    given = [_array(x, len(shapes[x_name]), wide) for x_name, x in dict(samples=samples, depths=depths, coef=coef, rows=rows).items()]
    given.insert(2, (2.0 ** torch.arange(octaves, dtype=wide)).numpy())
    found = {}
    if "images" in of:
        grad = torch.empty_like(images, dtype=wide, memory_format=memory_format(images, True))
        flat = grad.permute(0, 2, 3, 1) if grad.stride(1) == 1 and C > 1 else grad
        blocks, width = _blocks(images)
        run(per_channel, B * blocks, width, H, W, C, *given, flat.reshape(-1).numpy(), *grad.stride()[1::2], slices_per_thread=1)
        found["images"] = grad
    if set(of) - {"images"}:
        # rows are written whole, the others only where a sample sees the image
        found |= {x: (torch.empty if x == "rows" else torch.zeros)(shapes[x], dtype=wide) for x in of if x != "images"}
        wanted = [found[x].numpy() if x in of and (octaves or x != "depths") else np.empty((0,) * len(n), given[0].dtype) for x, n in shapes.items()]
        pixels = images.permute(0, 2, 3, 1).to(wide).contiguous().reshape(B * H * W, C)
        run(per_query, B * Q, H, W, pixels.numpy(), *given, *wanted, grain=max(1, 2**15 // max(1, C * D)))
    return [found[x] for x in of]


def kernels(of: Mapping[str, str], phase, result: torch.dtype | None, images: Tensor, *others: Tensor | None) -> list[Kernel]:
    """What `derivatives` launches and allocates; `of` says what each derivative is called."""
    return []


def _array(x: Tensor | None, dims: int, wide: torch.dtype) -> np.ndarray:
    """C-contiguous and writable always, so that kernels compile once per dtype."""
    return (torch.empty((0,) * dims, dtype=wide) if x is None else x.detach().to(wide).contiguous()).numpy()


def _blocks(images: Tensor) -> tuple[int, int]:
    """Into how many blocks the channels of an image are cut to occupy all threads, and their width; no bit depends on it."""
    B, C = images.shape[:2]
    blocks = max(1, min(-(-torch.get_num_threads() // max(B, 1)), -(-C // LANES)))
    width = -(-C // (blocks * LANES)) * LANES
    return -(-C // width) if C else 0, width


@jit
def per_query(
    start,
    stop,
    H,
    W,
    pixels,  # [B*H*W, C]
    samples,  # [B, Q, D, 2]
    depths,  # [B, Q, D]
    octaves,  # powers of two
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C']
    g_samples,  # like samples; a result that is empty is not wanted
    g_depths,
    g_coef,
    g_rows,
):
    """∂T/∂(samples, depths, coef, rows) of queries `start` to `stop`."""
    Q, D, C, F = samples.shape[1], samples.shape[2], pixels.shape[1], len(octaves)
    want_samples, want_depths, want_coef, want_rows = g_samples.size > 0, g_depths.size > 0, g_coef.size > 0, g_rows.size > 0
    h = max(coef.shape[1], rows.shape[1])
    heads, padded, plain = -(-h // 4) * 4, -(-C // LANES) * LANES, C - 2 * F
    dtype = pixels.dtype
    at = np.empty(TILE, np.int64)
    corner = np.empty((TILE, 4), np.int64)
    weight = np.empty((TILE, 12), dtype)
    wave = np.empty(TILE * 2 * F, dtype)
    tap = np.empty((TILE, padded), dtype)
    c = np.zeros((TILE, heads), dtype)
    row = np.zeros((heads, padded), dtype)
    g_row = np.empty((heads, padded), dtype)
    dot = np.empty(heads, dtype)

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
        for first in range(0, D, TILE):
            m = _locate(b, q, first, min(first + TILE, D), H, W, samples, at, corner, weight)
            if F:
                _encode(b, q, m, at, depths, octaves, wave)
            if want_rows or want_samples or want_depths:
                _pick(b, q, m, at, coef, c)
            if want_rows or want_coef or want_depths:
                _tap(m, pixels, corner, weight, tap)
            if want_rows:
                _combine(m, c, tap, g_row)
            for i in range(m):
                d = at[i]
                if F and (want_coef or want_samples):
                    for j in range(h):
                        for k in range(2 * F):
                            row[j, plain + k] = wave[i * 2 * F + k]
                if want_coef:
                    _dots(i, tap, row, dot)
                    for j in range(h):
                        g_coef[b, j, q, d] = dot[j]
                if want_samples:
                    s0, s1, s2, s3 = _corner_dots(i, h, c, row, pixels, corner)
                    g_samples[b, q, d, 0] = weight[i, 4] * s0 + weight[i, 5] * s1 + weight[i, 6] * s2 + weight[i, 7] * s3
                    g_samples[b, q, d, 1] = weight[i, 8] * s0 + weight[i, 9] * s1 + weight[i, 10] * s2 + weight[i, 11] * s3
                if want_depths:
                    slope = c_sum = dtype.type(0)
                    for j in range(h):
                        c_sum += c[i, j]
                    for f in range(F):
                        k, w = plain + 2 * f, (i * F + f) * 2
                        slope += octaves[f] * (tap[i, k] * wave[w + 1] - tap[i, k + 1] * wave[w])
                    g_depths[b, q, d] = dtype.type(2 * math.pi) * c_sum * slope
        if want_rows:
            for j in range(h):
                for k in range(plain):
                    g_rows[b, j, q, k] = g_row[j, k]


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
    octaves,  # powers of two
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C']
    g_images,  # [B*C*H*W]
    stride_c,
    stride_x,
):
    """∂T/∂images of blocks `start` to `stop` of `width` channels, summed over queries, samples and corners in this order always."""
    Q, D, h, F = samples.shape[1], samples.shape[2], coef.shape[1], len(octaves)
    blocks, plain = -(-C // width), C - 2 * F
    dtype = samples.dtype
    at = np.empty(TILE, np.int64)
    corner = np.empty((TILE, 4), np.int64)
    weight = np.empty((TILE, 12), dtype)
    wave = np.empty(TILE * 2 * F, dtype)
    c = np.zeros((TILE, h), dtype)
    row = np.zeros((h, width), dtype)
    image = np.empty((H * W, width), dtype)

    for n in range(start, stop):
        b, low = n // blocks, n % blocks * width
        high = min(low + width, C)
        middle = min(max(low, plain), high)
        for p in range(H * W):
            for k in range(width):
                image[p, k] = 0
        for q in range(Q):
            for j in range(h):
                for k in range(middle - low):
                    row[j, k] = rows[b, j, q, low + k]
            for first in range(0, D, TILE):
                m = _locate(b, q, first, min(first + TILE, D), H, W, samples, at, corner, weight)
                _pick(b, q, m, at, coef, c)
                if middle < high:
                    _encode(b, q, m, at, depths, octaves, wave)
                for i in range(m):
                    for j in range(h):
                        for k in range(middle - low, high - low):
                            row[j, k] = wave[i * 2 * F + low + k - plain]
                    _scatter(i, b * H * W, h, c, row, corner, weight, image)
        for k in range(high - low):
            for p in range(H * W):
                g_images[b * C * H * W + (low + k) * stride_c + p * stride_x] = image[p, k]


@jit
def _locate(b, q, first, last, H, W, samples, at, corner, weight):
    """List the samples that see the image: which they are, their corners, and the corners' weights and slopes in x and y."""
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


@jit(exact=True)
def _position(u, size, one):
    return ((u + one) * size - one) / (one + one)  # each operation rounded: the same bits as the reference


@jit
def _axis(x, size, length, half):
    """Two corners along an axis, their weights and slopes; where one is outside, the other takes both places, by halves."""
    i, f, one, slope = int(np.floor(x)), x - np.floor(x), half + half, half * length
    if i < 0:
        return 0, 0, half * f, half * f, half * slope, half * slope
    if i + 1 == size:
        return i, i, half * (one - f), half * (one - f), -half * slope, -half * slope
    return i, i + 1, one - f, f, -slope, slope


@jit
def _pick(b, q, m, at, coef, c):
    for i in range(m):
        for j in range(coef.shape[1]):
            c[i, j] = coef[b, j, q, at[i]]


@jit
def _tap(m, pixels, corner, weight, tap):
    for i in range(m):
        for k in range(0, tap.shape[1], LANES):
            v = spread(tap.dtype.type(0))
            for j in range(4):
                v = fma(weight[i, j], load(pixels, corner[i, j], k), v)
            store(v, tap, i, k)


@jit
def _combine(m, c, tap, g_row):
    """g_row[j] += Σ_i c[i, j]·tap[i], four heads at a time."""
    for j in range(0, c.shape[1], 4):
        for k in range(0, tap.shape[1], LANES):
            g0, g1, g2, g3 = load(g_row, j, k), load(g_row, j + 1, k), load(g_row, j + 2, k), load(g_row, j + 3, k)
            for i in range(m):
                v = load(tap, i, k)
                g0, g1, g2, g3 = fma(c[i, j], v, g0), fma(c[i, j + 1], v, g1), fma(c[i, j + 2], v, g2), fma(c[i, j + 3], v, g3)
            store(g0, g_row, j, k)
            store(g1, g_row, j + 1, k)
            store(g2, g_row, j + 2, k)
            store(g3, g_row, j + 3, k)


@jit
def _dots(i, tap, row, dot):
    """dot[j] = tap[i]·row[j], four heads at a time."""
    for j in range(0, row.shape[0], 4):
        s0 = s1 = s2 = s3 = spread(tap.dtype.type(0))
        for k in range(0, tap.shape[1], LANES):
            v = load(tap, i, k)
            s0, s1, s2, s3 = fma(v, load(row, j, k), s0), fma(v, load(row, j + 1, k), s1), fma(v, load(row, j + 2, k), s2), fma(v, load(row, j + 3, k), s3)
        dot[j], dot[j + 1], dot[j + 2], dot[j + 3] = total(s0), total(s1), total(s2), total(s3)


@jit
def _corner_dots(i, h, c, row, pixels, corner):
    """pixels[p]·Σ_j c[i, j]·row[j] for the four corners p."""
    p0, p1, p2, p3 = corner[i, 0], corner[i, 1], corner[i, 2], corner[i, 3]
    s0 = s1 = s2 = s3 = spread(row.dtype.type(0))
    for k in range(0, row.shape[1], LANES):
        v = spread(row.dtype.type(0))
        for j in range(h):
            v = fma(c[i, j], load(row, j, k), v)
        s0, s1, s2, s3 = fma(v, load(pixels, p0, k), s0), fma(v, load(pixels, p1, k), s1), fma(v, load(pixels, p2, k), s2), fma(v, load(pixels, p3, k), s3)
    return total(s0), total(s1), total(s2), total(s3)


@jit
def _scatter(i, base, h, c, row, corner, weight, image):
    """image[p] += weight·Σ_j c[i, j]·row[j] for the four corners p."""
    for k in range(0, row.shape[1], LANES):
        v = spread(row.dtype.type(0))
        for j in range(h):
            v = fma(c[i, j], load(row, j, k), v)
        for j in range(4):
            p = corner[i, j] - base
            store(fma(weight[i, j], v, load(image, p, k)), image, p, k)


# sin 2πs = s·(A0 + A1·s² + …) by Taylor: the rest is 3e-16 at a quarter turn
A0, A1, A2, A3, A4, A5, A6, A7, A8, A9 = ((-1) ** k * math.tau ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10))


@jit
def _encode(b, q, m, at, depths, octaves, wave):
    """Sine and cosine of 2πt for t = depth·octave, side by side; both are the sine of a quarter turn at most."""
    real = wave.dtype.type
    F = len(octaves)
    for i in range(m):
        for f in range(F):
            wave[(i * F + f) * 2] = wave[(i * F + f) * 2 + 1] = depths[b, q, at[i]] * octaves[f]
    for k in range(m * F * 2):
        r = wave[k] - np.rint(wave[k])
        a = abs(r)
        s = real(0.25) - a if k & 1 else min(a, real(0.5) - a)  # rounded only where the sine is flat
        z = s * s
        v = real(A4) + z * (real(A5) + z * (real(A6) + z * (real(A7) + z * (real(A8) + z * real(A9)))))
        v = s * (real(A0) + z * (real(A1) + z * (real(A2) + z * (real(A3) + z * v))))
        wave[k] = v if k & 1 or r >= 0 else -v
