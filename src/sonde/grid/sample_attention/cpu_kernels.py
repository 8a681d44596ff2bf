"""Numba kernels of ``sample_attention``: ``attend``, the value, and ``slopes``, the gradients of queries, coordinates and depths.

The gradients of images and values are ``per_channel`` of the epipolar form, with the weights that ``slopes`` writes.
"""

from __future__ import annotations

import math

import numpy as np

from ...op.cpu import jit, part
from ...op.simd import LANES, load, store
from .._epipolar.cpu_kernels import TILE, combine, corner_dots, dots, encode, locate, take
from .._scatter.cpu_sums import BLOCK, move


@jit
def attend(
    start,
    stop,
    H,
    W,
    views,
    pixels,  # [B*V*H*W, C]
    values,  # [B*V*H*W, C_v]; empty where they are the first channels of the pixels
    samples,  # [B*V, Q, D, 2], NaN where masked
    depths,  # [B*V, Q, D]
    mask,  # [B*V, Q, D]; empty if there is none
    queries,  # [B, h, Q, C']
    octaves,  # 1, 2, 4, …
    scale,
    out,  # [B, h, Q, C_v]
    lse,  # [B, h, Q]
):
    """Values of queries `start` to `stop`: an online softmax, TILE samples at a time; `top` is the largest logit so far."""
    h, Q, plain = queries.shape[1:]
    D, C, F, C_v, shared = samples.shape[2], pixels.shape[1], len(octaves), out.shape[3], values.size == 0
    dtype = pixels.dtype
    zero = dtype.type(0)
    heads, padded, wide = -(-h // 4) * 4, -(-C // LANES) * LANES, -(-C_v // LANES) * LANES
    at, corner, weight = np.empty(TILE, np.int64), np.empty((TILE, 4), np.int64), np.empty((TILE, 12), dtype)
    wave = np.empty((1, TILE * 2 * F), dtype)
    taken, seen = np.empty((TILE, padded), dtype), np.empty((TILE, 0 if shared else wide), dtype)
    c, row, dot = np.zeros((TILE, heads + 1), dtype), np.zeros((heads, plain), dtype), np.empty(heads, np.float64)
    total = np.zeros((heads, padded if shared else wide), dtype)
    whole = np.zeros((heads if views * D > BLOCK else 0, total.shape[1]), np.float64)  # the sum of finished blocks of `total`
    flat, width = total.reshape(1, total.size), total.shape[1]
    top, norm = np.empty(heads, dtype), np.empty(heads, np.float64)

    for n in range(start, stop):
        b, q = n // Q, n % Q
        copy_rows(b, q, queries, row)
        total[:], whole[:], norm[:], top[:] = 0, 0, 0, -np.inf
        count, lived = 0, 0  # unmasked samples, and how many of them see the image
        for v in range(views):
            bv = b * views + v
            for first in range(0, D, TILE):
                last = min(first + TILE, D)
                m = locate(bv, q, first, last, H, W, samples, at, corner, weight)
                count, lived = count + taking_part(bv, q, first, last, mask), lived + m
                if F:
                    encode(bv, q, m, at, depths, octaves, wave)
                take(m, pixels, corner, weight, taken)
                for i in range(m):
                    dots(i, plain, F, taken, row, wave, dot)
                    for j in range(h):
                        c[i, j] = dot[j] * scale
                for j in range(h):
                    most = top[j]
                    for i in range(m):
                        most = max(most, c[i, j])
                    if most > top[j]:
                        rescale(j, np.exp(top[j] - most), total, whole, norm)
                        top[j] = most
                    base = finite_part(top[j], zero)
                    for i in range(m):
                        c[i, j] = np.exp(c[i, j] - base)
                        norm[j] += c[i, j]
                if shared:
                    combine(m, c, taken, total)
                else:
                    take(m, values, corner, weight, seen)
                    combine(m, c, seen, total)
                if views * D > BLOCK and (last % BLOCK == 0 or last == D):
                    for j in range(h):
                        move(flat, j * width, (j + 1) * width, whole, j)
        for j in range(h):
            if count > lived:  # the others have logit 0 and value 0
                if top[j] < 0:
                    rescale(j, np.exp(top[j]), total, whole, norm)
                    top[j] = 0
                norm[j] += (count - lived) * np.exp(-top[j])
            lse[b, j, q] = finite_part(top[j], zero) + np.log(norm[j]) if count else -np.inf
            for k in range(C_v):
                one = total[j, k] + whole[j, k] if views * D > BLOCK else np.float64(total[j, k])
                out[b, j, q, k] = one / norm[j] if count else 0.0


@part
def copy_rows(b, q, x, row):
    """row[j] = x[b, j, q]."""
    for j in range(x.shape[1]):
        for k in range(x.shape[3]):
            row[j, k] = x[b, j, q, k]


@part
def taking_part(b, q, first, last, mask):
    """The number of these samples that are not masked."""
    if mask.size == 0:
        return last - first
    count = 0
    for d in range(first, last):
        count += np.int64(mask[b, q, d])
    return count


@part
def finite_part(top, zero):
    """The logit that is subtracted in the exponent: 0 where all logits are −∞, so that weights are 0 and not NaN."""
    return top if top > -np.inf else zero


@part
def rescale(j, less, total, whole, norm):
    """Rescale the sums of head j to a larger maximum logit."""
    n = total.shape[1]
    norm[j] *= less
    for k in range(0, n, LANES):
        store(load(total, j, k, n) * less, total, j, k)
    if whole.shape[0]:
        for k in range(n):
            whole[j, k] *= less


@jit
def slopes(
    start,
    stop,
    H,
    W,
    views,
    pixels,  # as in ``attend``
    values,
    samples,
    depths,
    queries,
    octaves,
    scale,
    grad,  # [B, h, Q, C_v]
    result,  # [B, h, Q, C_v], before rounding
    lse,  # [B, h, Q]
    g_samples,  # derivatives, shaped like their operands; empty if not wanted
    g_depths,
    g_queries,
    scores,  # [B*V, h, Q, D], gradients of the scores; `weights` apart or as additional heads; empty if not wanted
    weights,
):
    """The gradients of queries `start` to `stop` and of the coordinates and depths of their samples; weights are recomputed."""
    h, Q, plain = queries.shape[1:]
    D, C, F, C_v, shared = samples.shape[2], pixels.shape[1], len(octaves), grad.shape[3], values.size == 0
    dtype = pixels.dtype
    heads, padded, wide = -(-h // 4) * 4, -(-C // LANES) * LANES, -(-C_v // LANES) * LANES
    at, corner, weight = np.empty(TILE, np.int64), np.empty((TILE, 4), np.int64), np.empty((TILE, 12), dtype)
    wave = np.empty((1, TILE * 2 * F), dtype)
    taken, seen = np.empty((TILE, padded), dtype), np.empty((TILE, 0 if shared else wide), dtype)
    c, e = np.zeros((TILE, heads + 1), dtype), np.zeros((TILE, h + 1), dtype)
    both, both_c = np.zeros((2 * h if shared else 0, plain), dtype), np.zeros((TILE, 2 * h + 1), dtype)
    row, pull = np.zeros((heads, plain), dtype), np.zeros((heads, C_v), dtype)
    dot, pulls, mean = np.empty(heads, np.float64), np.empty(heads, np.float64), np.empty(heads, np.float64)
    g_row = np.zeros((heads, padded), dtype)
    whole = np.zeros((heads if views * D > BLOCK else 0, padded), np.float64)
    flat = g_row.reshape(1, g_row.size)
    shift = h if shared and scores.size else 0

    for n in range(start, stop):
        b, q = n // Q, n % Q
        copy_rows(b, q, queries, row)
        copy_rows(b, q, grad, pull)
        for j in range(h):
            mean[j] = 0
            for k in range(C_v):
                mean[j] += np.float64(pull[j, k]) * result[b, j, q, k]
            if shared:
                for k in range(plain):
                    both[j, k], both[h + j, k] = row[j, k], pull[j, k]
        g_row[:], whole[:] = 0, 0
        for v in range(views):
            bv = b * views + v
            for first in range(0, D, TILE):
                last = min(first + TILE, D)
                m = locate(bv, q, first, last, H, W, samples, at, corner, weight)
                if F:
                    encode(bv, q, m, at, depths, octaves, wave)
                take(m, pixels, corner, weight, taken)
                if not shared:
                    take(m, values, corner, weight, seen)
                for i in range(m):
                    dots(i, plain, F, taken, row, wave, dot)
                    dots(i, C_v, 0, taken if shared else seen, pull, wave, pulls)
                    every = 0.0
                    for j in range(h):
                        p = np.exp(dtype.type(dot[j] * scale - lse[b, j, q]))
                        slope = p * (pulls[j] - mean[j]) * scale
                        every += slope
                        c[i, j], e[i, j] = slope, p
                        both_c[i, j], both_c[i, h + j] = slope, p
                        if scores.size:
                            scores[bv, j, q, at[i]] = slope
                            weights[bv, shift + j, q, at[i]] = p
                    c[i, h], both_c[i, 2 * h] = every, every
                if g_queries.size:
                    combine(m, c, taken, g_row)
                    if views * D > BLOCK and (last % BLOCK == 0 or last == D):
                        for j in range(h):
                            move(flat, j * padded, (j + 1) * padded, whole, j)
                for i in range(m):
                    if g_samples.size:
                        if shared:
                            s = corner_dots(i, 2 * h, plain, F, both_c, both, wave, pixels, corner)
                            put_slopes(bv, q, at[i], i, weight, s, g_samples)
                        else:
                            s = corner_dots(i, h, plain, F, c, row, wave, pixels, corner)
                            put_slopes(bv, q, at[i], i, weight, s, g_samples)
                            s = corner_dots(i, h, C_v, 0, e, pull, wave, values, corner)
                            put_slopes(bv, q, at[i], i, weight, s, g_samples)
                    if g_depths.size:
                        slope = dtype.type(0)
                        for f in range(F):
                            k, w = plain + 2 * f, (i * F + f) * 2
                            slope += octaves[f] * (taken[i, k] * wave[0, w + 1] - taken[i, k + 1] * wave[0, w])
                        g_depths[bv, q, at[i]] = dtype.type(2 * math.pi) * c[i, h] * slope
        if g_queries.size:
            for j in range(h):
                for k in range(plain):
                    g_queries[b, j, q, k] = g_row[j, k] + whole[j, k] if views * D > BLOCK else g_row[j, k]


@part
def put_slopes(b, q, d, i, weight, s, g_samples):
    """Add to the gradient of the coordinates of a sample whose four pixels have the dot products `s`."""
    g_samples[b, q, d, 0] += weight[i, 4] * s[0] + weight[i, 5] * s[1] + weight[i, 6] * s[2] + weight[i, 7] * s[3]
    g_samples[b, q, d, 1] += weight[i, 8] * s[0] + weight[i, 9] * s[1] + weight[i, 10] * s[2] + weight[i, 11] * s[3]
