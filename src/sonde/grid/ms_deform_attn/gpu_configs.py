"""What the kernels of ``ms_deform_attn`` are told: which problem a launch solves, and in which of many configurations."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl

from ...jit.launch import Launch, accumulator, cdiv, power_of_2, vector_of
from .._pyramid.gpu_levels import block_of

FEW = 8192  # queries times heads that leave a device idle unless each is a program
CHUNK = 8  # tiles of channels whose sums one program keeps


class Problem(NamedTuple):
    """What a launch computes, apart from how."""

    B: int
    S: int
    Q: int
    heads: int
    D: int
    L: int
    P: int
    row: int  # of the values, from pixel to pixel
    batch: int  # from image to image
    vector: int  # which is a multiple of this
    itemsize: int  # of a value
    logits: bool
    table: bool
    mask: bool
    wide: torch.dtype
    int64: bool  # offsets
    gradients: bool


class Config(NamedTuple):
    block_q: int  # queries that are in flight together
    block_p: int  # points of a query and a level that are
    unroll: int  # turns that are
    repeat: int  # blocks of queries of a program, one after the other
    num_warps: int


def default_config(p: Problem) -> Config:
    """One warp. Where queries are few, each is a program, whose threads have one access of a tile, of four numbers or of 16 bytes;
    a float32 value does best with such tiles, too, and float64 fits into no others. Else tiles have as many samples as a warp
    has threads, each of which finds one. Turns are in flight together as far as registers go.

    What decides the order of a sum does not depend on the batch.
    """
    few, block_c, block_p = p.Q * p.heads <= FEW, block_of(max(1, p.D)), min(power_of_2(p.P), 8)
    tiles, wide = max(1, cdiv(p.D, block_c)), p.wide.itemsize > 4 if p.gradients else p.itemsize > 2
    if few or wide:
        rows = 32 * vector_of(4 if p.gradients else 16 // p.itemsize, p.row, p.D, block_c) // block_c
        block_p = min(block_p, rows) if few or p.gradients else 1
    else:
        sums = 1 if p.gradients else min(CHUNK, tiles) * block_c * (p.wide.itemsize // 4)  # of a row, in registers
        rows = min(32, 256 * block_p // block_c, power_of_2(1024 // sums + 1) // 2)  # the largest power of two
        block_p = min(block_p, rows)
    block_q = max(1, min(rows // block_p, power_of_2(p.Q)))
    if p.gradients:
        return Config(block_q, block_p, 2 if few else 1, 1 if few or block_p > 4 else 2, 1)
    return Config(block_q, block_p, 4 if few else max(1, 4 // tiles) if wide else 2, 1, 1)


def candidate_configs(p: Problem) -> list[Config]:
    """The default, then others, those that differ in the fewest respects first; no gradients that take a minute to compile."""
    default = default_config(p)
    found = {default: 0}
    for warps, rows, block_p, unroll, repeat in product((1, 2, 4), (4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        config = Config(max(1, warps * rows // block_p), block_p, unroll, repeat, warps)
        short = not p.gradients or config.block_q * block_p * unroll <= 64 * warps
        if short and block_p <= power_of_2(p.P) and config.block_q <= power_of_2(p.Q):
            found.setdefault(config, sum(x != y for x, y in zip(config, default)))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """Every number is a power of two, and a tile fits into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in config)
    return powers and config.block_q * config.block_p * block_of(max(1, p.D)) <= 2048 * config.num_warps


def launch(p: Problem, config: Config) -> Launch:
    block_c, tiles = block_of(max(1, p.D)), cdiv(p.D, block_of(max(1, p.D)))
    chunk = max(1, min(CHUNK, tiles))
    grid = (p.B * p.heads * cdiv(p.Q, config.block_q * config.repeat), 1 if p.gradients else cdiv(tiles, chunk), 1)
    turns = p.L * cdiv(p.P, config.block_p)
    block_s = max(block_c, power_of_2(turns)) if p.gradients else min(32, power_of_2(p.L * p.P))
    each = config.block_q * config.block_p * block_c // (32 * config.num_warps)  # numbers of a tile that a thread has
    parts = max(1, min(each // (4 if p.gradients else 8), config.block_p))
    constants = (
        *(p.D, p.heads, p.L, p.P, p.row, p.vector, p.logits, p.table, p.mask),
        *(accumulator(p.wide), tl.int64 if p.int64 else tl.int32),
        *(config.block_q, config.block_p, block_c, block_s, *(() if p.gradients else (chunk,))),
        *(max(1, min(config.unroll, turns)), config.repeat, parts),
    )
    return Launch(grid, (p.S, p.Q, p.batch), constants, config.num_warps)
