"""``deformable_aggregation`` on CPUs: the units of ``_pyramid.cpu`` are anchors, its places are points as one camera sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._pyramid import cpu


def _problem(features: Tensor, weights: Tensor, drop: bool) -> cpu.Problem:
    (B, S, C), (A, P, cams, L, G) = features.shape, weights.shape[1:]
    return cpu.Problem(B, S, A, 1, G, C // max(1, G), P * cams, L, 1, drop, False)


THIS = cpu.Member(("features", "locations", "weights"), _problem)


def forward_pass(*args: Any) -> cpu.ByThreads | cpu.ReadLevels:
    return cpu.forward_pass(THIS, *args)


def backward_pass(*args: Any, needs: Sequence[bool], deterministic: bool) -> cpu.ByThreads | cpu.ReadLevels:
    return cpu.backward_pass(THIS, *args, needs=needs)
