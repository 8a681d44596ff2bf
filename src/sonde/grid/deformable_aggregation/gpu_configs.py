"""What the kernels of ``deformable_aggregation`` are told: which problem a launch solves, and in which of many configurations."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl

from ...jit.launch import Launch, accumulator, cdiv, power_of_2, vector_of
from .._device.long_sums import MANY as ADDITIONS
from .._pyramid.gpu_levels import block_of

BLOCK_N = 128  # samples that are looked at together
REGISTERS = 255  # of a thread, all that it needs, where a tile has no more than two groups; with more it has them anyhow
MANY = 32768  # programs that are more than a few times what a device has at one time


class Problem(NamedTuple):
    """What a launch computes, apart from how."""

    B: int
    S: int
    A: int
    N: int  # samples of an anchor
    cams: int
    L: int
    C: int
    G: int
    row: int  # of the features, from pixel to pixel
    batch: int  # from image to image
    vector: int  # which is a multiple of this
    itemsize: int  # of a feature
    slices: int  # of an anchor's samples; their sums are added up later
    drop: bool
    table: bool
    mask: bool
    wide: torch.dtype
    int64: bool  # offsets
    gradients: bool
    adds: bool  # the features' among them, which is added up in whatever order


class Config(NamedTuple):
    """Of the value's kernel."""

    rows: int  # samples that are in flight together
    tiles: int  # of channels that a program has
    unroll: int  # levels that are in flight together
    num_warps: int


class Cells(NamedTuple):
    """Of the gradients' kernel."""

    points: int  # of a program, at most; twice as many where programs would be very many
    groups: int  # that a tile has
    num_warps: int


def slices_of(A: int, N: int, programs: int = 1024, least: int = 96) -> int:
    """Into how many an anchor's samples are cut, where anchors are few; whatever the batch: it decides the order of a sum.

    `programs` keep any device busy, and so many samples at `least` are worth one.
    """
    return max(1, min(cdiv(programs, max(1, A)), N // least))


def _group(p: Problem) -> int:
    return p.C // max(1, p.G)


def _block_c(p: Problem) -> int:
    return block_of(max(1, _group(p)))


def _tiles(p: Problem) -> int:
    return p.G * cdiv(_group(p), _block_c(p))


def default_config(p: Problem) -> Config:
    """One warp whose threads have one access each, of 16 bytes, and sixteen sums."""
    vector = vector_of(16 // p.itemsize, p.row, _group(p), _block_c(p))
    tiles = max(1, min(16 // vector, 8, _tiles(p)))
    return Config(32 * vector // _block_c(p), tiles, 2 if vector > 4 else 1, 1)


def candidate_configs(p: Problem) -> list[Config]:
    """The default, then others, those nearest to it first."""
    default, block_c = default_config(p), _block_c(p)
    found = {default: 0}
    tiles = sorted({1, 2, 4, 8} & set(range(1, max(1, _tiles(p)) + 1)))
    for config in map(Config._make, product((1, 2, 4, 8, 16, 32), tiles, (1, 2, 4), (1, 2, 4))):
        if 32 * config.num_warps <= config.rows * block_c <= 512 * config.num_warps:
            found.setdefault(config, sum(x != y for x, y in zip(config, default)))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """Rows and warps are powers of two, and a tile fits into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.rows, config.num_warps))
    small = config.rows * _block_c(p) <= 1024 * config.num_warps and config.rows <= BLOCK_N
    return powers and small and 0 < config.tiles <= max(1, _tiles(p)) and 0 < config.unroll <= 8


def launch(p: Problem, config: Config) -> Launch:
    tiles = _tiles(p)
    grid = (p.B * p.A * p.slices, cdiv(tiles, config.tiles), 1)
    block_n = min(BLOCK_N, power_of_2(max(config.rows, cdiv(p.N, p.slices))))
    # half as many again as elsewhere: so many have the few anchors of a map, most of whose samples see nothing
    long = cdiv(p.N, p.slices) * p.L > 3 * ADDITIONS.value // 2 * config.rows
    tile = (config.rows, block_n, _block_c(p), tiles // max(1, p.G), config.tiles, config.unroll, long)
    return Launch(grid, (p.S, p.A, p.N, p.slices, p.batch), (*_constants(p), *tile), config.num_warps)


def _constants(p: Problem) -> tuple:
    what = (p.cams, p.L, p.C, p.G, _group(p), p.row, p.vector, p.drop, p.table, p.mask)
    return *what, *_types(p)


def _types(p: Problem) -> tuple:
    """Of sums and of offsets."""
    return accumulator(p.wide), tl.int64 if p.int64 else tl.int32


def _most_groups(p: Problem) -> int:
    """Of a tile; more than one only if groups and their number are powers of two, and no more than a warp has registers for."""
    whole = _group(p) == power_of_2(_group(p)) and power_of_2(p.G) == p.G
    return max(1, min(p.G, 256 // _group(p), 128 // p.wide.itemsize)) if whole else 1


def default_cells(p: Problem) -> Cells:
    """One warp with all groups; more for a wide group."""
    return Cells(4, _most_groups(p), max(1, min(16, power_of_2(_group(p)) * p.wide.itemsize // 1024)))


def candidate_cells(p: Problem) -> list[Cells]:
    """The default, then others, those nearest to it first."""
    default = default_cells(p)
    groups = sorted({default.groups, max(1, default.groups // 2), 1})
    found = {default: 0}
    for config in map(Cells._make, product((4, 8, 16), groups, sorted({default.num_warps, 1, 2, 4, 8}))):
        found.setdefault(config, sum(x != y for x, y in zip(config, default)))
    return sorted(found, key=lambda config: found[config])


def fits_cells(p: Problem, config: Cells) -> bool:
    """Points, at least four, and warps are powers of two, tiles have whole groups, and are not larger than the default's."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.points, config.num_warps))
    groups = 0 < config.groups <= _most_groups(p) and _most_groups(p) % config.groups == 0
    return powers and groups and 4 <= config.points <= 16 and config.num_warps >= default_cells(p).num_warps


def launch_cells(p: Problem, config: Cells) -> Launch:
    """The batch has a say only where additions come in whatever order: a tile of another size may be rounded otherwise."""
    points, padded = config.points, power_of_2(_group(p))
    parts = max(1, cdiv(p.N // p.cams, points))
    programs = (p.B if p.adds else 1) * p.A * p.cams * parts
    if programs >= 2 * MANY:
        points, parts = 2 * points, cdiv(parts, 2)
    sizes, tile = (p.S, p.A, p.N, p.cams * parts, p.batch), (programs >= MANY, points, config.groups, padded, min(4, padded))
    registers = None if config.groups > 2 else REGISTERS
    return Launch((p.B * p.A * p.cams * parts, 1, 1), sizes, (*_constants(p), *tile), config.num_warps, registers=registers)


def launch_total(p: Problem, block_c: int) -> Launch:
    block_a = 1024 // block_c
    constants = (p.C, block_a, block_c, p.slices > ADDITIONS.value)
    return Launch((cdiv(p.B * p.A, block_a), cdiv(p.C, block_c), 1), (p.B * p.A, p.slices), constants, 4)


def launch_mark(p: Problem, block: int) -> Launch:
    samples = p.B * p.A * p.N
    what = (p.cams, p.L, p.row, p.drop, p.table, p.mask, *_types(p), block)
    return Launch((cdiv(samples, block), 1, 1), (samples, p.S, p.A * p.N), what, max(1, block // 32))
