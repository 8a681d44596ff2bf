"""Bilinear ``grid_sample`` of a few planes on CPUs: taps are used as soon as they are known, all channels of a sample together.

Most of the work is finding out where a sample is; what is found is not written down tap by tap. No vectors: a machine's gathers
are slower than the loads that they stand for. Loops are written out: a call in them would count references.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import jit, part
from ._cpu_taps import positions

FEW = 8  # channels at most
FEW_BLOCK = 512  # samples whose places are found together


@jit
def few_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, points, out, oc, op):
    """Values of blocks `start` to `stop` of samples; channels of images and out are `ic` and `oc` apart, pixels `ip` and `op`."""
    P, size, zero = points.shape[1], H * W, points.dtype.type(0)
    blocks, one = -(-P // block), points.dtype.type(1)
    xs, ys, of_x, of_y = _lines(block, points)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        positions(points, b // grids, p, m, 0, W, 2, pad, align, xs, of_x)
        positions(points, b // grids, p, m, 1, H, 2, pad, align, ys, of_y)
        source, target = b // inputs * C * size, b * C * P + p * op
        for i in range(m):
            left, above = np.floor(xs[i]), np.floor(ys[i])
            u1, v1, x0, y0 = xs[i] - left, ys[i] - above, int(left), int(above)
            u0, v0 = one - u1, one - v1
            if x0 >= 0 and y0 >= 0 and x0 < W - 1 and y0 < H - 1:
                j = source + (y0 * W + x0) * ip
                k = j + W * ip
                for c in range(C):
                    top = u0 * images[j + c * ic] + u1 * images[j + c * ic + ip]
                    bottom = u0 * images[k + c * ic] + u1 * images[k + c * ic + ip]
                    out[target + c * oc + i * op] = v0 * top + v1 * bottom
            else:
                in_x0, in_x1, in_y0, in_y1 = (
                    x0 >= 0 and x0 < W,
                    x0 >= -1 and x0 < W - 1,
                    y0 >= 0 and y0 < H,
                    y0 >= -1 and y0 < H - 1,
                )
                for c in range(C):
                    first, v = source + c * ic, zero
                    if in_y0 and in_x0:
                        v += v0 * u0 * images[first + (y0 * W + x0) * ip]
                    if in_y0 and in_x1:
                        v += v0 * u1 * images[first + (y0 * W + x0 + 1) * ip]
                    if in_y1 and in_x0:
                        v += v1 * u0 * images[first + (y0 * W + W + x0) * ip]
                    if in_y1 and in_x1:
                        v += v1 * u1 * images[first + (y0 * W + W + x0 + 1) * ip]
                    out[target + c * oc + i * op] = v


@jit
def few_dots(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, grad, gc, gp, points, d_grid):
    """The gradient of the grid of blocks `start` to `stop` of samples."""
    P, size, zero = points.shape[1], H * W, points.dtype.type(0)
    blocks, one = -(-P // block), points.dtype.type(1)
    xs, ys, of_x, of_y = _lines(block, points)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        positions(points, b // grids, p, m, 0, W, 2, pad, align, xs, of_x)
        positions(points, b // grids, p, m, 1, H, 2, pad, align, ys, of_y)
        source, target = b // inputs * C * size, b * C * P + p * gp
        for i in range(m):
            left, above = np.floor(xs[i]), np.floor(ys[i])
            u1, v1, x0, y0 = xs[i] - left, ys[i] - above, int(left), int(above)
            a, b_, c_, d_ = zero, zero, zero, zero  # of the result's gradient and the pixels of each tap
            if x0 >= 0 and y0 >= 0 and x0 < W - 1 and y0 < H - 1:
                j = source + (y0 * W + x0) * ip
                k = j + W * ip
                for c in range(C):
                    g = grad[target + c * gc + i * gp]
                    a += g * images[j + c * ic]
                    b_ += g * images[j + c * ic + ip]
                    c_ += g * images[k + c * ic]
                    d_ += g * images[k + c * ic + ip]
            else:
                in_x0, in_x1, in_y0, in_y1 = (
                    x0 >= 0 and x0 < W,
                    x0 >= -1 and x0 < W - 1,
                    y0 >= 0 and y0 < H,
                    y0 >= -1 and y0 < H - 1,
                )
                for c in range(C):
                    g, first = grad[target + c * gc + i * gp], source + c * ic
                    if in_y0 and in_x0:
                        a += g * images[first + (y0 * W + x0) * ip]
                    if in_y0 and in_x1:
                        b_ += g * images[first + (y0 * W + x0 + 1) * ip]
                    if in_y1 and in_x0:
                        c_ += g * images[first + (y0 * W + W + x0) * ip]
                    if in_y1 and in_x1:
                        d_ += g * images[first + (y0 * W + W + x0 + 1) * ip]
            d_grid[b, p + i, 0] = ((one - v1) * (b_ - a) + v1 * (d_ - c_)) * of_x[i]
            d_grid[b, p + i, 1] = ((one - u1) * (c_ - a) + u1 * (d_ - b_)) * of_y[i]


@jit
def few_scatter(start, stop, width, C, Z, H, W, inputs, grids, dim, taps, pad, align, grad, gc, gp, points, d_images, ic, ip):
    """The gradient of images in blocks of `width` channels, summed over results, samples and taps in this order always."""
    P, blocks, size, one = points.shape[1], -(-C // width), H * W, points.dtype.type(1)
    xs, ys, of_x, of_y = _lines(FEW_BLOCK, points)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        high = min(low + width, C)
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, FEW_BLOCK):
                m = min(FEW_BLOCK, P - p)
                positions(points, b // grids, p, m, 0, W, 2, pad, align, xs, of_x)
                positions(points, b // grids, p, m, 1, H, 2, pad, align, ys, of_y)
                source, target = b * C * P + p * gp, image * C * size
                for i in range(m):
                    left, above = np.floor(xs[i]), np.floor(ys[i])
                    u1, v1, x0, y0 = xs[i] - left, ys[i] - above, int(left), int(above)
                    u0, v0 = one - u1, one - v1
                    in_x0, in_x1, in_y0, in_y1 = (
                        x0 >= 0 and x0 < W,
                        x0 >= -1 and x0 < W - 1,
                        y0 >= 0 and y0 < H,
                        y0 >= -1 and y0 < H - 1,
                    )
                    inside = in_x0 and in_x1 and in_y0 and in_y1
                    for c in range(low, high):
                        first, g = target + c * ic, grad[source + c * gc + i * gp]
                        top, bottom = v0 * g, v1 * g
                        if inside or (in_y0 and in_x0):
                            d_images[first + (y0 * W + x0) * ip] += u0 * top
                        if inside or (in_y0 and in_x1):
                            d_images[first + (y0 * W + x0 + 1) * ip] += u1 * top
                        if inside or (in_y1 and in_x0):
                            d_images[first + (y0 * W + W + x0) * ip] += u0 * bottom
                        if inside or (in_y1 and in_x1):
                            d_images[first + (y0 * W + W + x0 + 1) * ip] += u1 * bottom


@part
def _lines(room, points):
    """Where samples are along both axes, and how that changes with their coordinates."""
    real = points.dtype
    return np.empty(room, real), np.empty(room, real), np.empty(room, real), np.empty(room, real)
