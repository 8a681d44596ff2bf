"""The kernels of ``grid_sample``: the problem a launch solves, its configurations, and its grid and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...jit.launch import Launch, accumulator, cdiv, power_of_2, vector_of
from .._device.axes import MODES, PADDINGS, TAPS
from .._device.fixed_point import FLOAT, digits

ENOUGH = 2048  # programs, enough to keep any device busy


class Problem(NamedTuple):
    """What a launch computes; ``Config`` says how. `last` to `out_vector` summarise the layouts, `of_*` are all strides."""

    mode: int
    padding: int
    align: bool
    dim: int
    C: int
    wide: torch.dtype
    wants_input: bool  # compute this gradient
    wants_grid: bool
    last: bool  # the input and its gradient are channels-last
    vector: int  # if so, C and all their other strides are multiples of this; else 1
    out: str  # the contiguous dimension of the result: "channels", "points" or "other"
    out_vector: int
    int64: bool  # 64-bit offsets
    stage: int  # of fixed-point accumulation
    points: int
    Z: int
    H: int
    W: int
    B: int
    inputs: int  # batch sizes of input and grid
    grids: int
    of_input: tuple[int, ...]  # strides: b, c, z, y, x
    of_grid: tuple[int, ...]  # b, point, coordinate
    of_out: tuple[int, ...]  # b, c, point of the result, or of its gradient
    of_gradient: tuple[int, ...]  # as of_input


SIZES = ("points", "Z", "H", "W")
BATCH = ("B", "inputs", "grids", "of_input", "of_grid", "of_out", "of_gradient")


def problem(
    shape: Sequence[int], itemsize: int, flat: Tensor, wide: torch.dtype, options: tuple[str, str, bool], of_out: Sequence[int],
    of_input: Sequence[int] | None = None, of_gradient: Sequence[int] | None = None, wants_grid: bool = False, int64: bool = False,
    stage: int = FLOAT,
) -> Problem:  # fmt: skip
    """The problem of an input of this shape and a grid ``[B, points, coordinates]``; strides of unused tensors are None."""
    (n, C, *size), (grids, points, dim) = shape, flat.shape
    B, most, (Z, H, W) = max(n, grids) if n and grids else 0, 16 // itemsize, (1, *size)[-3:]
    strides = [s for s in (of_input, of_gradient) if s is not None]
    spans = [sum(m * s for m, s in zip((C, *size), of[1:])) for of in strides]
    spans += [C * of_out[1] + points * of_out[2], points * flat.stride(1) + dim * flat.stride(2)]
    last = C > 1 and all(of[1] == 1 for of in strides)
    vector = vector_of(most, C, *[s for of in strides for s in (of[0], *of[2:])]) if last else 1
    last = last and (vector > 1 or C >= 8)  # a few channels that fill no vector are read one by one, one pixel per thread
    out = "channels" if of_out[1] == 1 and C > 1 else "points" if of_out[2] == 1 else "other"
    along = dict(channels=(C, of_out[2]), points=(points, of_out[1]), other=(1,))[out]
    five = [(0,) * 5 if of is None else (*of[:2], *(0,) * (3 - dim), *of[2:]) for of in (of_input, of_gradient)]
    return Problem(
        MODES.index(options[0]), PADDINGS.index(options[1]), options[2], dim, C, wide, of_gradient is not None, wants_grid, last,
        vector, out, vector_of(most, of_out[0], *along), int64 or max(spans) >= 2**31 - 2**20, stage, points, Z, H, W, B, n, grids,
        five[0], flat.stride(), tuple(of_out), five[1],
    )  # fmt: skip


class Config(NamedTuple):
    block_p: int  # pixels of the result in a tile
    block_c: int  # channels in a tile
    tiles: int  # tiles of channels in flight together
    chunk: int  # channels of a program
    num_warps: int


def sample_config(p: Problem) -> Config:
    taps = TAPS[p.mode] ** p.dim
    return _config(p, 8 if taps <= 4 else 4)


def gradients_config(p: Problem) -> Config:
    taps = TAPS[p.mode] ** p.dim
    return _config(p, 2 if taps > 8 else 4)


def _config(p: Problem, each: int) -> Config:
    """Channels-last: a thread holds `each` elements of a few pixels. Otherwise: one pixel, channel by channel.

    The order of a sum over channels may depend on the number of points of a grid, never on the number of grids.
    """
    C, taps, warps = max(1, p.C), TAPS[p.mode] ** p.dim, 4
    if p.last and p.stage:  # atomics of single integers: adjacent threads hold adjacent channels
        block_c, warps, tiles = min(32, power_of_2(C)), 8, 1
        block_p = 32 * warps // block_c
    elif p.last:
        block_c = min(64 if p.vector <= 4 else 128, power_of_2(C))
        block_p, tiles = max(1, 32 * warps * each // block_c), 1
    else:
        # if there are few pixels, several threads share one and its sum over channels
        few = ENOUGH * 32 // max(1, p.points)
        block_c = max(1, min(8, power_of_2(C) // 4, power_of_2(few))) if p.wants_grid else 1
        block_p, tiles = 32 * warps // block_c, min(power_of_2(cdiv(C, block_c)), 4 if taps <= 4 else 1)
    chunk = C
    if not p.wants_grid:  # the sum over channels stays in one program
        blocks, step = p.B * cdiv(p.points, block_p), block_c * tiles
        while chunk > max(8, step) and blocks * cdiv(C, chunk) < ENOUGH:
            chunk = cdiv(chunk, 2 * step) * step
    return Config(block_p, block_c, tiles, chunk, warps)


def candidate_configs(default: Config, p: Problem) -> list[Config]:
    """The default, then others that differ from it in one or two respects, in that order."""
    if p.stage:
        return [default]
    C, around = max(1, p.C), (1, 2, 0.5)
    each = default.block_p * default.block_c // (32 * default.num_warps)
    wide = {int(default.block_c * f) for f in around} if p.last else {1, 2, 4, 8} if p.wants_grid else {1}
    options = [
        sorted({2, 4, 8} - {default.num_warps}),
        sorted({1, each // 2, 2 * each} - {0, each}),
        sorted(n for n in wide - {0, default.block_c} if n <= power_of_2(C)),
        sorted({1, 2 * default.tiles, default.tiles // 2} - {0, default.tiles}),
        [] if p.wants_grid or default.chunk == C else [C],
    ]
    first = (default.num_warps, each, default.block_c, default.tiles, default.chunk)
    found = {default: 0}
    for chosen in product(*[[x, *others] for x, others in zip(first, options)]):
        apart = sum(x != y for x, y in zip(chosen, first))
        warps, each_, block_c, tiles, chunk = chosen
        if apart <= 2:
            found.setdefault(Config(max(1, 32 * warps * each_ // block_c), block_c, tiles, chunk, warps), apart)
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """Blocks are powers of two and fit into registers; a sum over channels stays in one program."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.block_p, config.block_c, config.num_warps))
    small = config.block_p * config.block_c <= 32 * 32 * config.num_warps and 0 < config.tiles <= 16
    return powers and small and config.chunk > 0 and (config.chunk >= p.C or not p.wants_grid)


def units(p: Problem) -> int:
    """Fractional bits of fixed-point sums, so that they cannot overflow: a pixel receives at most one term per sample."""
    return digits(p.points * (p.B // max(1, p.inputs)))


def launch(p: Problem, config: Config) -> Launch:
    groups = (p.B // max(1, p.inputs), p.B // max(1, p.grids))
    sizes = (p.C, p.points, p.Z, p.H, p.W, *groups, *p.of_input, *p.of_grid, *p.of_out)
    out_vector = vector_of(p.out_vector, config.chunk) if p.out == "channels" else p.out_vector
    layout = (p.last, vector_of(p.vector, config.chunk), p.out == "channels", p.out == "points", out_vector)
    offset = tl.int64 if p.int64 else tl.int32
    constants = (p.dim, TAPS[p.mode], p.padding, p.align, accumulator(p.wide), offset, *layout, config.chunk, *config[:3])
    grid = (p.B * cdiv(p.points, config.block_p), cdiv(max(1, p.C), config.chunk), 1)
    return Launch(grid, sizes, constants, config.num_warps)


def launch_gradients(p: Problem, config: Config) -> Launch:
    plain = launch(p, config)
    return plain._replace(sizes=(*plain.sizes, *p.of_gradient, units(p), p.inputs), constants=(p.stage, *plain.constants))
