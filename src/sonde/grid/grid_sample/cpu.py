"""``grid_sample`` on CPUs: first the taps of a block of samples, then all channels.

Contiguous images are read plane by plane, with scalar loads (gather instructions are no faster on CPUs with microcode fixes for
them); channels-last images pixel by pixel, sixteen channels at a time. Bilinear samples of planes, and of a few channels, have
kernels of their own. One thread sums the input's gradient of an image and block of channels, so that no bit depends on the number
of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import array_part, exact_part, jit, part
from ...op.cpu_steps import Array, CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.layout import memory_format, outline
from ...op.plan import Determinism
from ...op.simd import LANES, fma, load, spread, store, total
from .._scatter.cpu_sums import BLOCK as TERMS
from .._scatter.cpu_sums import (
    LENGTH,
    add_spilled,
    add_spilled_planes,
    any_block_full,
    block_full,
    block_hits,
    clear,
    flush,
    flush_planes,
    new_spill,
    spill_bytes,
)
from .cpu_bilinear import FEW, FEW_BLOCK, bilinear_dots, bilinear_forward, bilinear_scatter, few_dots, few_forward
from .cpu_taps import BLOCK, axis
from .reference import joint_batch

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
TAPS = (2, 1, 4)  # taps along an axis, for each mode
FEW_TERMS = 16  # terms per block of the dot products with each tap: fewer, since a gradient is a small difference of them


@by_threads
def forward_pass(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Pass:
    wide, (B, P, _) = accumulator(input, grid), _points(input, grid)
    p, how = CpuPass(wide, dict(input=input, grid=grid)), _how(input, grid, mode, padding_mode, align_corners)
    result = outline((B, input.shape[1], *grid.shape[1:-1]), memory_format=memory_format(input, True))
    out = p.buffer("out", result, wide)
    items, block = _blocks(B, P, input, mode, p.threads) if result.numel() else (0, 1)
    images, points = _images(p, "input", input), Array(p.dense("grid", wide), (grid.shape[0], P, grid.shape[-1]))
    if _last(input):
        p.run(pixels_forward, items, [block, *how, images, points, _pixels(out, result)], writes=["out"])
    elif _bilinear(input, mode):
        kernel = few_forward if _is_channels_last(input) else bilinear_forward
        p.run(kernel, items, [block, *how, images, *_strides(input), points, _flat(out, result)], writes=["out"])
    else:
        args = block, *how, images, *_strides(input), points, _flat(out, result), *_strides(result)
        p.run(planes_forward, items, args, writes=["out"])
    return p.returns(p.rounded(out, result.shape, input.dtype)).returning_one()


@by_threads
def backward_pass(
    grad: Tensor, input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool, *,
    needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    wide, how = accumulator(input, grid), _how(input, grid, mode, padding_mode, align_corners)
    p, P = CpuPass(wide, dict(grad=grad, input=input, grid=grid)), prod(grid.shape[1:-1])
    points = Array(p.dense("grid", wide), (grid.shape[0], P, grid.shape[-1]))
    given: tuple[Any, ...] = _images(p, "grad", input), *(() if _last(input) else _strides(grad))
    found = []
    if needs[0]:
        found.append(_add_scatter(p, input, how, given, points, mode, bool(grad.numel())))
    if needs[1]:
        found.append(_add_dots(p, input, grid, how, given, points, mode, bool(grad.numel())))
    return p.returns(*found)


def _add_scatter(p: CpuPass, input: Tensor, how: Sequence, given: Sequence, points: Array, mode: str, something: bool) -> str:
    like = outline(input.shape, memory_format=memory_format(input, True))
    d_input = p.buffer("d_input", like, p.accumulator, fill=0)
    items, width = _channels(input, p.threads) if something and input.numel() else (0, 1)
    results: tuple[Any, ...]
    kernel, results = bilinear_scatter if _bilinear(input, mode) else planes_scatter, (_flat(d_input, like), *_strides(like))
    if _last(input):
        kernel, results = pixels_scatter, (_pixels(d_input, like),)
    own = spill_bytes(prod(n + 4 for n in input.shape[2:]) + 1)  # cells reach two pixels beyond the image, as taps do
    p.run(kernel, items, [width, *how, *given, points, *results], slices_per_thread=1, writes=["input"], scratch=own)
    return p.rounded(d_input, input.shape, input.dtype)


def _add_dots(
    p: CpuPass, input: Tensor, grid: Tensor, how: Sequence, given: Sequence, points: Array, mode: str, something: bool
) -> str:  # fmt: skip
    (B, P, dim), bilinear = _points(input, grid), _bilinear(input, mode)
    shape, shared = (B, *grid.shape[1:]), grid.shape[0] != B
    if mode == "nearest":
        d_grid = p.buffer("d_grid", grid.shape, grid.dtype)
        p.call("torch.zero_", Tensor.zero_, [d_grid], writes=["grid"])
        return d_grid
    something = something and bool(input.numel())
    d_grid = p.buffer("d_grid", shape, p.accumulator, fill=None if something and bilinear else 0)  # that kernel fills it
    items, block = _blocks(B, P, input, mode, p.threads) if something else (0, 1)
    images, found = _images(p, "input", input), Array(d_grid, (B, P, dim))
    if _last(input):
        kernel, args = pixels_dots, [images, *given]
    elif bilinear and _is_channels_last(input):
        kernel, args = few_dots, [images, *_strides(input), *given[:2]]
    else:
        kernel, args = bilinear_dots if bilinear else planes_dots, [images, *_strides(input), *given]
    p.run(kernel, items, [block, *how, *args, points, found], writes=[] if shared else ["grid"])
    if shared:  # several results share a grid

        def total(x: Tensor) -> Tensor:
            return x.view(grid.shape[0], -1 if grid.numel() else 0, *grid.shape[1:]).sum(1)

        gives = [("d_grid", grid.shape, p.accumulator)]
        (d_grid,) = p.call("torch.sum", total, [d_grid], gives, writes=["grid"], promise=Determinism.RUN_TO_RUN)
    return p.rounded(d_grid, grid.shape, grid.dtype)


def _bilinear(input: Tensor, mode: str) -> bool:
    """Whether SIMD lanes hold samples: they load two pixels at a time, at 32-bit offsets."""
    return mode == "bilinear" and input.ndim == 4 and 2 <= prod(input.shape[2:]) < 2**31 and not _last(input)


def _last(input: Tensor) -> bool:
    """Whether SIMD lanes hold channels: these must be contiguous, and fill more than half a vector."""
    return _is_channels_last(input) and input.shape[1] > LANES // 2


def _is_channels_last(x: Tensor) -> bool:
    return memory_format(x, True) != torch.contiguous_format


def _how(input: Tensor, grid: Tensor, mode: str, padding: str, align: bool) -> tuple:
    """The sizes and options that every kernel takes; for the bilinear ones, the numbers of axes and taps are fixed."""
    B, size = joint_batch(input, grid), (1, *input.shape[2:])[-3:]
    groups, options = (B // max(1, input.shape[0]), B // max(1, grid.shape[0])), (PADDINGS.index(padding), align)
    if _bilinear(input, mode):
        return input.shape[1], *size[1:], *groups, *options
    return input.shape[1], *size, *groups, input.ndim - 2, TAPS[MODES.index(mode)], *options


def _points(input: Tensor, grid: Tensor) -> tuple[int, int, int]:
    """The number of results, of samples per result, and of coordinates per sample."""
    return joint_batch(input, grid), prod(grid.shape[1:-1]), grid.shape[-1]


def _images(p: CpuPass, name: str, input: Tensor) -> Array:
    """An image argument in the layout that the kernels for `input` read; a copy if it has neither layout."""
    x = p.given[name]
    assert x is not None
    slot = p.dense(name, p.accumulator, _channels_to_end if _last(input) or _is_channels_last(x) else None)
    return _pixels(slot, x) if _last(input) else _flat(slot, x)


def _channels_to_end(x: Tensor) -> Tensor:
    return x.movedim(1, -1)


def _pixels(slot: str, like: Tensor) -> Array:
    return Array(slot, (like.shape[0] * prod(like.shape[2:]), like.shape[1]))


def _flat(slot: str, like: Tensor) -> Array:
    return Array(slot, (like.numel(),))


def _strides(x: Tensor) -> tuple[int, int]:
    """The strides of channels and of pixels."""
    return (1, x.shape[1]) if _is_channels_last(x) else (prod(x.shape[2:]), 1)


def _blocks(B: int, P: int, input: Tensor, mode: str, threads: int) -> tuple[int, int]:
    """The number of blocks of samples, each within one result, and their size; no bit depends on it."""
    block = (
        FEW_BLOCK
        if _bilinear(input, mode) and input.shape[1] <= FEW
        else min(BLOCK, max(4 * LANES, -(-B * P // (8 * threads * LANES)) * LANES))
    )
    return B * -(-P // block), block


def _channels(input: Tensor, threads: int) -> tuple[int, int]:
    """The number of blocks of channels, over all images, and the channels of a block; no bit depends on it."""
    n, C, least = input.shape[0], input.shape[1], LANES if _last(input) else 1
    blocks = min(-(-2 * threads // n), -(-C // least))
    width = -(-C // (blocks * least)) * least
    return n * -(-C // width), width


# ---- kernels ----------------------------------------------------------------------------------------------------------------
#
# C channels, Z·H·W pixels; `inputs` results share an input, `grids` results share a grid; `taps` along each of `dim` axes


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
        for c in range(C):  # plane by plane, so that a plane stays in the cache
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
    """The gradient of images in blocks of `width` channels, always summed over results, samples and taps in this order."""
    P, K, blocks, size = points.shape[1], taps**dim, -(-C // width), Z * H * W
    index, weight, slope, lines, cell = _scratch(BLOCK, dim, taps, 0, 1, points)
    keys, most = np.empty(BLOCK, np.int32), block_hits(K)
    spill = new_spill(_cells(Z, H, W, dim), P * inputs, K, width)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        high = min(low + width, C)
        clear(spill)
        for b in range(image * inputs, (image + 1) * inputs):
            for p in range(0, P, BLOCK):
                m = min(BLOCK, P - p)
                _locate(points, b // grids, p, m, Z, H, W, dim, taps, pad, align, index, weight, slope, lines, cell)
                _number(m, Z, H, W, dim, taps, index, cell, keys)
                if any_block_full(m, keys, most, spill):
                    of = image * C * size, b * C * P + p * gp
                    _one_by_one(m, low, high, *of, gc, gp, ic, ip, most, index, weight, keys, grad, d_images, spill)
                    continue
                for c in range(low, high):
                    source, target = b * C * P + c * gc + p * gp, image * C * size + c * ic
                    for k in range(K):
                        for i in range(m):
                            if index[k, i] >= 0:
                                d_images[target + index[k, i] * ip] += weight[k, i] * grad[source + i * gp]
        add_spilled_planes(d_images, ic, high - low, spill)


@array_part
def _one_by_one(m, low, high, target, source, gc, gp, ic, ip, most, index, weight, keys, grad, d_images, spill):
    """Add samples to their pixels one by one, in all channels, because some cell's block becomes full on the way."""
    K = index.shape[0]
    for i in range(m):
        for k in range(K):
            for c in range(low, high if index[k, i] >= 0 else low):
                d_images[target + c * ic + index[k, i] * ip] += weight[k, i] * grad[source + c * gc + i * gp]
        if block_full(keys[i], most, spill):
            for k in range(K):
                p = index[k, i]
                if p >= 0:
                    flush_planes(p, d_images, target + low * ic + p * ip, ic, high - low, spill)


@jit
def pixels_forward(start, stop, block, C, Z, H, W, inputs, grids, dim, taps, pad, align, images, points, out):
    """The same for channels-last images [B/inputs·pixels, C] → out [B·P, C]."""
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
    keys, most, flat = np.empty(BLOCK, np.int32), block_hits(K), d_images.reshape(1, d_images.size)
    spill = new_spill(_cells(Z, H, W, dim), P * inputs, K, width)
    for n in range(start, stop):
        image, low = n // blocks, n % blocks * width
        high, first = min(low + width, C), image * Z * H * W
        clear(spill)
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
                    if block_full(keys[i], most, spill):
                        for k in range(K):
                            if index[k, i] >= 0:
                                at = (first + index[k, i]) * C
                                flush(index[k, i], flat, at + low, at + high, spill)
        add_spilled(flat, high - low, spill)


# ---- taps -------------------------------------------------------------------------------------------------------------------


@array_part
def _scratch(room, dim, taps, slopes, count, points):
    """Buffers for the taps of a block: pixel index (−1: none), weight, derivatives of the weight; the same for each axis; and, if
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
    """The number of cells, with one more for samples that see nothing; taps reach two pixels beyond the image."""
    return (Z + 4 if dim == 3 else 1) * (H + 4) * (W + 4) + 1


@part
def _number(m, Z, H, W, dim, taps, index, cell, keys):
    """Number the samples' cells; the last number is for samples that see nothing."""
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
