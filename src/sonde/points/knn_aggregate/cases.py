"""Labelled inputs of ``knn_aggregate``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search import cases as clouds

SMALL, BENCH = {**clouds.SMALL, **clouds.WEIGHTED}, clouds.KNN
TARGETS = clouds.TARGETS


def make(k: int = 3, **sizes) -> tuple:
    """Arguments of ``knn_aggregate``."""
    made = clouds.make(**sizes)
    return made["queries"], made["points"], made["features"], k, made["sigma"], *made["options"]


def eager(queries: Tensor, points: Tensor, features: Tensor, k: int, sigma: float | Tensor) -> Tensor:
    """Plain PyTorch, for ``[M, D]``, ``[N, D]``, ``[N, F]``: distances in chunks, and the smallest of each row."""
    out = []
    for q in queries.split(clouds.queries_at_once(points.shape[0])):
        distances, indices = torch.cdist(q, points).topk(k, largest=False)
        weights = torch.softmax(-distances / sigma, -1).to(features.dtype)
        out.append((weights[..., None] * features[indices]).sum(-2))
    return torch.cat(out)


def count(M: int, N: int, k: int, F: int, dims: int = 3, B: int = 1, **_) -> dict[str, int]:
    """Elements that must be read and written at least once, and features of neighbours."""
    return dict(read=B * ((M + N) * dims + N * F), written=B * M * F, taps=B * M * k * F)
