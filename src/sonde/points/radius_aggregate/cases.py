"""Labelled inputs of ``radius_aggregate``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search import cases as clouds

SMALL, BENCH = {**clouds.SMALL, **clouds.WEIGHTED}, clouds.RADIUS
TARGETS = clouds.TARGETS


def make(radius: float = 1.2, **sizes) -> tuple:
    """Arguments of ``radius_aggregate``."""
    made = clouds.make(**sizes)
    return made["queries"], made["points"], made["features"], radius, made["sigma"], *made["options"]


def eager(queries: Tensor, points: Tensor, features: Tensor, radius: float, sigma: float | Tensor) -> Tensor:
    """Plain PyTorch, for ``[M, D]``, ``[N, D]``, ``[N, F]``: a dense masked softmax, in chunks."""
    out = []
    for q in queries.split(clouds.queries_at_once(points.shape[0])):
        distances = torch.cdist(q, points)
        weights = torch.softmax(torch.where(distances <= radius, -distances / sigma, -torch.inf), -1)
        out.append(weights.nan_to_num(0).to(features.dtype) @ features)
    return torch.cat(out)


def count(M: int, N: int, F: int, dims: int = 3, B: int = 1, near: int = 1, **_) -> dict[str, int]:
    """Elements that must be read and written at least once, and features of neighbours; a query has about `near` neighbours."""
    return dict(read=B * ((M + N) * dims + N * F), written=B * M * F, taps=near * B * M * F)
