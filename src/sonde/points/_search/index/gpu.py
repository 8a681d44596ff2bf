"""Triton implementation of ``point_index``; its kernels are in ``gpu_kernels``."""

from __future__ import annotations

from torch import Tensor

from ....op.plan import Kernel
from . import gpu_kernels as index


def forward(points: Tensor, point_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return index.build(points, point_offsets)


def backward(*_args, needs: list[bool], deterministic: bool) -> list[Tensor]:
    return []


def plan(points: Tensor, point_offsets: Tensor | None, *, needs: list[bool], deterministic: bool) -> list[Kernel]:
    return index.plan(points, point_offsets)
