"""Triton implementation of ``ms_deform_attn``: its kernels are in ``gpu_kernels``, its passes in ``_pyramid.gpu``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...op.plan import Kernel
from .._pyramid import gpu as passes
from .._pyramid.gpu_levels import Layout, Levels
from .._pyramid.gpu_segments import Problem as Segments
from .gpu_configs import Problem
from .gpu_kernels import attend, attend_gradients

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do


def decide_forward(value: Tensor, spatial_shapes, level_starts, locations: Tensor, weights: Tensor, levels, logits: bool):
    T = (value, spatial_shapes, level_starts, locations, weights)
    return passes.decide_forward(THIS, T, levels, logits, FORCE_INT64)


def decide_backward(
    grad: Tensor, value: Tensor, spatial_shapes, level_starts, locations: Tensor, weights: Tensor, levels, logits: bool, *,
    needs: Sequence[bool], deterministic: bool,
):  # fmt: skip
    T = (value, spatial_shapes, level_starts, locations, weights)
    return passes.decide_backward(THIS, grad, T, levels, logits, tuple(needs), deterministic, FORCE_INT64)


def plan(
    value: Tensor, spatial_shapes, level_starts, locations: Tensor, weights: Tensor, levels, logits: bool, *,
    needs: Sequence[bool], deterministic: bool,
) -> list[Kernel]:  # fmt: skip
    T = (value, spatial_shapes, level_starts, locations, weights)
    return passes.plan(THIS, T, levels, logits, needs, deterministic, FORCE_INT64)


def _shape(value: Tensor, weights: Tensor) -> tuple[int, int, int]:
    B, _, h, D = value.shape
    return B, weights.shape[1], h * D


def _problem(
    value: Tensor, weights: Tensor, levels: Levels, layout: Layout, wide: torch.dtype, logits: bool, gradients: Sequence[int]
) -> Problem:
    (B, S, h, D), Q, (L, P) = value.shape, weights.shape[1], weights.shape[3:]
    if not L * P:
        L, P, logits = 0, 1, False
    return Problem(
        B, S, Q, h, D, L, P, layout.row, layout.batch, layout.vector, value.element_size(), logits, *levels.constants, wide,
        layout.int64, bool(gradients),
    )  # fmt: skip


def _segments(value: Tensor, weights: Tensor, levels: Levels, layout: Layout, wide: torch.dtype, logits: bool) -> Segments:
    (B, S, h, D), Q, (L, P) = value.shape, weights.shape[1], weights.shape[3:]
    return Segments(B, S, Q, h, D, 1, L * P, P, 1, levels, False, wide, layout.int64)


THIS = passes.Operator(("value", "locations", "weights"), _shape, _problem, _segments, attend, attend_gradients, soft=True)
