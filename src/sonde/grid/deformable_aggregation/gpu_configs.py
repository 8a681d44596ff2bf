"""The kernels of ``deformable_aggregation``: the problem a launch solves, its configurations, and its grid and arguments."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl

from ...jit.launch import Launch, accumulator, cdiv, power_of_2, vector_of
from .._device.long_sums import MANY as ADDITIONS
from .._pyramid.gpu_levels import block_of

BLOCK_N = 128  # samples tested together for being inside an image
REGISTERS = 255  # limit per thread for tiles of one or two groups; larger tiles need no limit
MANY = 32768  # programs: several times as many as run on a device at once


class Problem(NamedTuple):
    """What a launch computes; ``Config`` and ``Cells`` say how."""

    B: int
    S: int
    A: int
    N: int  # samples per anchor
    cams: int
    L: int
    C: int
    G: int
    row: int  # stride of the features from pixel to pixel
    batch: int  # stride from image to image
    vector: int  # the batch stride is a multiple of this
    itemsize: int  # bytes of a feature
    slices: int  # parts of an anchor's samples, one program each; their sums are added by another kernel
    drop: bool
    table: bool
    mask: bool
    wide: torch.dtype
    int64: bool  # 64-bit offsets
    gradients: bool
    adds: bool  # computes the gradient of the features, by atomics in no fixed order


class Config(NamedTuple):
    """A configuration of the forward kernel."""

    rows: int  # samples processed together
    tiles: int  # channel tiles per program
    unroll: int  # levels processed together
    num_warps: int


class Cells(NamedTuple):
    """A configuration of the gradients' kernel."""

    points: int  # per program; doubled if there would be very many programs
    groups: int  # per tile
    num_warps: int


def slices_of(A: int, N: int, programs: int = 1024, least: int = 96) -> int:
    """Into how many slices an anchor's samples are cut, so that a few anchors make about `programs` programs.

    A slice has at least `least` samples. The batch size must not matter, since the slices decide the order of a sum.
    """
    return max(1, min(cdiv(programs, max(1, A)), N // least))


def _group(p: Problem) -> int:
    return p.C // max(1, p.G)


def _block_c(p: Problem) -> int:
    return block_of(max(1, _group(p)))


def _tiles(p: Problem) -> int:
    return p.G * cdiv(_group(p), _block_c(p))


def default_config(p: Problem) -> Config:
    """One warp; each thread loads 16 bytes at a time and has sixteen accumulators."""
    vector = vector_of(16 // p.itemsize, p.row, _group(p), _block_c(p))
    tiles = max(1, min(16 // vector, 8, _tiles(p)))
    return Config(32 * vector // _block_c(p), tiles, 2 if vector > 4 else 1, 1)


def candidate_configs(p: Problem) -> list[Config]:
    """The default, then the others, those that differ least first."""
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
    # 1.5 times the usual limit: a map's few anchors have that many samples, most of them outside every image
    long = cdiv(p.N, p.slices) * p.L > 3 * ADDITIONS.value // 2 * config.rows
    tile = (config.rows, block_n, _block_c(p), tiles // max(1, p.G), config.tiles, config.unroll, long)
    return Launch(grid, (p.S, p.A, p.N, p.slices, p.batch), (*_constants(p), *tile), config.num_warps)


def _constants(p: Problem) -> tuple:
    what = (p.cams, p.L, p.C, p.G, _group(p), p.row, p.vector, p.drop, p.table, p.mask)
    return *what, *_types(p)


def _types(p: Problem) -> tuple:
    """The dtypes of accumulators and offsets."""
    return accumulator(p.wide), tl.int64 if p.int64 else tl.int32


def _most_groups(p: Problem) -> int:
    """The most groups per tile that a warp has registers for; 1 unless G and the groups' size are powers of two."""
    whole = _group(p) == power_of_2(_group(p)) and power_of_2(p.G) == p.G
    return max(1, min(p.G, 256 // _group(p), 128 // p.wide.itemsize)) if whole else 1


def default_cells(p: Problem) -> Cells:
    """One warp with as many groups as fit; more warps for a wide group."""
    return Cells(4, _most_groups(p), max(1, min(16, power_of_2(_group(p)) * p.wide.itemsize // 1024)))


def candidate_cells(p: Problem) -> list[Cells]:
    """The default, then the others, those that differ least first."""
    default = default_cells(p)
    groups = sorted({default.groups, max(1, default.groups // 2), 1})
    found = {default: 0}
    for config in map(Cells._make, product((4, 8, 16), groups, sorted({default.num_warps, 1, 2, 4, 8}))):
        found.setdefault(config, sum(x != y for x, y in zip(config, default)))
    return sorted(found, key=lambda config: found[config])


def fits_cells(p: Problem, config: Cells) -> bool:
    """Points (4 to 16) and warps are powers of two; tiles hold whole groups and are no larger than the default's."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.points, config.num_warps))
    groups = 0 < config.groups <= _most_groups(p) and _most_groups(p) % config.groups == 0
    return powers and groups and 4 <= config.points <= 16 and config.num_warps >= default_cells(p).num_warps


def launch_cells(p: Problem, config: Cells) -> Launch:
    """The batch size may change the tiles only if sums have no fixed order anyway: another tile rounds differently."""
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
