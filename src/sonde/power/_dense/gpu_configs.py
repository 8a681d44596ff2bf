"""The problem that one launch of a product solves, and its configurations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...jit.kernel import Unsupported
from ...jit.launch import Launch, cdiv

Strides = tuple[int, int, int]  # of batch, row and column
MOST = 65_535  # the most programs along the second or third axis of a grid
ALL_REGISTERS = 255  # of a thread; the assembler's own target is often lower, and then it may spill although registers are free


class Problem(NamedTuple):
    """[B, M, K] @ [B, K, N]: what a launch computes; ``Config`` says how."""

    B: int
    M: int
    N: int
    K: int
    a: Strides
    b: Strides
    units: tuple[int, ...]  # divisors of the strides of a and b, of M, N and K; 0 stands for a stride of 1
    common: torch.dtype  # of the tiles, as they are multiplied
    wide: torch.dtype  # of the accumulator
    precision: str
    far: bool  # offsets need 64 bits
    turned: tuple[bool, bool]  # operands whose columns are contiguous and rows are not
    described: bool  # both operands can be read through descriptors
    hopper: bool  # elsewhere tiles are smaller


class Config(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int
    described: bool = False  # tiles are read through descriptors, and a program computes one tile after another


def default_config(p: Problem) -> Config:
    if p.common == torch.float64:
        return Config(32, 32, 16, 8, 4, 2)
    if p.common == torch.float32:
        if p.precision == "ieee":
            return Config(64, 32, 16, 8, 4, 3)
        return Config(64, 128, 32, 8, 4, 3)
    if any(0 < unit < 8 for unit in p.units[:4]):  # elements are loaded one at a time
        return Config(64, 32, 64, 8, 4, 4)
    small = min(p.M, p.N) <= 64 or p.B * cdiv(p.M, 128) * cdiv(p.N, 128) < 128
    if small:
        return Config(64, 64, 64, 8, 4, 3)
    if p.described:
        return Config(128, 256, 64, 8, 8, 3, True) if p.hopper else Config(128, 128, 64, 8, 8, 2, True)
    return Config(128, 128, 32, 8, 4, 3)


def candidate_configs(p: Problem) -> list[Config]:
    first = default_config(p)
    if p.common in (torch.float64, torch.float32):
        shapes = [(64, 64, 16), (32, 64, 16), (64, 32, 32), (128, 64, 16), (32, 32, 16)]
        return [first, *(Config(m, n, k, 8, 4, 3) for m, n, k in shapes)]
    plain = [(128, 128, 32, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4),
             (32, 64, 64, 4, 4), (64, 32, 64, 4, 4), (16, 128, 64, 4, 4), (128, 256, 64, 8, 3)]  # fmt: skip
    described = [(128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4)]
    found = [Config(m, n, k, 8, w, s, True) for m, n, k, w, s in described] if p.described else []
    return [first, *found, *(Config(m, n, k, 8, w, s) for m, n, k, w, s in plain)]


def batch_grid(programs: int, batch: int) -> tuple[int, int, int]:
    """A grid with `programs` programs per batch entry; the batch takes the second and third axes, each limited to MOST."""
    if batch <= MOST:
        return programs, batch, 1
    parts = next((n for n in range(cdiv(batch, MOST), MOST + 1) if batch % n == 0), None)
    if parts is None or batch >= 2**31:
        raise Unsupported(
            f"a GPU has no grid for a batch of {batch} (times heads), which has no divisors from {cdiv(batch, MOST)} to {MOST}. "
            "Add an entry to the batch, or split it"
        )
    return programs, batch // parts, parts


def registers(half: bool, hopper: bool) -> int | None:
    """The limit for a kernel of products. Half precision on a Hopper keeps the assembler's target: it was measured to be faster."""
    return None if half and hopper else ALL_REGISTERS


def fits(p: Problem, config: Config) -> bool:
    """Descriptors need `described`; tiles must have sizes that matrix units accept."""
    return (p.described or not config.described) and min(config[:3]) >= 16


def blocks(p: Problem, config: Config) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The block shapes of the three tensors' descriptors, in the order of their memory."""
    m, n, k = config[:3]
    a, b = ((k, m) if p.turned[0] else (m, k)), ((n, k) if p.turned[1] else (k, n))
    return ((0, a), (1, b), (2, (m, n)))


def launch_product(p: Problem, config: Config, programs: int, constants: tuple) -> Launch:
    tiles = cdiv(p.M, config.block_m) * cdiv(p.N, config.block_n)
    grid = batch_grid(min(tiles, programs) if config.described else tiles, p.B)
    described = dict(descriptors=blocks(p, config)) if config.described else {}
    scalar = p.common == torch.float32 and p.precision == "ieee" and p.turned[1]  # here the assembler aims at 96 and spills two
    limit = ALL_REGISTERS if scalar or not p.hopper else None
    numbers = (p.M, p.N, p.K, *p.a, *p.b)
    return Launch(grid, numbers, constants, config.num_warps, config.num_stages, registers=limit, **described)  # type: ignore
