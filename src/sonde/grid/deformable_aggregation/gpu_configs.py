"""What the kernels of ``deformable_aggregation`` are told: which problem a launch solves, and in which of many configurations."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl

from ...op.gpu import Launch, accumulator, cdiv, power_of_2, vector_of
from .._gpu_pyramid import block_of

BLOCK_N = 128  # samples that are looked at together


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


class Config(NamedTuple):
    rows: int  # samples that are in flight together
    tiles: int  # of channels that a program has, or groups of a gradient that are in flight together
    unroll: int  # levels that are in flight together
    slices: int  # of an anchor's samples, where nothing need be added up
    groups: int  # that a tile of a gradient has
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


def _most_groups(p: Problem) -> int:
    """Of a tile; more than one only if groups and their number are powers of two."""
    whole = p.gradients and _group(p) == _block_c(p) and power_of_2(p.G) == p.G
    return max(1, min(p.G, 256 // _block_c(p))) if whole else 1


def default_config(p: Problem) -> Config:
    """One warp whose threads have one access each, of 16 bytes, and sixteen sums.

    A gradient has all groups of one sample in a tile, and as many slices as keep a device busy, a camera in each. What decides the
    order of a sum does not depend on the batch.
    """
    if not p.gradients:
        vector = vector_of(16 // p.itemsize, p.row, _group(p), _block_c(p))
        tiles = max(1, min(16 // vector, 8, _tiles(p)))
        return Config(32 * vector // _block_c(p), tiles, 2 if vector > 4 else 1, 1, 1, 1)
    vector = vector_of(4 if _group(p) <= _block_c(p) else 2, p.row, _group(p), _block_c(p))  # a wide group has more in registers
    groups, slices = _most_groups(p), slices_of(p.A, p.N, 12288, 4)
    slices = round(slices / p.cams) * p.cams if 0 < p.cams <= slices else slices
    return Config(max(1, 32 * vector // (groups * _block_c(p))), 1, 1, slices, groups, 1)


def candidate_configs(p: Problem) -> list[Config]:
    """The default and, for a gradient, some with fewer groups in a tile; then others, those nearest to one of these first."""
    default, block_c = default_config(p), _block_c(p)
    first = [default]
    for groups, warps in ((_most_groups(p), 2), (_most_groups(p), 1), (1, 1)) if p.gradients else ():
        first.append(default._replace(rows=max(1, 128 // (groups * block_c)), groups=groups, num_warps=warps))
    found = dict.fromkeys(first, 0)
    tiles = sorted({1, 2, 4, 8} & set(range(1, max(1, _tiles(p)) + 1)))
    some = {1, p.cams, 3 * p.cams, default.slices, 2 * default.slices, max(1, default.slices // 2)}
    slices = sorted(n for n in some if n <= max(1, p.N)) if p.gradients else [1]
    groups_ = sorted({config.groups for config in first})
    for config in map(Config._make, product((1, 2, 4, 8, 16, 32), tiles, (1, 2, 4), slices, groups_, (1, 2, 4))):
        if 32 * config.num_warps <= config.rows * config.groups * block_c <= 512 * config.num_warps:
            found.setdefault(config, min(sum(x != y for x, y in zip(config, other)) for other in first))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """Rows and warps are powers of two, and a tile fits into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.rows, config.num_warps))
    small = config.rows * config.groups * _block_c(p) <= 1024 * config.num_warps and config.rows <= BLOCK_N
    counts = 0 < config.tiles <= max(1, _tiles(p)) and config.unroll > 0
    counts = counts and 0 < config.groups <= _most_groups(p) and _most_groups(p) % config.groups == 0
    return powers and small and counts and (config.slices == 1 or (p.gradients and 0 < config.slices <= max(1, p.N)))


def launch(p: Problem, config: Config) -> Launch:
    slices, tiles = config.slices if p.gradients else p.slices, _tiles(p)
    grid = (p.B * p.A * slices, 1 if p.gradients else cdiv(tiles, config.tiles), 1)
    block_n = min(BLOCK_N, power_of_2(max(config.rows, cdiv(p.N, slices))))
    constants = (
        *(p.cams, p.L, p.C, p.G, _group(p), p.row, p.vector, p.drop, p.table, p.mask),
        *(accumulator(p.wide), tl.int64 if p.int64 else tl.int32),
        *(config.rows, block_n, _block_c(p) * config.groups, tiles // max(1, p.G), config.tiles, config.unroll, config.groups),
    )
    return Launch(grid, (p.S, p.A, p.N, slices, p.batch), constants, config.num_warps)


def launch_total(p: Problem, block_c: int) -> Launch:
    block_a = 1024 // block_c
    return Launch((cdiv(p.B * p.A, block_a), cdiv(p.C, block_c), 1), (p.B * p.A, p.slices), (p.C, block_a, block_c), 4)
