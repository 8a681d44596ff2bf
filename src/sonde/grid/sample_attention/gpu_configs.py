"""The problem that one launch of ``sample_attention``'s kernels solves, and its configurations."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton.language as tl

from ...jit.launch import Launch, accumulator, cdiv, power_of_2
from .._device.long_sums import MANY

BLOCK_C = 32  # channels of a tile, unless there are many: eight threads with one vector access each
REGISTERS = 255  # per thread, the hardware's limit; otherwise the compiler spills a few to run more programs
HELD = 16  # tiles of sums that a program keeps in registers


class Problem(NamedTuple):
    """Sizes and dtypes of a launch."""

    B: int  # rows of queries
    V: int  # images of each
    H: int
    W: int
    Q: int
    D: int
    C: int  # channels of the queries
    C_v: int  # of the values
    stride: int  # of the images, from pixel to pixel; 1 if each channel is a plane
    v_stride: int  # of the values; 0 if they are channels of the images
    d_stride: int  # the same of the gradients; 0 if not needed
    d_v_stride: int
    heads: int
    octaves: int
    masked: bool
    itemsize: int  # of the images
    wide: torch.dtype
    int64: bool  # 64-bit offsets
    scale: tuple[int, int]  # see ``jit.launch.halves``


class Config(NamedTuple):
    block_q: int  # consecutive queries of a program
    block_d: int  # samples of a query in flight
    block_c: int  # channels of a tile
    heads: int  # of a program
    num_warps: int


def _tiles(p: Problem, config: Config) -> tuple[int, int]:
    return max(1, cdiv(p.C, config.block_c)), max(1, cdiv(p.C_v, config.block_c))


def _tile(p: Problem, most: int) -> int:
    """Channels of a tile, chosen so that there are at most this many tiles."""
    channels = max(p.C, p.C_v)
    return min(max(BLOCK_C, power_of_2(cdiv(channels, most))), power_of_2(channels))


def _config(p: Problem, samples: int, block_d: int, block_c: int, channels: int, held: int = HELD) -> Config:
    """`samples` in flight, four channels of each per thread, and as many heads as keep their sums of `channels` in registers."""
    block_d = min(block_d, power_of_2(p.D))
    threads = samples * max(BLOCK_C, block_c) // 4
    heads = max(1, min(p.heads, held // max(1, cdiv(channels, block_c))))
    return Config(max(1, samples // block_d), block_d, block_c, heads, max(1, min(8, threads // 32)))


def attend_config(p: Problem) -> Config:
    """Two samples of two queries in flight (one of four in half precision): neighbouring queries read neighbouring pixels.

    In float32 with an encoding, sums of all heads would spill on Blackwell, so a program takes half of them. The winners shipped
    for the H200 take all.
    """
    block_c, held = _tile(p, 8), HELD // 2 if p.octaves and p.itemsize > 2 else HELD
    return _config(p, max(1, 128 // max(BLOCK_C, block_c)), 2 if p.itemsize > 2 else 1, block_c, p.C_v, held)


def queries_config(p: Problem) -> Config:
    """Two samples of one query, because the gradient's sums leave few free registers; in half precision two of two."""
    block_c, half = _tile(p, 8), p.itemsize <= 2
    return _config(p, max(1, (128 if half else 64) // max(BLOCK_C, block_c)), 2, block_c, p.C)


def pixels_config(p: Problem) -> Config:
    """Four samples of one query, whose contributions to the same pixel are summed before the atomic add."""
    return _config(p, 4, 4, _tile(p, 4), max(p.C, p.C_v))._replace(heads=1)


def candidates(default: Config, p: Problem, grouped: bool = True) -> list[Config]:
    """The default, then the others, sorted by how many of tiles, heads and warps differ from it."""
    found = {default: -1}
    heads = sorted({default.heads, 1, 2, 4, 8, p.heads} & set(range(1, p.heads + 1))) if grouped else [1]
    for block_c, h, warps, rows, block_d in product((16, 32, 64, 128), heads, (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)):
        if block_d <= min(power_of_2(p.D), warps * rows):
            config = Config(warps * rows // block_d, block_d, block_c, h, warps)
            found.setdefault(config, sum(x != y for x, y in zip(config[2:], default[2:])))
    return sorted(found, key=lambda config: found[config])


def fits(p: Problem, config: Config) -> bool:
    """Whether sizes are powers of two and a program's values fit into registers."""
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.block_q, config.block_d, config.block_c, config.num_warps))
    if not powers or not 0 < config.heads <= max(1, p.heads) or config.block_c > max(BLOCK_C, power_of_2(max(p.C, p.C_v))):
        return False
    if p.stride == 1 and config.block_q * config.block_d >= 16:  # see ``_epipolar.gpu_kernels``: Triton 3.6 fails on these
        return False
    held = config.block_q * config.block_d * config.block_c * max(_tiles(p, config)) // (32 * config.num_warps)  # per thread
    return held * (config.heads + 2) <= 160 or config in (attend_config(p), queries_config(p), pixels_config(p))


def sizes(p: Problem) -> tuple[int, ...]:
    """Images without pixels get width −1, within which no sample lies: with width 0, one at −½ would count as live."""
    return p.H, p.W if p.H * p.W else -1, p.Q, p.D, p.V, *p.scale


def constants(p: Problem, config: Config) -> tuple:
    offset = tl.int64 if p.int64 else tl.int32
    about = p.C, p.C_v, p.stride, p.v_stride, p.heads, p.octaves, accumulator(p.wide), offset
    return *about, config.block_q, config.block_d, config.block_c, *_tiles(p, config), p.H * p.W == 0


def is_long(p: Problem, config: Config) -> bool:
    """Whether sums over samples are long enough to need compensation."""
    return p.V * cdiv(p.D, config.block_d) > MANY.value and p.wide == torch.float32


def launch_attend(p: Problem, config: Config) -> Launch:
    """The same with all registers."""
    return launch_queries(p, config)._replace(registers=REGISTERS)


def launch_queries(p: Problem, config: Config) -> Launch:
    """A program for some heads of some queries; the compiler chooses the number of registers only if sums take most of them."""
    grid = (p.B * cdiv(p.Q, config.block_q), cdiv(p.heads, config.heads), 1)
    registers = REGISTERS if config.heads * _tiles(p, config)[0] < HELD else None
    constant = (*constants(p, config), config.heads, is_long(p, config))
    return Launch(grid, sizes(p), constant, config.num_warps, registers=registers)


def launch_pixels(p: Problem, config: Config) -> Launch:
    """A program for all heads of some queries."""
    grid = (p.B * cdiv(p.Q, config.block_q), 1, 1)
    registers = None if p.d_stride or p.d_v_stride else REGISTERS
    return Launch(grid, sizes(p), (*constants(p, config), p.d_stride, p.d_v_stride), config.num_warps, registers=registers)
