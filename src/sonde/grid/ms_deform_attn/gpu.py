"""Triton implementation of ``ms_deform_attn``: its kernels are in ``gpu_kernels``, its passes in ``_pyramid.gpu``."""

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
from .gpu_configs import Problem
from .gpu_kernels import attend, attend_gradients

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do


def forward_pass(*args: Any) -> Pass | ReadLevels:
    return passes.forward_pass(THIS, *args, int64=FORCE_INT64)


def backward_pass(*args: Any, needs: Sequence[bool], deterministic: bool) -> Pass | ReadLevels:
    return passes.backward_pass(THIS, *args, int64=FORCE_INT64, needs=needs, deterministic=deterministic)


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


THIS = passes.Member(("value", "locations", "weights"), _shape, _problem, _segments, attend, attend_gradients, soft=True)
