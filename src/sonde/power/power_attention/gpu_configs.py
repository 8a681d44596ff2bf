"""The problem that one launch of power attention solves, and its configurations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...jit.launch import power_of_2

BLOCK = 64  # rows; decays are stored relative to a block's first row and to its last
Strides = tuple[int, int, int]  # of batch, head and row; rows are contiguous


class Problem(NamedTuple):
    """What a launch on queries, keys, values or their gradients computes; ``Config`` says how."""

    B: int
    h: int  # heads of keys and values
    groups: int  # heads of queries for each of them
    T: int
    C: int  # rows of a chunk
    chunks: int
    d: int
    e: int
    power: int
    tile: int  # of φ's basis
    D: int
    gated: bool
    crossed: bool  # there is a state before some chunk
    begun: bool  # there is one before the first chunk
    returned: bool  # the state after the last chunk is returned, or has a gradient
    least: float  # a sum of weights below this share of its largest possible value is only rounding error
    q: Strides
    k: Strides
    v: Strides
    out: Strides  # of the result in a backward pass, which is contiguous
    grad: Strides
    gate: Strides
    units: tuple[int, ...]  # divisors of the strides of q, k, v, out and grad
    common: torch.dtype  # of the fragments, as they are multiplied
    wide: torch.dtype  # of the accumulator
    precision: str  # of products
    exact: str  # of products that must not round
    far: bool  # offsets need 64 bits
    hopper: bool  # elsewhere tiles are smaller

    @property
    def half(self) -> bool:
        return self.common.itemsize == 2

    @property
    def widest(self) -> int:
        return max(self.d, self.e)

    @property
    def blocks(self) -> tuple[int, int]:
        return power_of_2(max(16, self.d)), power_of_2(max(16, self.e))

    @property
    def paired(self) -> bool:
        """Whether matrix units multiply states, with φ's tiles built as outer products; otherwise ``gpu_any_power`` does."""
        return self.power == 2 and self.tile in (4, 8) and self.widest <= (128 if self.wide == torch.float32 else 64)

    @property
    def narrow(self) -> bool:
        """Whether rows cannot be loaded 16 bytes at a time."""
        return min(self.units) < 8


class Fold(NamedTuple):
    """Sums of φ(x) yᵀ over the rows of chunks: keys and values, or queries and gradients."""

    B: int
    h: int
    members: int  # heads of x that share a state
    T: int
    C: int
    chunks: int  # to compute
    skipped: int  # chunks at the beginning that are not needed
    d: int
    e: int
    tile: int
    D: int
    x: Strides
    y: Strides
    units: tuple[int, int]
    common: torch.dtype
    wide: torch.dtype
    precision: str
    exact: str
    far: bool
    hopper: bool

    @property
    def half(self) -> bool:
        return self.common.itemsize == 2


class Past(NamedTuple):
    """Rows that go through states: queries or, in the backward pass, keys."""

    B: int
    h: int
    groups: int  # heads of rows that share a state
    T: int
    C: int
    chunks: int
    first: int  # the first chunk that has a state
    states: int  # how many chunks have one
    d: int
    e: int
    tile: int
    D: int
    x: Strides  # of the rows
    y: Strides  # of the values or gradients that the sums are multiplied by in a backward pass; zeros without them
    x_unit: int  # a divisor of x
    y_unit: int
    common: torch.dtype
    wide: torch.dtype
    precision: str
    exact: str
    far: bool
    hopper: bool

    @property
    def half(self) -> bool:
        return self.common.itemsize == 2

    @property
    def widest(self) -> int:
        return max(self.d, self.e)

    @property
    def parts(self) -> int:
        """Into how many parts moments are split, so that matrix units multiply them exactly."""
        return 3 if self.half else 1


class Config(NamedTuple):
    block_m: int  # rows that a program computes
    block_n: int  # rows that it reads at a time; in a fold, columns of the state; 0 where it is not used
    parts: int  # of the state at a time: tiles of φ, or slices of the state's matrix, for gradients; 0 where it is not used
    num_warps: int
    num_stages: int


def output_config(p: Problem) -> Config:
    if not p.half:
        if p.widest > 64:
            return Config(16, 16, 0, 8, 1)
        return Config(32, 32, 0, 8, 1) if p.wide == torch.float32 else Config(32, 16, 0, 4, 1)
    if p.widest > 128:
        return Config(32, 32, 0, 8, 1)
    if p.narrow:
        return Config(64, 32, 0, 4, 1)
    if p.widest <= 64:
        return Config(64, 64, 0, 4, 3 if p.hopper else 2)
    return Config(64, 64, 0, 8, 2) if p.hopper else Config(32, 32, 0, 8, 1)


def query_config(p: Problem) -> Config:
    """For the gradients of queries."""
    if p.hopper or not p.half:
        return output_config(p)
    return Config(32, 32, 0, 4, 2) if p.widest <= 64 else Config(32, 16, 0, 8, 1)


def output_candidates(p: Problem) -> list[Config]:
    shapes = [(64, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 3), (64, 32, 4, 3), (128, 64, 8, 2)]
    if not p.half:
        shapes = [(32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (32, 16, 4, 1), (64, 32, 8, 1)]
    return [output_config(p), *(Config(m, n, 0, w, s) for m, n, w, s in shapes)]


def query_candidates(p: Problem) -> list[Config]:
    return [query_config(p), *output_candidates(p)]


def fold_config(p: Fold) -> Config:
    if p.half:
        return Config(128 if p.hopper else 64, 64, min(2, p.d // p.tile), 4, 2)
    return Config(16, 32, 1, 4, 2)


def fold_candidates(p: Fold) -> list[Config]:
    shapes = [(128, 64, 2, 4, 2), (64, 64, 4, 4, 2), (128, 64, 2, 4, 3), (64, 64, 2, 4, 2), (64, 64, 2, 4, 3), (128, 64, 1, 4, 2)]
    if not p.half:
        shapes = [(16, 32, 1, 4, 2), (32, 32, 1, 4, 2), (16, 64, 1, 4, 2)]
    return [fold_config(p), *(Config(*s) for s in shapes)]


def past_sums_config(p: Past) -> Config:
    if not p.half:
        return Config(32 if p.widest <= 64 else 16, 0, 1, 4, 1)
    if not p.hopper:
        return Config(64, 0, 2, 4, 2) if p.widest <= 64 else Config(64, 0, 1, 8, 2)
    return Config(128, 0, 2, 4, 3) if p.widest <= 64 else Config(128, 0, 1, 8, 3)


def past_sums_candidates(p: Past) -> list[Config]:
    shapes = [(128, 2, 4, 3), (256, 2, 8, 3), (128, 1, 4, 3), (64, 2, 4, 3), (128, 2, 4, 2), (128, 4, 4, 2), (256, 4, 8, 3),
              (128, 4, 4, 3), (64, 4, 4, 3)]  # fmt: skip
    if not p.half:
        shapes = [(16, 1, 4, 1), (32, 1, 4, 1), (32, 1, 8, 1), (64, 1, 8, 1)]
    return [past_sums_config(p), *(Config(m, 0, n, w, s) for m, n, w, s in shapes)]


def past_gradients_config(p: Past) -> Config:
    if not p.half:
        return Config(32 if p.widest <= 64 else 16, 0, 1, 4, 1)
    if not p.hopper:
        return Config(64, 0, 1, 4 if p.widest <= 64 else 8, 2)
    return Config(128, 0, 4, 4, 3) if p.widest <= 64 else Config(128, 0, 2, 8, 2)


def past_gradients_candidates(p: Past) -> list[Config]:
    shapes = [(128, 4, 4, 3), (256, 4, 8, 3), (256, 4, 8, 2), (128, 2, 4, 4), (64, 4, 4, 3), (128, 4, 4, 2), (64, 4, 4, 2),
              (128, 2, 4, 2), (128, 2, 8, 2)]  # fmt: skip
    if not p.half:
        shapes = [(16, 1, 4, 1), (32, 1, 4, 1), (32, 2, 8, 1), (64, 1, 8, 1)]
    return [past_gradients_config(p), *(Config(m, 0, n, w, s) for m, n, w, s in shapes)]


def moment_config(p: Fold) -> Config:
    columns = power_of_2(max(16, p.d))
    if p.half and not p.hopper:
        return Config(32, min(32, columns), 0, 4, 2)
    return Config(64 if p.half else 16, min(64, columns), 0, 4, 2)


def key_config(p: Problem) -> Config:
    if not p.half:
        if p.widest > 64:
            return Config(16, 16, 0, 8, 1)
        return Config(16, 16, 0, 4, 1)
    if not p.hopper:
        return Config(32, 32, 0, 4, 1) if p.widest <= 64 else Config(32, 16, 0, 8, 1)
    if p.widest > 128:
        return Config(32, 32, 0, 8, 1)
    if p.narrow:
        return Config(32, 32, 0, 4, 1)
    return Config(64, 32, 0, 4, 1) if p.widest <= 64 else Config(64, 16, 0, 8, 1)


def key_candidates(p: Problem) -> list[Config]:
    shapes = [(64, 32, 4, 1), (64, 64, 4, 1), (128, 64, 8, 1), (128, 32, 8, 1), (64, 32, 4, 2), (64, 16, 4, 3)]
    if not p.half:
        shapes = [(16, 16, 4, 1), (32, 16, 4, 1), (32, 32, 8, 1)]
    return [key_config(p), *(Config(m, n, 0, w, s) for m, n, w, s in shapes)]


def step_config(p: Problem) -> Config:
    """Rows and columns of the state at a time."""
    return Config(128, 32, 0, 8, 3) if p.e > 16 else Config(128, 16, 0, 4, 3) if p.e > 8 else Config(128, 8, 0, 4, 3)


def step_candidates(p: Problem) -> list[Config]:
    shapes = [(128, 32, 4, 3), (256, 16, 4, 3), (64, 16, 4, 4), (64, 64, 4, 3), (256, 16, 8, 3), (64, 32, 4, 3), (128, 64, 8, 3)]
    return [step_config(p), *(Config(m, n, 0, w, s) for m, n, w, s in shapes)]
