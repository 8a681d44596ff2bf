"""The kernels of ``ms_deform_attn``: the problem a launch solves, its configurations, and its grid and arguments."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl

from ...jit.launch import Launch, accumulator, cdiv, power_of_2, vector_of
from .._pyramid.gpu_levels import block_of

FEW = 8192  # queries times heads; up to this many, each is a program of its own, or the device would idle
CHUNK = 8  # tiles of channels whose accumulators one program keeps


class Problem(NamedTuple):
    """What a launch computes; ``Config`` says how."""

    B: int
    S: int
    Q: int
    heads: int
    D: int
    L: int
    P: int
    row: int  # stride of the values from pixel to pixel
    batch: int  # stride from image to image
    vector: int  # the batch stride is a multiple of this
    itemsize: int  # bytes of a value
    logits: bool
    table: bool
    mask: bool
    wide: torch.dtype
    int64: bool  # 64-bit offsets
    gradients: bool


class Config(NamedTuple):
    block_q: int  # queries processed together
    block_p: int  # points of a query and a level processed together
    unroll: int  # steps of the loop in flight together
    repeat: int  # blocks of queries per program, one after the other
    num_warps: int


def default_config(p: Problem) -> Config:
    """One warp. If there are few queries, each is a program, and each thread makes one access per tile, of four elements or 16
    bytes; such tiles are also the fastest for float32 values, and the only ones that fit for float64. Otherwise a tile has as many
    samples as a warp has threads, and each thread locates one. Loops are unrolled as far as registers allow.

    Nothing that decides the order of a sum depends on the batch size.
    """
    few, block_c, block_p = p.Q * p.heads <= FEW, block_of(max(1, p.D)), min(power_of_2(p.P), 8)
    tiles, wide = max(1, cdiv(p.D, block_c)), p.wide.itemsize > 4 if p.gradients else p.itemsize > 2
    if few or wide:
        rows = 32 * vector_of(4 if p.gradients else 16 // p.itemsize, p.row, p.D, block_c) // block_c
        block_p = min(block_p, rows) if few or p.gradients else 1
    else:
        sums = 1 if p.gradients else min(CHUNK, tiles) * block_c * (p.wide.itemsize // 4)  # registers for a row's sums
        rows = min(32, 256 * block_p // block_c, power_of_2(1024 // sums + 1) // 2)  # rounded down to a power of two
        block_p = min(block_p, rows)
    block_q = max(1, min(rows // block_p, power_of_2(p.Q)))
    if p.gradients:
        return Config(block_q, block_p, 2 if few else 1, 1 if few or block_p > 4 else 2, 1)
    return Config(block_q, block_p, 4 if few else max(1, 4 // tiles) if wide else 2, 1, 1)


def candidate_configs(p: Problem) -> list[Config]:
    """The default, then the others, those that differ least first; without gradients that take a minute to compile."""
    default = default_config(p)
    found = {default: 0}
    for warps, rows, block_p, unroll, repeat in product((1, 2, 4), (4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        config = Config(max(1, warps * rows // block_p), block_p, unroll, repeat, warps)
        short = not p.gradients or config.block_q * block_p * unroll <= 64 * warps
        if short and block_p <= power_of_2(p.P) and config.block_q <= power_of_2(p.Q):
            found.setdefault(config, sum(x != y for x, y in zip(config, default)))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """All fields are powers of two, and a tile fits into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in config)
    return powers and config.block_q * config.block_p * block_of(max(1, p.D)) <= 2048 * config.num_warps


def launch(p: Problem, config: Config) -> Launch:
    block_c, tiles = block_of(max(1, p.D)), cdiv(p.D, block_of(max(1, p.D)))
    chunk = max(1, min(CHUNK, tiles))
    grid = (p.B * p.heads * cdiv(p.Q, config.block_q * config.repeat), 1 if p.gradients else cdiv(tiles, chunk), 1)
    turns = p.L * cdiv(p.P, config.block_p)
    block_s = max(block_c, power_of_2(turns)) if p.gradients else min(32, power_of_2(p.L * p.P))
    each = config.block_q * config.block_p * block_c // (32 * config.num_warps)  # elements of a tile per thread
    parts = max(1, min(each // (4 if p.gradients else 8), config.block_p))
    constants = (
        *(p.D, p.heads, p.L, p.P, p.row, p.vector, p.logits, p.table, p.mask),
        *(accumulator(p.wide), tl.int64 if p.int64 else tl.int32),
        *(config.block_q, config.block_p, block_c, block_s, *(() if p.gradients else (chunk,))),
        *(max(1, min(config.unroll, turns)), config.repeat, parts),
    )
    return Launch(grid, (p.S, p.Q, p.batch), constants, config.num_warps)
