"""The copy's kernel: a tile is read along the input's fastest dimension and written along the result's."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ... import jit
from ...jit.launch import Launch, cdiv
from .._device.tiles import multiple, places, step


class Problem(NamedTuple):
    """Copy [n0, …, n4, M, N] of any strides; N is the result's fastest dimension, M the input's, if that is another."""

    outer: tuple[int, int, int, int, int]
    M: int
    N: int
    x: tuple[int, ...]  # strides of the input, in the order of the sizes
    out: tuple[int, ...]  # strides of the result, except that of N, which is 1
    units: tuple[int, ...]  # divisors of M, N, their strides in x, that of M in out (0: it is 1), all others in x, and in out
    far: bool


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int


def default_config(p: Problem) -> Config:
    if p.units[2] == 0:  # read along M, written along N: square tiles
        return Config(64, 64, 4)
    return Config(1, 2048, 4) if p.N >= 1024 or p.M == 1 else Config(64, 64, 4)


def candidate_configs(p: Problem) -> list[Config]:
    if p.M == 1:
        rows = [(2048, 4), (4096, 8), (4096, 4), (8192, 8), (8192, 4), (16384, 8), (2048, 8), (1024, 4)]
        return [Config(1, *row) for row in rows]
    shapes = [(64, 64, 4), (32, 64, 4), (64, 32, 4), (128, 64, 8), (64, 128, 8), (32, 32, 2), (1, 2048, 4), (1, 1024, 4),
              (1, 4096, 4), (1, 8192, 8), (16, 128, 4), (32, 128, 4), (64, 64, 8), (16, 64, 4), (128, 128, 8)]  # fmt: skip
    return [default_config(p), *(Config(*shape) for shape in shapes)]


def launch(p: Problem, config: Config) -> Launch:
    m, n, warps = config
    outer = p.outer[0] * p.outer[1] * p.outer[2] * p.outer[3] * p.outer[4]
    tiles = cdiv(p.M, m) * cdiv(p.N, n)
    constants = (tl.int64 if p.far else tl.int32, p.units, m, n)
    return Launch((outer * tiles, 1, 1), (*p.outer[1:], p.M, p.N, *p.x, *p.out), constants, warps)


SIZES = ["n1", "n2", "n3", "n4", "M", "N", "x0", "x1", "x2", "x3", "x4", "xm", "xn", "o0", "o1", "o2", "o3", "o4", "om"]


@triton.jit(do_not_specialize=SIZES)
def _copy(
    x,
    out,
    n1,
    n2,
    n3,
    n4,
    M,
    N,
    x0,
    x1,
    x2,
    x3,
    x4,
    xm,
    xn,
    o0,
    o1,
    o2,
    o3,
    o4,
    om,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    M, N = multiple(M, UNITS[0]), multiple(N, UNITS[1])
    across, tiles = tl.cdiv(N, BN), tl.cdiv(M, BM) * tl.cdiv(N, BN)
    tile, rest = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i4, rest = rest % n4, rest // n4
    i3, rest = rest % n3, rest // n3
    i2, rest = rest % n2, rest // n2
    i1, i0 = rest % n1, rest // n1
    m, n = places(tile // across * BM, BM, OFFSET)[:, None], places(tile % across * BN, BN, OFFSET)[None, :]
    inside = (m < M) & (n < N)
    x += multiple(i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3 + i4 * x4, UNITS[5])
    out += multiple(i0 * o0 + i1 * o1 + i2 * o2 + i3 * o3 + i4 * o4, UNITS[6])
    fragment = tl.load(x + (m * step(xm, UNITS[2]) + n * step(xn, UNITS[3])), mask=inside)
    tl.store(out + (m * step(om, UNITS[4]) + n), fragment, mask=inside)


copy = jit.kernel(
    _copy,
    "power.copy",
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("M", "N"),
    batch=("outer", "x", "out"),
    writes=(1,),
    expected=lambda p, x, out: {1: x.reshape(out.shape)},
)
