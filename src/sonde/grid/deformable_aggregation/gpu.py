"""Triton implementation of ``deformable_aggregation``: kernels are in ``gpu_kernels``, passes in ``_pyramid.gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...jit.steps import Pass
from .._pyramid import gpu as passes
from .._pyramid.gpu_levels import Layout, Levels
from .._pyramid.gpu_segments import Problem as Segments
from .._pyramid.levels import ReadLevels
from .gpu_configs import Problem, slices_of
from .gpu_kernels import aggregate, aggregate_gradients, mark_rows, total

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do


def forward_pass(*args: Any) -> Pass | ReadLevels:
    return passes.forward_pass(THIS, *args, int64=FORCE_INT64)


def backward_pass(*args: Any, needs: Sequence[bool], deterministic: bool) -> Pass | ReadLevels:
    return passes.backward_pass(THIS, *args, int64=FORCE_INT64, needs=needs, deterministic=deterministic)


def _shape(features: Tensor, weights: Tensor) -> tuple[int, int, int]:
    return features.shape[0], weights.shape[1], features.shape[2]


def _problem(
    features: Tensor, weights: Tensor, levels: Levels, layout: Layout, wide: torch.dtype, drop: bool, gradients: Sequence[int]
) -> Problem:
    (B, S, C), (_, A, P, cams, L, G) = features.shape, weights.shape
    N = P * cams
    return Problem(
        B, S, A, N, max(1, cams), L, C, G, layout.row, layout.batch, layout.vector, features.element_size(),
        1 if gradients else slices_of(A, N), drop, *levels.constants, wide, layout.int64, bool(gradients), 0 in gradients,
    )  # fmt: skip


def _segments(features: Tensor, weights: Tensor, levels: Levels, layout: Layout, wide: torch.dtype, drop: bool) -> Segments:
    (B, S, C), (_, A, P, cams, L, G) = features.shape, weights.shape
    return Segments(B, S, A, 1, C, max(1, G), P * cams * L, 1, max(1, L), levels, drop, wide, layout.int64)


THIS = passes.Member(
    ("features", "locations", "weights"), _shape, _problem, _segments, aggregate, aggregate_gradients, total=total, mark=mark_rows
)
