"""Labelled inputs of ``knn``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search import cases as clouds

SMALL, BENCH = clouds.SMALL, clouds.KNN
TARGETS = clouds.TARGETS


def make(k: int = 3, **sizes) -> tuple:
    """Arguments of ``knn``."""
    made = clouds.make(**sizes)
    return made["queries"], made["points"], k, *made["options"]


def eager(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, as a user would write it: distances in chunks, and the smallest of each row."""
    step = clouds.queries_at_once(points.shape[-2])
    found = [torch.cdist(q, points).topk(k, largest=False) for q in queries.split(step, -2)]
    return torch.cat([d for d, _ in found], -2), torch.cat([i for _, i in found], -2)


def count(M: int, N: int, k: int, dims: int = 3, B: int = 1, **_) -> dict[str, int]:
    """Elements that must be read and written at least once, and neighbours found."""
    return dict(read=B * (M + N) * dims, written=2 * B * M * k, taps=B * M * k)
