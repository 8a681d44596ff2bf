"""The problem that one launch of attention solves, and its configurations."""

from __future__ import annotations

from typing import NamedTuple

import torch

Strides = tuple[int, int, int]  # of batch, head and row; rows are contiguous


class Problem(NamedTuple):
    """What a launch of softmax attention or of its gradients computes; ``Config`` says how."""

    B: int
    h: int  # heads of keys and values
    groups: int  # heads of queries for each of them
    T: int  # queries
    S: int  # keys
    d: int
    e: int
    causal: bool
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    grad: Strides
    units: tuple[int, ...]  # divisors of the row strides of q, k, v, out and grad
    common: torch.dtype  # of the fragments, as they are multiplied
    wide: torch.dtype  # of the accumulator
    precision: str  # of products
    far: bool  # offsets need 64 bits
    scale: float
    described: bool  # queries, keys and values can be read through descriptors
    hopper: bool  # elsewhere tiles are smaller

    @property
    def half(self) -> bool:
        return self.common.itemsize == 2

    @property
    def widest(self) -> int:
        return max(self.d, self.e)


class Config(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    described: bool = False


def forward_config(p: Problem) -> Config:
    if not p.half:
        scalar = p.wide == torch.float64 and not p.hopper  # most others have no matrix units for float64
        return Config(32, 32, 4, 1) if p.widest <= 64 and not scalar else Config(16, 16, 4, 1)
    if not p.hopper and 64 < p.widest <= 128:
        return Config(64, 32, 4, 2)
    if min(p.units[:3]) < 8:  # elements are loaded one at a time
        return Config(64, 32, 4, 1) if p.widest <= 64 else Config(32, 32, 4, 1)
    if p.described and p.widest <= 128:
        return Config(64, 64, 4, 3, True)
    if p.widest <= 64:
        return Config(128, 64, 8, 3)
    return Config(128, 64, 8, 2) if p.widest <= 128 else Config(32, 32, 4, 1)


def forward_candidates(p: Problem) -> list[Config]:
    shapes = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 3), (64, 128, 4, 2),
              (64, 32, 4, 2)]  # fmt: skip
    if not p.half:
        shapes = [(32, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 2), (64, 32, 8, 2), (16, 32, 4, 1), (16, 16, 2, 1)]
    described = [
        (64, 64, 4, 2),  # with d = 64, one more block fits on a multiprocessor than with three stages
        (128, 128, 8, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 3),
        (128, 64, 4, 2),
        (64, 128, 4, 2),
        (64, 64, 4, 3),
    ]
    found = [Config(*s, True) for s in described] if p.described else []
    return [forward_config(p), *found, *(Config(*s) for s in shapes)]


def query_config(p: Problem) -> Config:
    """For the gradients of queries: queries stay in registers, the loop runs over keys."""
    if not p.half:
        return Config(16, 16, 8, 1)
    if not p.hopper:
        return Config(64, 32, 4, 2) if p.widest <= 64 else Config(32 if p.widest <= 128 else 16, 32, 4, 1)
    if min(p.units[:3]) >= 8 and p.widest <= 128:
        return Config(64, 64, 4, 3) if p.widest <= 64 else Config(128, 64, 8, 2)
    return key_config(p)


def key_config(p: Problem) -> Config:
    """For the gradients of keys and values: these stay in registers, the loop runs over queries."""
    if not p.half or (p.widest > 128 and not p.hopper):
        return Config(16, 16, 4, 1)
    if min(p.units[:3]) < 8 or (p.widest > 64 and not p.hopper):
        return Config(32, 32, 4, 1)
    if p.widest <= 64:
        return Config(64 if p.hopper else 32, 64, 4, 1)
    if p.widest <= 128:
        return Config(16, 64, 4, 1)  # 64 queries at a time would be a third faster, but spill
    return Config(32, 32, 8, 1)


def query_candidates(p: Problem) -> list[Config]:
    return [query_config(p), *_candidates(p)]


def key_candidates(p: Problem) -> list[Config]:
    aligned = p.half and min(p.units[:3]) >= 8 and p.widest <= 128
    wide = [Config(64, 128, 8, 1) if p.widest <= 64 else Config(32, 128, 8, 1)] if aligned else []
    return [key_config(p), *wide, *_candidates(p)]


def _candidates(p: Problem) -> list[Config]:
    shapes = [(64, 64, 4, 1), (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (32, 64, 4, 2), (32, 128, 8, 2)]
    if p.widest > 64:
        shapes = [(64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 8, 1), (16, 64, 4, 1), (128, 64, 8, 2), *shapes]
    if not p.half:
        shapes = [(16, 16, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1)]
    return [Config(*s) for s in shapes]
