"""Bilinear ``grid_sample`` of a few planes on CPUs: where samples are takes most of the time, and is found for a block at once.

A block whose samples all have their four pixels is read plane by plane without asking; in others a sample's bits say which it has:
1, 2, 4 and 8 from the first to the last. The size of a block is fixed, so that which of the two happens depends on the samples
alone. Loops are written out: a call in them would count references.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import exact_part, jit, part
from ._cpu_taps import positions

FEW = 8  # channels at most
FEW_BLOCK = 128  # samples whose places are found together


@jit
def few_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, points, out, oc, op):
    """Values of blocks `start` to `stop` of samples; channels of images and out are `ic` and `oc` apart, pixels `ip` and `op`."""
    P, size, one, zero = points.shape[1], H * W, points.dtype.type(1), points.dtype.type(0)
    blocks, lines, at, has = -(-P // block), _lines(block, points), np.empty(block, np.int32), np.empty(block, np.int32)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        whole = _cells(points, b // grids, p, m, H, W, pad, align, lines, at, has)
        us, vs = lines[2:4]
        for c in range(C):
            source, target = b // inputs * C * size + c * ic, b * C * P + c * oc + p * op
            for i in range(m):
                u1, v1 = us[i], vs[i]
                u0, v0 = one - u1, one - v1
                j = source + at[i] * ip
                k = j + W * ip
                if whole:
                    out[target + i * op] = v0 * (u0 * images[j] + u1 * images[j + ip]) + v1 * (u0 * images[k] + u1 * images[k + ip])
                else:
                    v = zero
                    if has[i] & 1:
                        v += v0 * u0 * images[j]
                    if has[i] & 2:
                        v += v0 * u1 * images[j + ip]
                    if has[i] & 4:
                        v += v1 * u0 * images[k]
                    if has[i] & 8:
                        v += v1 * u1 * images[k + ip]
                    out[target + i * op] = v


@jit
def few_dots(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, grad, gc, gp, points, d_grid):
    """The gradient of the grid of blocks `start` to `stop` of samples."""
    P, size, one, zero = points.shape[1], H * W, points.dtype.type(1), points.dtype.type(0)
    blocks, lines, at, has = -(-P // block), _lines(block, points), np.empty(block, np.int32), np.empty(block, np.int32)
    d_x, d_y = np.empty(block, points.dtype), np.empty(block, points.dtype)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        whole = _cells(points, b // grids, p, m, H, W, pad, align, lines, at, has)
        us, vs, of_x, of_y = lines[2:]
        d_x[:], d_y[:] = zero, zero
        for c in range(C):
            source, target = b // inputs * C * size + c * ic, b * C * P + c * gc + p * gp
            for i in range(m):
                u1, v1, g = us[i], vs[i], grad[target + i * gp]
                j = source + at[i] * ip
                k = j + W * ip
                if whole:
                    c00, c01, c10, c11 = images[j], images[j + ip], images[k], images[k + ip]
                else:
                    c00, c01 = images[j] if has[i] & 1 else zero, images[j + ip] if has[i] & 2 else zero
                    c10, c11 = images[k] if has[i] & 4 else zero, images[k + ip] if has[i] & 8 else zero
                    g = g if has[i] else zero  # of what is absent it may be anything
                d_x[i] += g * ((one - v1) * (c01 - c00) + v1 * (c11 - c10))
                d_y[i] += g * ((one - u1) * (c10 - c00) + u1 * (c11 - c01))
        for i in range(m):
            d_grid[b, p + i, 0] = d_x[i] * of_x[i]
            d_grid[b, p + i, 1] = d_y[i] * of_y[i]


@jit
def few_scatter(start, stop, width, C, Z, H, W, inputs, grids, dim, taps, pad, align, grad, gc, gp, points, d_images, ic, ip):
    """The gradient of images in blocks of `width` channels, summed over results, samples and taps in this order always."""
    P, blocks, size, one = points.shape[1], -(-C // width), H * W, points.dtype.type(1)
    lines, at, has = _lines(FEW_BLOCK, points), np.empty(FEW_BLOCK, np.int32), np.empty(FEW_BLOCK, np.int32)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, FEW_BLOCK):
                m = min(FEW_BLOCK, P - p)
                whole = _cells(points, b // grids, p, m, H, W, pad, align, lines, at, has)
                us, vs = lines[2:4]
                for c in range(low, min(low + width, C)):
                    source, target = b * C * P + c * gc + p * gp, image * C * size + c * ic
                    for i in range(m):
                        u1, top, bottom = us[i], (one - vs[i]) * grad[source + i * gp], vs[i] * grad[source + i * gp]
                        u0 = one - u1
                        j = target + at[i] * ip
                        k = j + W * ip
                        if whole:
                            d_images[j] += u0 * top
                            d_images[j + ip] += u1 * top
                            d_images[k] += u0 * bottom
                            d_images[k + ip] += u1 * bottom
                        else:
                            if has[i] & 1:
                                d_images[j] += u0 * top
                            if has[i] & 2:
                                d_images[j + ip] += u1 * top
                            if has[i] & 4:
                                d_images[k] += u0 * bottom
                            if has[i] & 8:
                                d_images[k + ip] += u1 * bottom


@part
def _lines(room, points):
    """Along both axes: the pixel before a sample, how far it is from there, and how that changes with its coordinate."""
    real = points.dtype
    return (
        np.empty(room, real),
        np.empty(room, real),
        np.empty(room, real),
        np.empty(room, real),
        np.empty(room, real),
        np.empty(room, real),
    )


@exact_part
def _cells(points, b, p, m, H, W, pad, align, lines, at, has):
    """Fill the lines; say which is the first of the four pixels of every sample, which of them there are, and if all are."""
    xs, ys, us, vs, of_x, of_y = lines
    positions(points, b, p, m, 0, W, 2, pad, align, xs, of_x)
    positions(points, b, p, m, 1, H, 2, pad, align, ys, of_y)
    outside, none = 0, np.int32(0)
    for i in range(m):
        left, above = np.floor(xs[i]), np.floor(ys[i])
        us[i], vs[i] = xs[i] - left, ys[i] - above
        xs[i], ys[i] = left, above
        x, y = np.int32(left), np.int32(above)
        at[i] = y * np.int32(W) + x
        before, after = np.int32(5) if x >= 0 and x < W else none, np.int32(10) if x >= -1 and x < W - 1 else none
        upper, lower = np.int32(3) if y >= 0 and y < H else none, np.int32(12) if y >= -1 and y < H - 1 else none
        has[i] = (before | after) & (upper | lower)
        outside += 0 if has[i] == 15 else 1
    return outside == 0
