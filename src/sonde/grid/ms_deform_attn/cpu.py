"""``ms_deform_attn`` on CPUs: the units of ``_pyramid.cpu`` are heads of queries, its places are their points in the levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._pyramid import cpu


def _problem(value: Tensor, weights: Tensor, logits: bool) -> cpu.Problem:
    (B, S, h, D), (Q, L, P) = value.shape, (weights.shape[1], *weights.shape[3:])
    return cpu.Problem(B, S, Q, h, 1, D, L * P, 1, P, False, logits)


THIS = cpu.Member(("value", "locations", "weights"), _problem)


def forward_pass(*args: Any) -> cpu.ByThreads | cpu.ReadLevels:
    return cpu.forward_pass(THIS, *args)


def backward_pass(*args: Any, needs: Sequence[bool], deterministic: bool) -> cpu.ByThreads | cpu.ReadLevels:
    return cpu.backward_pass(THIS, *args, needs=needs)
