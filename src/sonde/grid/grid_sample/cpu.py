"""``grid_sample`` on CPUs: taps of a block of samples first, then all channels.

Contiguous images are read plane by plane, with single loads (a machine's gathers are no faster where they had to be mended);
channels-last images pixel by pixel, sixteen channels at a time. Bilinear samples of planes, and of a few channels, have kernels of
their own. A gradient of the input belongs to one thread per image and block of channels, so that no bit depends on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import array, array_part, exact_part, jit, part, run
from ...op.dtypes import accumulator
from ...op.lanes import LANES, fma, load, spread, store, total
from ...op.layout import memory_format
from ...op.memory import dense, empty, zeros
from ...op.plan import Determinism, Kernel
from .._scatter.cpu_sums import BLOCK as TERMS
from .._scatter.cpu_sums import LENGTH, clear, crowd_of, crowded, flush, flush_planes, hits_of, met, settle, settle_planes
from .cpu_bilinear import FEW, FEW_BLOCK, bilinear_dots, bilinear_forward, bilinear_scatter, few_dots, few_forward
from .cpu_taps import BLOCK, axis
from .reference import joint_batch

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
TAPS = (2, 1, 4)  # of each mode, along an axis
FEW_TERMS = 16  # of the products with each tap, of which a gradient is a small difference


def forward(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    wide, B, C = accumulator(input, grid), joint_batch(input, grid), input.shape[1]
    out = empty((B, C, *grid.shape[1:-1]), wide, memory_format(input, True))
    how, points = _how(input, grid, mode, padding_mode, align_corners), _points(grid, wide)
    if out.numel():
        view, (kernel, _, _) = _by(input, mode)
        run(kernel, *_blocks(B, points, input, mode), *how, *view(input, wide), points, *view(out, wide))
    return out.to(input.dtype)


def backward(
    grad: Tensor, input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *,
    needs: Sequence[bool], deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    wide, B = accumulator(input, grid), joint_batch(input, grid)
    how, points = _how(input, grid, mode, padding_mode, align_corners), _points(grid, wide)
    view, (_, scatter, dots) = _by(input, mode)
    something = grad.numel() and input.numel()
    given = view(grad, wide) if something else ()
    found = []
    if needs[0]:
        d_input = zeros(input.shape, wide, memory_format(input, True))
        if something:
            items, width = _channels(input)
            run(scatter, items, width, *how, *given, points, *view(d_input, wide), slices_per_thread=1)
        found.append(d_input.to(input.dtype))
        del d_input
    if needs[1]:
        filled = something and _bilinear(input, mode)  # by the kernel
        d_grid = (empty if filled else zeros)((B, *points.shape[1:]), wide)
        if something and mode != "nearest":
            run(dots, *_blocks(B, points, input, mode), *how, *view(input, wide), *given, points, array(d_grid))
        if grid.shape[0] != B:
            d_grid = d_grid.view(grid.shape[0], -1 if grid.numel() else 0, *points.shape[1:]).sum(1)
        found.append(d_grid.view(grid.shape).to(grid.dtype))
    return found


def plan(
    input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *, needs: Sequence[bool], deterministic: bool
) -> list[Kernel]:
    """What the two above launch and allocate."""
    wide, B, C = accumulator(input, grid), joint_batch(input, grid), input.shape[1]
    last, samples, names = _last(input), B * prod(grid.shape[1:-1]), [kernel.__name__ for kernel in _by(input, mode)[1]]
    copies = 0 if grid.dtype == wide and grid.is_contiguous() else grid.numel()
    dense = input.is_contiguous() or memory_format(input, True) != torch.contiguous_format
    image = 0 if input.dtype == wide and dense else input.numel()
    half = input.dtype != wide

    def kernel(name: str, writes: str, elements: int, phase: Any = "backward") -> Kernel:
        promise = Determinism.BATCH_INVARIANT
        if writes == "grid" and grid.shape[0] != B:
            promise = Determinism.RUN_TO_RUN
        return Kernel(name, (writes,), wide, promise, elements * wide.itemsize, phase)

    found = [kernel(names[0], "out", copies + image + half * samples * C, "forward")]
    copies += (half or last) * samples * C  # of the result's gradient, whatever its layout
    if needs[0]:
        found.append(kernel(names[1], "input", copies + half * input.numel()))
    if needs[1]:
        again = grid.dtype != wide or grid.shape[0] != B
        left = needs[0] and half and input.numel()  # the other gradient before it was rounded: a thread may not have let go of it
        found.append(kernel(names[2], "grid", copies + image + left + again * samples * grid.shape[-1]))
    return found


def _by(input: Tensor, mode: str) -> tuple[Callable, tuple[Callable, Callable, Callable]]:
    """How kernels see images, and which they are: for the value, for the gradient of the input and for that of the grid."""
    if _last(input):
        return _pixels, (pixels_forward, pixels_scatter, pixels_dots)
    if _bilinear(input, mode):
        few = memory_format(input, True) != torch.contiguous_format
        return _planes, (few_forward, bilinear_scatter, few_dots) if few else (bilinear_forward, bilinear_scatter, bilinear_dots)
    return _planes, (planes_forward, planes_scatter, planes_dots)


def _bilinear(input: Tensor, mode: str) -> bool:
    """Whether lanes are samples: they find pixels by 32 bits, two at a time."""
    return mode == "bilinear" and input.ndim == 4 and 2 <= prod(input.shape[2:]) < 2**31 and not _last(input)


def _last(input: Tensor) -> bool:
    """Whether kernels go through channels: where they are neighbours, and enough of them to fill a vector."""
    return memory_format(input, True) != torch.contiguous_format and input.shape[1] > LANES // 2


def _how(input: Tensor, grid: Tensor, mode: str, padding: str, align: bool) -> tuple:
    B, size = joint_batch(input, grid), (1, *input.shape[2:])[-3:]
    groups = B // max(1, input.shape[0]), B // max(1, grid.shape[0])
    return input.shape[1], *size, *groups, input.ndim - 2, TAPS[MODES.index(mode)], PADDINGS.index(padding), align


def _points(grid: Tensor, wide: torch.dtype) -> Any:
    """``[B, samples, 2 or 3]``."""
    return array(dense(grid, wide).view(grid.shape[0], prod(grid.shape[1:-1]), grid.shape[-1]))


def _planes(x: Tensor, wide: torch.dtype) -> tuple[Any, int, int]:
    """The memory of `x`, and how far channels and pixels are apart; a copy where it is neither contiguous nor channels-last."""
    if memory_format(x, True) != torch.contiguous_format:
        return array(dense(x.movedim(1, -1), wide).view(-1)), 1, x.shape[1]
    return array(dense(x, wide).view(-1)), prod(x.shape[2:]), 1


def _pixels(x: Tensor, wide: torch.dtype) -> tuple[Any]:
    """``[B·pixels, C]``, a view where `x` is channels-last."""
    return (array(dense(x.movedim(1, -1), wide).view(x.shape[0] * prod(x.shape[2:]), x.shape[1])),)


def _blocks(B: int, points: Any, input: Tensor, mode: str) -> tuple[int, int]:
    """How many blocks of samples there are, all of one result each, and how large they are; no bit depends on it."""
    P, all_threads = points.shape[1], 8 * torch.get_num_threads()
    block = (
        FEW_BLOCK
        if _bilinear(input, mode) and input.shape[1] <= FEW
        else min(BLOCK, max(4 * LANES, -(-B * P // (all_threads * LANES)) * LANES))
    )
    return B * -(-P // block), block


def _channels(input: Tensor) -> tuple[int, int]:
    """Into how many blocks images and channels are cut, and how many channels a block has; no bit depends on it."""
    n, C, least = input.shape[0], input.shape[1], LANES if _last(input) else 1
    blocks = min(-(-2 * torch.get_num_threads() // n), -(-C // least))
    width = -(-C // (blocks * least)) * least
    return n * -(-C // width), width


# ---- kernels ----------------------------------------------------------------------------------------------------------------
#
# C channels, Z·H·W pixels; `inputs` results share an input and `grids` a grid; `taps` along each of `dim` axes


@jit
def planes_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, points, out, oc, op):
    """Values of blocks `start` to `stop` of samples; channels of images and out are `ic` and `oc` apart, pixels `ip` and `op`."""
    P, K = points.shape[1], taps**dim
    blocks, size, zero = -(-P // block), Z * H * W, points.dtype.type(0)
    index, weight, slope, lines, cell = _scratch(block, dim, taps, 0, 0, points)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
        for c in range(C):  # plane by plane: it stays in the cache
            source, target = b // inputs * C * size + c * ic, b * C * P + c * oc + p * op
            for i in range(m):
                out[target + i * op] = weight[0, i] * images[source + index[0, i] * ip] if index[0, i] >= 0 else zero
            for k in range(1, K):
                for i in range(m):
                    if index[k, i] >= 0:
                        out[target + i * op] += weight[k, i] * images[source + index[k, i] * ip]


@jit
def planes_dots(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, ic, ip, grad, gc, gp, points, d_grid):
    """The gradient of the grid of blocks `start` to `stop` of samples."""
    P, K = points.shape[1], taps**dim
    blocks, size = -(-P // block), Z * H * W
    index, weight, slope, lines, cell = _scratch(block, dim, taps, 1, 0, points)
    dot, whole = np.empty((K, block), points.dtype), np.empty((K, block if C > TERMS else 0), np.float64)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
        dot[:], whole[:] = 0, 0
        for c in range(C):
            source, target = b // inputs * C * size + c * ic, b * C * P + c * gc + p * gp
            for k in range(K):
                for i in range(m):
                    if index[k, i] >= 0:
                        dot[k, i] += grad[target + i * gp] * images[source + index[k, i] * ip]
            if C > TERMS and (c % FEW_TERMS == FEW_TERMS - 1 or c == C - 1):
                for k in range(K):
                    for i in range(m):
                        whole[k, i] += dot[k, i]
                        dot[k, i] = whole[k, i] if c == C - 1 else 0
        for d in range(dim):
            for k in range(K):
                for i in range(m):
                    if index[k, i] >= 0:
                        d_grid[b, p + i, d] += slope[d * K + k, i] * dot[k, i]


@jit
def planes_scatter(start, stop, width, C, Z, H, W, inputs, grids, dim, taps, pad, align, grad, gc, gp, points, d_images, ic, ip):
    """The gradient of images in blocks of `width` channels, summed over results, samples and taps in this order always."""
    P, K, blocks, size = points.shape[1], taps**dim, -(-C // width), Z * H * W
    index, weight, slope, lines, cell = _scratch(BLOCK, dim, taps, 0, 1, points)
    keys, most = np.empty(BLOCK, np.int32), hits_of(K)
    crowd = crowd_of(_cells(Z, H, W, dim), P * inputs, K, width)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        high = min(low + width, C)
        clear(crowd)
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, BLOCK):
                m = min(BLOCK, P - p)
                _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
                _number(m, Z, H, W, dim, taps, index, cell, keys)
                if crowded(m, keys, most, crowd):
                    of = image * C * size, b * C * P + p * gp
                    _one_by_one(m, low, high, *of, gc, gp, ic, ip, most, index, weight, keys, grad, d_images, crowd)
                    continue
                for c in range(low, high):
                    source, target = b * C * P + c * gc + p * gp, image * C * size + c * ic
                    for k in range(K):
                        for i in range(m):
                            if index[k, i] >= 0:
                                d_images[target + index[k, i] * ip] += weight[k, i] * grad[source + i * gp]
        settle_planes(d_images, ic, high - low, crowd)


@array_part
def _one_by_one(m, low, high, target, source, gc, gp, ic, ip, most, index, weight, keys, grad, d_images, crowd):
    """What samples add to their pixels, in all channels, where some cell's block becomes full."""
    K = index.shape[0]
    for i in range(m):
        for k in range(K):
            for c in range(low, high if index[k, i] >= 0 else low):
                d_images[target + c * ic + index[k, i] * ip] += weight[k, i] * grad[source + c * gc + i * gp]
        if met(keys[i], most, crowd):
            for k in range(K):
                p = index[k, i]
                if p >= 0:
                    flush_planes(p, d_images, target + low * ic + p * ip, ic, high - low, crowd)


@jit
def pixels_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, points, out):
    """The same of images [B/inputs·pixels, C] → out [B·P, C]."""
    P, K = points.shape[1], taps**dim
    blocks = -(-P // block)
    index, weight, slope, lines, cell = _scratch(block, dim, taps, 0, 0, points)
    tail = np.empty((1, LANES), points.dtype)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
        first = b // inputs * Z * H * W
        for i in range(m):
            target = b * P + p + i
            for c in range(0, C, LANES):
                v = spread(points.dtype.type(0))
                for k in range(K):
                    if index[k, i] >= 0:
                        v = fma(weight[k, i], load(images, first + index[k, i], c, C), v)
                if c + LANES <= C:
                    store(v, out, target, c)
                else:
                    store(v, tail, 0, 0)
                    for j in range(C - c):
                        out[target, c + j] = tail[0, j]


@jit
def pixels_dots(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, grad, points, d_grid):
    P, K = points.shape[1], taps**dim
    blocks = -(-P // block)
    index, weight, slope, lines, cell = _scratch(block, dim, taps, 1, 0, points)
    for n in range(start, stop):
        b, p = n // blocks, n % blocks * block
        m = min(block, P - p)
        _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
        first = b // inputs * Z * H * W
        for i in range(m):
            target = b * P + p + i
            for k in range(K):
                if index[k, i] >= 0:
                    dot = 0.0
                    for begin in range(0, C, LENGTH):
                        v = spread(points.dtype.type(0))
                        for c in range(begin, min(begin + LENGTH, C), LANES):
                            v = fma(load(grad, target, c, C), load(images, first + index[k, i], c, C), v)
                        dot += total(v)
                    for d in range(dim):
                        d_grid[b, p + i, d] += slope[d * K + k, i] * dot


@jit
def pixels_scatter(start, stop, width, C, Z, H, W, inputs, grids, dim, taps, pad, align, grad, points, d_images):
    P, K, blocks = points.shape[1], taps**dim, -(-C // width)
    index, weight, slope, lines, cell = _scratch(BLOCK, dim, taps, 0, 1, points)
    keys, most, flat = np.empty(BLOCK, np.int32), hits_of(K), d_images.reshape(1, d_images.size)
    crowd = crowd_of(_cells(Z, H, W, dim), P * inputs, K, width)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        high, first = min(low + width, C), image * Z * H * W
        clear(crowd)
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, BLOCK):
                m = min(BLOCK, P - p)
                _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
                _number(m, Z, H, W, dim, taps, index, cell, keys)
                for i in range(m):
                    source = b * P + p + i
                    for k in range(K):
                        target = first + index[k, i]
                        if index[k, i] >= 0:
                            w = weight[k, i]
                            for c in range(low, high, LANES):
                                if c + LANES <= high:
                                    store(fma(w, load(grad, source, c, C), load(d_images, target, c, C)), d_images, target, c)
                                else:
                                    for j in range(c, high):
                                        d_images[target, j] += w * grad[source, j]
                    if met(keys[i], most, crowd):
                        for k in range(K):
                            if index[k, i] >= 0:
                                at = (first + index[k, i]) * C
                                flush(index[k, i], flat, at + low, at + high, crowd)
        settle(flat, high - low, crowd)


# ---- taps -------------------------------------------------------------------------------------------------------------------


@array_part
def _scratch(room, dim, taps, slopes, count, points):
    """Room for the taps of a block: which pixel (−1: none), its weight, the weight's derivatives; the same of each axis; and, if
    samples are counted, the cells along each axis."""
    real, K = points.dtype, taps**dim
    return (
        np.empty((K, room), np.int32),
        np.empty((K, room), real),
        np.empty((slopes * dim * K, room), real),
        (np.empty((dim * taps, room), np.int32), np.empty((dim * taps, room), real), np.empty((dim * taps, room), real)),
        np.empty((count * dim, room), np.int32),
    )


@part
def _cells(Z, H, W, dim):
    """How many there are, with one for samples that see nothing; taps reach two pixels beyond the image."""
    return (Z + 4 if dim == 3 else 1) * (H + 4) * (W + 4) + 1


@part
def _number(m, Z, H, W, dim, taps, index, cell, keys):
    """The numbers of samples' cells; the last is that of those that see nothing."""
    last = _cells(Z, H, W, dim) - 1
    for i in range(m):
        if taps == 1:
            keys[i] = index[0, i] if index[0, i] >= 0 else last
        else:
            x, y, z = cell[0, i] + 2, cell[1, i] + 2, cell[2, i] + 2 if dim == 3 else 0
            keys[i] = (z * (H + 4) + y) * (W + 4) + x if x >= 0 and y >= 0 and z >= 0 else last


@exact_part
def _locate(points, b, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell):
    """Fill the taps of samples `p` to `p + m`."""
    at, part_of, rate = lines
    K, real = index.shape[0], points.dtype.type
    for d in range(dim):  # x, y, z
        axis(points, b, p, m, d, W if d == 0 else H if d == 1 else Z, taps, pad, align, at, part_of, rate, cell)
    for k in range(K):
        x, y, z = k % taps, taps + k // taps % taps, 2 * taps + k // (taps * taps)
        if dim == 2:
            for i in range(m):
                inside = at[x, i] >= 0 and at[y, i] >= 0
                index[k, i] = at[y, i] * W + at[x, i] if inside else -1
                weight[k, i] = part_of[y, i] * part_of[x, i]
        else:
            for i in range(m):
                inside = at[x, i] >= 0 and at[y, i] >= 0 and at[z, i] >= 0
                index[k, i] = (at[z, i] * H + at[y, i]) * W + at[x, i] if inside else -1
                weight[k, i] = part_of[z, i] * part_of[y, i] * part_of[x, i]
        if slope.shape[0] > 0:
            for i in range(m):
                above = part_of[z, i] if dim == 3 else real(1)
                slope[k, i] = above * part_of[y, i] * rate[x, i]
                slope[K + k, i] = above * rate[y, i] * part_of[x, i]
                if dim == 3:
                    slope[2 * K + k, i] = rate[z, i] * part_of[y, i] * part_of[x, i]
