"""Bilinear ``grid_sample`` of images on CPUs: sixteen samples are located at a time, one per SIMD lane.

Planes are read in the same lanes, and two neighbours along a row by one load. A few contiguous channels are read sample by sample,
four channels at a time. Indices computed in kernels are unsigned: for signed ones, Numba checks whether they count from the end.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import array_part, called_part, exact_part, jit, part
from ...op.simd import (
    LANES,
    cast,
    everywhere,
    floor,
    fma,
    load,
    load_four,
    pairs,
    prefetch,
    spread,
    store,
    store_some,
    total,
    unzip,
    where,
    zipped,
)
from .._scatter.cpu_sums import BLOCK as TERMS
from .._scatter.cpu_sums import COUNTED, FULL, add_spilled_planes, block_full, clear, flush_planes, hash16, new_spill
from .cpu_taps import BLOCK, place

FEW = 8  # at most this many channels count as few
FEW_BLOCK = 128  # with few channels: samples that are located, and whose pixels are prefetched, before the first is read


@jit
def bilinear_forward(start, stop, block, C, H, W, inputs, grids, pad, align, images, ic, ip, points, out):
    """Values of blocks `start` to `stop` of samples; channels of images are `ic` apart, pixels `ip`; out is contiguous."""
    P, size, one = points.shape[1], H * W, spread(points.dtype.type(1))
    blocks, rows, (cells, at) = -(-P // block), out.reshape(out.size // P, P), _room(points, block)
    flat, line = _flat(points), images.reshape(1, images.size)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m, first = min(block, P - p), b // inputs * C * size
        _locate(flat, b // grids, p, m, H, W, pad, align, cells, at)
        if C <= FEW:
            _send_for(line, first, C, ic, ip, W, m, at)
        for c in range(C):  # outermost: planes are often whole pages apart, and a load waits for a store one page away
            for i in range(0, m, LANES):
                u, v, j, has = load(cells, 0, i, block), load(cells, 1, i, block), load(at, 0, i, block), load(at, 1, i, block)
                c00, c01, c10, c11 = _corners(images, first + c * size, size, W, j, has, everywhere(has == 15))
                u0, v0 = one - u, one - v
                store_some(fma(v0, fma(u0, c00, u * c01), v * fma(u0, c10, u * c11)), rows, b * C + c, p + i, P)


@jit
def bilinear_dots(start, stop, block, C, H, W, inputs, grids, pad, align, images, ic, ip, grad, gc, gp, points, d_grid):
    """The gradient of the grid of blocks `start` to `stop` of samples."""
    P, size, zero, one = points.shape[1], H * W, spread(points.dtype.type(0)), spread(points.dtype.type(1))
    blocks, rows, (cells, at) = -(-P // block), grad.reshape(grad.size // P, P), _room(points, block)
    flat, line, d_flat = _flat(points), images.reshape(1, images.size), _flat(d_grid)
    turned = np.empty((1, block), points.dtype)
    whole = np.empty((2, block if C > TERMS else 0), np.float64)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m, first = min(block, P - p), b // inputs * C * size
        _locate(flat, b // grids, p, m, H, W, pad, align, cells, at)
        if C <= FEW:
            _send_for(line, first, C, ic, ip, W, m, at)
        for i in range(0, m, LANES):
            store(zero, cells, 4, i)
            store(zero, cells, 5, i)
        whole[:] = 0
        for c in range(C):
            if gp > 1:  # channels are contiguous
                source = np.uint64(b * C * P + c * gc + p * gp)
                for i in range(m):
                    turned[0, i] = grad[source + np.uint64(i * gp)]
            for i in range(0, m, LANES):
                u, v, j, has = load(cells, 0, i, block), load(cells, 1, i, block), load(at, 0, i, block), load(at, 1, i, block)
                c00, c01, c10, c11 = _corners(images, first + c * size, size, W, j, has, everywhere(has == 15))
                g = load(turned, 0, i, m) if gp > 1 else load(rows, b * C + c, p + i, P)
                g = where(has == 0, 0, g)  # a sample that sees nothing may have any gradient, even NaN
                d_x, d_y = fma(one - v, c01 - c00, v * (c11 - c10)), fma(one - u, c10 - c00, u * (c11 - c01))
                store(fma(g, d_x, load(cells, 4, i, block)), cells, 4, i)
                store(fma(g, d_y, load(cells, 5, i, block)), cells, 5, i)
            if C > TERMS and (c % TERMS == TERMS - 1 or c == C - 1):
                for d in range(2):
                    for i in range(m):
                        whole[d, i] += cells[4 + d, i]
                        cells[4 + d, i] = whole[d, i] if c == C - 1 else 0
        _hand_over(d_flat, b, p, m, cells)


@jit
def bilinear_scatter(start, stop, width, C, H, W, inputs, grids, pad, align, grad, gc, gp, points, d_images, ic, ip):
    """The gradient of images in blocks of `width` channels, always summed over results, samples and taps in this order."""
    block = FEW_BLOCK if C <= FEW else BLOCK
    P, blocks, size, (cells, at) = points.shape[1], -(-C // width), H * W, _room(points, block)
    flat, line, us, vs = _flat(points), d_images.reshape(1, d_images.size), cells[0], cells[1]
    spill = new_spill(size + W + 1, P * inputs, 4, width)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        high = min(low + width, C)
        clear(spill)
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, block):
                m = min(block, P - p)
                whole = _locate(flat, b // grids, p, m, H, W, pad, align, cells, at)
                if C <= FEW:
                    _send_for(line, image * C * size + low * ic, high - low, ic, ip, W, m, at)
                of = image * C * size, b * C * P + p * gp
                if _crowded(p, m, W, at, spill):
                    _one_by_one(p, m, low, high, *of, gc, gp, ic, ip, W, us, vs, at, grad, d_images, spill)
                else:
                    _all_at_once(m, low, high, *of, gc, gp, ic, ip, W, whole, us, vs, at, grad, d_images)
        add_spilled_planes(d_images, ic, high - low, spill)


@part
def _four(place, W):
    """The counter of a cell. Four neighbouring cells share one, so that the counters fit into the cache; each cell is still flushed
    as often as its share of the samples requires. The first cell starts one row and one pixel before the first pixel."""
    return np.uint64((place + W + 1) >> 2)


@part
def _crowded(p, m, W, at, spill):
    """Count one in COUNTED samples. If that would fill a cell's block, undo it and return True: the caller adds them one by one."""
    hits, seen = spill[0], np.uint8(0)
    for step in (1, 255):  # adding 255 undoes the count
        for first in range(0, m, COUNTED):
            i = first + hash16(p + first)
            if i < m and at[1, i]:
                cell = _four(at[0, i], W)
                hits[cell] = np.uint8(hits[cell] + np.uint8(step))
                seen |= hits[cell]
        if not seen & np.uint8(FULL):  # a count may wrap around to zero, but only after this bit was set
            return False
    return True


@called_part
def _all_at_once(m, low, high, target, source, gc, gp, ic, ip, W, whole, us, vs, at, grad, d_images):
    """Add samples to their pixels, channel by channel; `whole`: all pixels of all samples exist, so none needs a test."""
    places, bits, one = at[0], at[1], us.dtype.type(1)
    step, right, below = np.uint64(gp), np.uint64(ip), np.uint64(W * ip)
    for c in range(low, high):
        first = np.uint64(source + c * gc)
        if whole:
            for i in range(m):
                u1, g = us[i], grad[first + np.uint64(i) * step]
                u0, top, bottom = one - u1, (one - vs[i]) * g, vs[i] * g
                j = np.uint64(target + c * ic + places[i] * ip)
                k = j + below
                d_images[j] += u0 * top
                d_images[j + right] += u1 * top
                d_images[k] += u0 * bottom
                d_images[k + right] += u1 * bottom
        else:
            for i in range(m):
                u1, g = us[i], grad[first + np.uint64(i) * step]
                u0, top, bottom = one - u1, (one - vs[i]) * g, vs[i] * g
                j = np.uint64(target + c * ic + places[i] * ip)
                k = j + below
                if bits[i] & 1:
                    d_images[j] += u0 * top
                if bits[i] & 2:
                    d_images[j + right] += u1 * top
                if bits[i] & 4:
                    d_images[k] += u0 * bottom
                if bits[i] & 8:
                    d_images[k + right] += u1 * bottom


@called_part
def _one_by_one(p, m, low, high, target, source, gc, gp, ic, ip, W, us, vs, at, grad, d_images, spill):
    """Add samples to their pixels one by one, in all channels, because some cell's block becomes full on the way."""
    places, bits, one, counted = at[0], at[1], us.dtype.type(1), 0
    for i in range(m):
        if i % COUNTED == 0:
            counted = i + hash16(p + i)
        for c in range(low, high if bits[i] else low):
            g, j = grad[source + c * gc + i * gp], target + c * ic + places[i] * ip
            top, bottom = (one - vs[i]) * g, vs[i] * g
            if bits[i] & 1:
                d_images[j] += (one - us[i]) * top
            if bits[i] & 2:
                d_images[j + ip] += us[i] * top
            if bits[i] & 4:
                d_images[j + W * ip] += (one - us[i]) * bottom
            if bits[i] & 8:
                d_images[j + W * ip + ip] += us[i] * bottom
        if i == counted and bits[i] and block_full(_four(places[i], W), FULL, spill):
            for j in range(4):
                if bits[i] >> j & 1:
                    pixel = places[i] + j // 2 * W + j % 2
                    flush_planes(pixel, d_images, target + low * ic + pixel * ip, ic, high - low, spill)


@jit
def few_forward(start, stop, block, C, H, W, inputs, grids, pad, align, images, ic, ip, points, out):
    """The same for a few channels that are contiguous, in images and out."""
    P, one, (cells, at), weight = (
        points.shape[1],
        spread(points.dtype.type(1)),
        _room(points, block),
        np.empty((4, block), points.dtype),
    )
    blocks, pixels, results = -(-P // block), images.reshape(images.size // C, C), out.reshape(out.size // C, C)
    flat, line = _flat(points), images.reshape(1, images.size)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m, first = min(block, P - p), b // inputs * H * W
        _locate(flat, b // grids, p, m, H, W, pad, align, cells, at)
        _send_for(line, first * C, 1, ic, ip, W, m, at)
        for i in range(0, m, LANES):
            u, v = load(cells, 0, i, block), load(cells, 1, i, block)
            store((one - v) * (one - u), weight, 0, i)
            store((one - v) * u, weight, 1, i)
            store(v * (one - u), weight, 2, i)
            store(v * u, weight, 3, i)
        for i in range(m):
            for c in range(0, C, 4):
                c00, c01, c10, c11 = _pixels(pixels, first + at[0, i], W, c, C, at[1, i])
                value = fma(weight[0, i], c00, fma(weight[1, i], c01, fma(weight[2, i], c10, weight[3, i] * c11)))
                store_some(value, results, b * P + p + i, c, C)


@jit
def few_dots(start, stop, block, C, H, W, inputs, grids, pad, align, images, ic, ip, grad, gc, points, d_grid):
    P, zero, one, (cells, at) = points.shape[1], points.dtype.type(0), points.dtype.type(1), _room(points, block)
    blocks, pixels = -(-P // block), images.reshape(images.size // C, C)
    flat, line, d_flat = _flat(points), images.reshape(1, images.size), _flat(d_grid)
    given = grad.reshape(grad.size // C, C) if gc == 1 else np.empty((block, C), points.dtype)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m, first, row = min(block, P - p), b // inputs * H * W, b * P + p if gc == 1 else 0
        _locate(flat, b // grids, p, m, H, W, pad, align, cells, at)
        _send_for(line, first * C, 1, ic, ip, W, m, at)
        if gc > 1:  # transpose planes
            for c in range(C):
                source = np.uint64(b * C * P + c * gc + p)
                for i in range(m):
                    given[i, c] = grad[source + np.uint64(i)]
        for i in range(m):
            u, v, bits, d_x, d_y = cells[0, i], cells[1, i], at[1, i], zero, zero
            for c in range(0, C, 4):
                c00, c01, c10, c11 = _pixels(pixels, first + at[0, i], W, c, C, bits)
                g = load_four(given, row + i, c, C if bits else 0)  # a sample that sees nothing may have any gradient, even NaN
                d_x += total(g * fma(one - v, c01 - c00, v * (c11 - c10)))
                d_y += total(g * fma(one - u, c10 - c00, u * (c11 - c01)))
            cells[4, i], cells[5, i] = d_x, d_y
        _hand_over(d_flat, b, p, m, cells)


@array_part
def _flat(points):
    """Alternating x and y, one row per batch entry."""
    return points.reshape(points.shape[0], 2 * points.shape[1])


@array_part
def _room(points, block):
    """Buffers for a block of samples: position in the cell, its derivatives in the coordinates, and the coordinates' gradient; the
    cell's first pixel, and which of its four pixels exist, as bits."""
    return np.empty((6, block), points.dtype), np.empty((2, block), np.int32)


@exact_part
def _locate(flat, b, p, m, H, W, pad, align, cells, at):
    """Fill all buffers but the gradient, for samples from `p` on; returns whether all their pixels exist. Bits 1, 2, 4 and 8 stand
    for the four pixels, from the first to the last. Lanes beyond the last sample read as (0, 0), the middle of the image."""
    end, lacking = flat.shape[1], 0
    for i in range(0, m, LANES):
        x, y = unzip(load(flat, b, 2 * (p + i), end), load(flat, b, 2 * (p + i) + LANES, end))
        x, of_x = place(x, W, 2, pad, align)
        y, of_y = place(y, H, 2, pad, align)
        left, above = floor(x), floor(y)
        column, row = cast(left, np.int32), cast(above, np.int32)
        before, after = where((column >= 0) & (column < W), 5, 0), where((column >= -1) & (column < W - 1), 10, 0)
        upper, lower = where((row >= 0) & (row < H), 3, 0), where((row >= -1) & (row < H - 1), 12, 0)
        has = (before | after) & (upper | lower)
        lacking += not everywhere(has == 15)
        store(x - left, cells, 0, i)
        store(y - above, cells, 1, i)
        store(of_x, cells, 2, i)
        store(of_y, cells, 3, i)
        store(row * W + column, at, 0, i)
        store(has, at, 1, i)
    return lacking == 0


@part
def _send_for(line, first, C, ic, ip, W, m, at):
    """Prefetch the pixels of every fourth sample: in a sheared image, no hardware prefetcher predicts them."""
    for i in range(0, m, 4):
        for c in range(C):
            prefetch(line, 0, first + c * ic + at[0, i] * ip)
            prefetch(line, 0, first + c * ic + (at[0, i] + W) * ip)


@exact_part
def _corners(images, first, size, W, at, has, whole):
    """The four pixels of each cell, zero where one is absent."""
    if whole:
        c00, c01 = pairs(images, first, at)
        c10, c11 = pairs(images, first + W, at)
    else:
        c00, c01 = _edge(images, first, size, at, has & 1 == 1, has & 2 == 2)
        c10, c11 = _edge(images, first, size, at + W, has & 4 == 4, has & 8 == 8)
    return c00, c01, c10, c11


@exact_part
def _edge(images, first, size, at, left, right):
    """Two neighbours, one or both of which may be absent. Nothing before the first pixel or after the last one is read."""
    near = where(at < 0, 0, where(at > size - 2, size - 2, at))
    a, b = pairs(images, first, near)
    return where(left, where(at > near, b, a), 0), where(right, where(at < near, a, b), 0)


@exact_part
def _pixels(pixels, first, W, c, C, bits):
    """Channels from `c` on of the four pixels of a cell, zero where one is absent."""
    if bits == 15:
        c00, c01 = load_four(pixels, first, c, C), load_four(pixels, first + 1, c, C)
        c10, c11 = load_four(pixels, first + W, c, C), load_four(pixels, first + W + 1, c, C)
    else:
        c00, c01 = load_four(pixels, first, c, C if bits & 1 else 0), load_four(pixels, first + 1, c, C if bits & 2 else 0)
        c10, c11 = load_four(pixels, first + W, c, C if bits & 4 else 0), load_four(pixels, first + W + 1, c, C if bits & 8 else 0)
    return c00, c01, c10, c11


@part
def _hand_over(d_flat, b, p, m, cells):
    """Store the gradients of samples from `p` on, alternating x and y."""
    end, block = d_flat.shape[1], cells.shape[1]
    for i in range(0, m, LANES):
        d_x, d_y = load(cells, 4, i, block) * load(cells, 2, i, block), load(cells, 5, i, block) * load(cells, 3, i, block)
        first, second = zipped(d_x, d_y)
        store_some(first, d_flat, b, 2 * (p + i), end)
        store_some(second, d_flat, b, 2 * (p + i) + LANES, end)
