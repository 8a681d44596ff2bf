"""The problem that one launch of an operator of symmetric powers solves, and its configurations."""

from __future__ import annotations

from typing import NamedTuple

import torch

Strides = tuple[int, int, int]  # of batch, row and column


class Problem(NamedTuple):
    """φ of x [B, R, d], and the operand that it is multiplied by."""

    B: int
    R: int
    N: int  # columns of the product; 0 where there is none
    d: int
    D: int
    power: int
    T: int
    scaled: bool
    x: Strides
    y: Strides  # of φ's other operand, [D, N] or [R, N]; of a gradient's first factor
    z: Strides  # of the addend; of a gradient's second factor
    units: tuple[int, ...]  # divisors of the row and column strides of x, y and z, and of N; 0 stands for a stride of 1
    common: torch.dtype
    wide: torch.dtype
    precision: str
    far: bool
    factors: tuple[float, float] = (1.0, 0.0)  # alpha and beta
    straight: bool = True  # a gradient's result is contiguous along rows, not along columns

    @property
    def paired(self) -> bool:
        """Whether tiles of φ are outer products of two aligned pieces of a row, so that no tables are needed."""
        return self.power == 2 and self.T in (4, 8, 16)


class Config(NamedTuple):
    block_r: int  # rows of x
    block_n: int  # columns of the product
    block_d: int  # columns of φ; T·T for paired tiles
    num_warps: int
    num_stages: int


def _half(p: Problem) -> bool:
    return p.common in (torch.float16, torch.bfloat16)


def expand_config(p: Problem) -> Config:
    return Config(64, 0, p.T * p.T, 4, 2) if p.paired else Config(4, 0, 512, 4, 2)


def expand_candidates(p: Problem) -> list[Config]:
    if p.paired:
        span = p.T * p.T
        return [expand_config(p), *(Config(r, 0, span, w, 2) for r, w in ((128, 4), (32, 4), (64, 2), (128, 8), (256, 8), (32, 1)))]
    shapes = [(16, 128, 4), (8, 256, 4), (1, 1024, 4), (8, 128, 2), (2, 1024, 4), (1, 2048, 8)]
    return [expand_config(p), *(Config(r, 0, d, w, 2) for r, d, w in shapes)]


def times_config(p: Problem) -> Config:
    if p.paired:
        span = p.T * p.T
        if not _half(p):
            return Config(32, 32, span, 4, 2)
        return Config(256, 64, span, 8, 3) if p.R >= 256 and p.T < 16 else Config(128, 64, span, 4, 3 if p.T < 16 else 2)
    return Config(64, 64, 32, 4, 2) if _half(p) else Config(32, 32, 16, 4, 2)


def times_candidates(p: Problem) -> list[Config]:
    span = p.T * p.T if p.paired else 32
    shapes = [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (256, 64, 8, 3), (128, 128, 8, 3), (64, 128, 4, 3), (64, 32, 4, 3),
              (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 4), (128, 64, 4, 4), (256, 64, 8, 2)]  # fmt: skip
    if not _half(p):
        shapes = [(32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (16, 32, 2, 2)]
    return [times_config(p), *(Config(r, n, span, w, s) for r, n, w, s in shapes)]


def sums_config(p: Problem) -> Config:
    if p.paired:
        span = p.T * p.T
        return Config(64, 64, span, 4, 3 if p.T < 16 else 2) if _half(p) else Config(16, 32, span, 4, 2)
    return Config(32, 64, 64, 4, 2) if _half(p) else Config(16, 32, 32, 4, 2)


def sums_candidates(p: Problem) -> list[Config]:
    spans = [p.T * p.T] if p.paired else [64, 32, 128]
    shapes = [(64, 64, 4, 3), (32, 64, 4, 3), (128, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3), (32, 64, 4, 4), (64, 128, 4, 3),
              (128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 4, 2), (32, 32, 4, 3)]  # fmt: skip
    if not _half(p):
        shapes = [(16, 32, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2), (32, 64, 8, 2)]
    return [sums_config(p), *(Config(r, n, span, w, s) for span in spans for r, n, w, s in shapes)]


def gradient_config(p: Problem) -> Config:
    if p.N == 0:
        return Config(32, 0, 32, 4, 2)
    return Config(16, 32, 32, 4, 2) if _half(p) else Config(16, 32, 16, 4, 2)


def gradient_candidates(p: Problem) -> list[Config]:
    shapes = [
        (32, 64, 32, 4, 2),
        (64, 64, 32, 4, 2),
        (64, 64, 64, 4, 2),
        (32, 32, 32, 4, 2),
        (16, 32, 32, 4, 2),
        (64, 64, 32, 8, 2),
    ]
    return [gradient_config(p), *(Config(*shape) for shape in shapes)]


def paired_gradient_config(p: Problem) -> Config:
    span = p.T * p.T
    return Config(64, 64, span, 4, 2) if _half(p) else Config(16, 16, span, 4, 1)


def paired_gradient_candidates(p: Problem) -> list[Config]:
    span = p.T * p.T
    shapes = [(64, 64, 4, 2), (64, 64, 4, 1), (128, 64, 8, 2), (64, 64, 4, 3), (128, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2),
              (128, 64, 8, 3)]  # fmt: skip
    if not _half(p):
        shapes = [(16, 16, 8, 1), (16, 32, 4, 1), (32, 16, 8, 1), (16, 64, 8, 1)]
    return [paired_gradient_config(p), *(Config(r, n, span, w, s) for r, n, w, s in shapes)]
