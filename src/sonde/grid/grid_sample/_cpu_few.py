"""Bilinear ``grid_sample`` of a few channels on CPUs: where samples are is found for sixteen at a time, a lane for each.

Planes are read in the same lanes. Where all sixteen samples have their four pixels, neighbours along a row are one load; elsewhere
pixels that are absent are zero. Channels-last images are read sample by sample, four channels at a time. Indices are unsigned where
kernels compute them: Numba asks of others whether they count from the end.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import exact_part, jit
from ...op.lanes import (
    LANES,
    cast,
    everywhere,
    floor,
    fma,
    load,
    load_four,
    pairs,
    some,
    spread,
    store,
    store_some,
    total,
    unzip,
    where,
    zipped,
)
from ._cpu_taps import place

FEW = 8  # channels at most
FEW_BLOCK = 512  # samples that are handed to a thread at once


@jit
def few_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, points, out, oc, op):
    """Values of blocks `start` to `stop` of samples; channels of images and out are `ic` and `oc` apart, pixels `ip` and `op`."""
    P, size = points.shape[1], H * W
    blocks, flat, rows = -(-P // block), points.reshape(points.shape[0], 2 * P), out.reshape(1, out.size)
    for n in range(start, stop):
        b, low = n // blocks, n % blocks * block
        for p in range(low, min(low + block, P), LANES):
            u, v, at, has, _, _ = _cells(flat, b // grids, p, H, W, pad, align)
            whole, target = everywhere(has == 15), b * C * P + p
            u0, v0 = spread(points.dtype.type(1)) - u, spread(points.dtype.type(1)) - v
            for c in range(C):
                c00, c01, c10, c11 = _corners(images, (b // inputs * C + c) * size, W, at, has, whole)
                store_some(
                    fma(v0, fma(u0, c00, u * c01), v * fma(u0, c10, u * c11)), rows, 0, target + c * P, b * C * P + c * P + P
                )


@jit
def few_dots(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, grad, gc, gp, points, d_grid):
    """The gradient of the grid of blocks `start` to `stop` of samples."""
    P, size = points.shape[1], H * W
    blocks, flat, rows = -(-P // block), points.reshape(points.shape[0], 2 * P), grad.reshape(1, grad.size)
    d_flat = d_grid.reshape(d_grid.shape[0], 2 * P)
    for n in range(start, stop):
        b, low = n // blocks, n % blocks * block
        for p in range(low, min(low + block, P), LANES):
            u, v, at, has, of_x, of_y = _cells(flat, b // grids, p, H, W, pad, align)
            whole, source = everywhere(has == 15), b * C * P + p
            u0, v0 = spread(points.dtype.type(1)) - u, spread(points.dtype.type(1)) - v
            d_x, d_y = spread(points.dtype.type(0)), spread(points.dtype.type(0))
            for c in range(C):
                c00, c01, c10, c11 = _corners(images, (b // inputs * C + c) * size, W, at, has, whole)
                g = load(rows, 0, source + c * P, b * C * P + c * P + P)
                g = where(has == 0, 0, g)  # of what is absent it may be anything
                d_x = fma(g, fma(v0, c01 - c00, v * (c11 - c10)), d_x)
                d_y = fma(g, fma(u0, c10 - c00, u * (c11 - c01)), d_y)
            half, other = zipped(d_x * of_x, d_y * of_y)
            store_some(half, d_flat, b, 2 * p, 2 * P)
            store_some(other, d_flat, b, 2 * p + LANES, 2 * P)


@jit
def few_scatter(start, stop, width, C, Z, H, W, inputs, grids, dim, taps, pad, align, grad, gc, gp, points, d_images, ic, ip):
    """The gradient of images in blocks of `width` channels, summed over results, samples and taps in this order always."""
    P, blocks, size, one = points.shape[1], -(-C // width), H * W, points.dtype.type(1)
    flat, step, row, below = points.reshape(points.shape[0], 2 * P), np.uint64(gp), np.uint64(ip), np.uint64(W * ip)
    reals, numbers = np.empty((2, LANES), points.dtype), np.empty((2, LANES), np.int64)
    us, vs, ats, bits = reals[0], reals[1], numbers[0], numbers[1]
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, LANES):
                u, v, at, has, _, _ = _cells(flat, b // grids, p, H, W, pad, align)
                whole, m = everywhere(has == 15), min(LANES, P - p)
                store(u, reals, 0, 0)
                store(v, reals, 1, 0)
                store(cast(at, np.int64), numbers, 0, 0)
                store(cast(has, np.int64), numbers, 1, 0)
                for c in range(low, min(low + width, C)):
                    source, target = np.uint64(b * C * P + c * gc + p * gp), image * C * size + c * ic
                    for i in range(m):
                        u1, g = us[i], grad[source + np.uint64(i) * step]
                        u0, top, bottom = one - u1, (one - vs[i]) * g, vs[i] * g
                        j = np.uint64(target + ats[i] * ip)
                        k = j + below
                        if whole:
                            d_images[j] += u0 * top
                            d_images[j + row] += u1 * top
                            d_images[k] += u0 * bottom
                            d_images[k + row] += u1 * bottom
                        else:
                            if bits[i] & 1:
                                d_images[j] += u0 * top
                            if bits[i] & 2:
                                d_images[j + row] += u1 * top
                            if bits[i] & 4:
                                d_images[k] += u0 * bottom
                            if bits[i] & 8:
                                d_images[k + row] += u1 * bottom


@jit
def few_pixels_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, points, out, oc, op):
    """The same of images and out whose channels are neighbours."""
    P, one = points.shape[1], spread(points.dtype.type(1))
    blocks, flat = -(-P // block), points.reshape(points.shape[0], 2 * P)
    pixels, results = images.reshape(images.size // C, C), out.reshape(out.size // C, C)
    weight, numbers = np.empty((4, LANES), points.dtype), np.empty((2, LANES), np.int64)
    for n in range(start, stop):
        b, low = n // blocks, n % blocks * block
        first = b // inputs * H * W
        for p in range(low, min(low + block, P), LANES):
            u, v, at, has, _, _ = _cells(flat, b // grids, p, H, W, pad, align)
            store((one - u) * (one - v), weight, 0, 0)
            store(u * (one - v), weight, 1, 0)
            store((one - u) * v, weight, 2, 0)
            store(u * v, weight, 3, 0)
            store(cast(at, np.int64), numbers, 0, 0)
            store(cast(has, np.int64), numbers, 1, 0)
            for i in range(min(LANES, P - p)):
                for c in range(0, C, 4):
                    c00, c01, c10, c11 = _pixels(pixels, first + numbers[0, i], W, c, C, numbers[1, i])
                    value = fma(weight[0, i], c00, fma(weight[1, i], c01, fma(weight[2, i], c10, weight[3, i] * c11)))
                    store_some(value, results, b * P + p + i, c, C)


@jit
def few_pixels_dots(
    start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, grad, gc, gp, points, d_grid
):
    P, one = points.shape[1], points.dtype.type(1)
    blocks, flat, d_flat = -(-P // block), points.reshape(points.shape[0], 2 * P), d_grid.reshape(d_grid.shape[0], 2 * P)
    pixels, reals, numbers = images.reshape(images.size // C, C), np.empty((4, LANES), points.dtype), np.empty((2, LANES), np.int64)
    given = grad.reshape(grad.size // C, C) if gc == 1 else np.empty((LANES, C), points.dtype)
    for n in range(start, stop):
        b, low = n // blocks, n % blocks * block
        first = b // inputs * H * W
        for p in range(low, min(low + block, P), LANES):
            u, v, at, has, of_x, of_y = _cells(flat, b // grids, p, H, W, pad, align)
            store(u, reals, 0, 0)
            store(v, reals, 1, 0)
            store(cast(at, np.int64), numbers, 0, 0)
            store(cast(has, np.int64), numbers, 1, 0)
            m, source = min(LANES, P - p), b * P + p if gc == 1 else 0
            if gc > 1:  # the gradient of planes, turned
                for c in range(C):
                    for i in range(m):
                        given[i, c] = grad[np.uint64(b * C * P + c * gc + p) + np.uint64(i)]
            for i in range(m):
                u1, v1, bits = reals[0, i], reals[1, i], numbers[1, i]
                reals[2, i], reals[3, i] = 0, 0
                for c in range(0, C, 4):
                    c00, c01, c10, c11 = _pixels(pixels, first + numbers[0, i], W, c, C, bits)
                    g = load_four(given, source + i, c, C if bits else 0)  # of what is absent it may be anything
                    reals[2, i] += total(g * fma(one - v1, c01 - c00, v1 * (c11 - c10)))
                    reals[3, i] += total(g * fma(one - u1, c10 - c00, u1 * (c11 - c01)))
            half, other = zipped(load(reals, 2, 0, LANES) * of_x, load(reals, 3, 0, LANES) * of_y)
            store_some(half, d_flat, b, 2 * p, 2 * P)
            store_some(other, d_flat, b, 2 * p + LANES, 2 * P)


@exact_part
def _cells(points, b, p, H, W, pad, align):
    """Of lanes of samples from `p` on: how far into its cell each is, the cell's first pixel, which of its four there are as bits 1
    to 8, and how the first two change with its coordinates. Lanes after the last sample are like one in the middle."""
    end = points.shape[1]
    x, y = unzip(load(points, b, 2 * p, end), load(points, b, 2 * p + LANES, end))
    x, of_x = place(x, W, 2, pad, align)
    y, of_y = place(y, H, 2, pad, align)
    left, above = floor(x), floor(y)
    i, j = cast(left, np.int32), cast(above, np.int32)
    before, after = where((i >= 0) & (i < W), i - i + 5, 0), where((i >= -1) & (i < W - 1), i - i + 10, 0)
    upper, lower = where((j >= 0) & (j < H), i - i + 3, 0), where((j >= -1) & (j < H - 1), i - i + 12, 0)
    return x - left, y - above, j * W + i, (before | after) & (upper | lower), of_x, of_y


@exact_part
def _corners(images, first, W, at, has, whole):
    """The four pixels of each cell, zero where there is none."""
    if whole:
        c00, c01 = pairs(images, first, at)
        c10, c11 = pairs(images, first + W, at)
    else:
        c00, c01 = some(images, first, at, has & 1 == 1), some(images, first + 1, at, has & 2 == 2)
        c10, c11 = some(images, first + W, at, has & 4 == 4), some(images, first + W + 1, at, has & 8 == 8)
    return c00, c01, c10, c11


@exact_part
def _pixels(pixels, first, W, c, C, bits):
    """Channels from `c` on of the four pixels of a cell, zero where there is none."""
    if bits == 15:
        c00, c01 = load_four(pixels, first, c, C), load_four(pixels, first + 1, c, C)
        c10, c11 = load_four(pixels, first + W, c, C), load_four(pixels, first + W + 1, c, C)
    else:
        c00, c01 = load_four(pixels, first, c, C if bits & 1 else 0), load_four(pixels, first + 1, c, C if bits & 2 else 0)
        c10, c11 = load_four(pixels, first + W, c, C if bits & 4 else 0), load_four(pixels, first + W + 1, c, C if bits & 8 else 0)
    return c00, c01, c10, c11
