"""Labelled inputs of ``radius_neighbors``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search import cases as clouds

SMALL = clouds.SMALL
BENCH = {name: dict(sizes, k=16) for name, sizes in clouds.RADIUS.items()}
TARGETS = clouds.TARGETS


def make(k: int = 3, radius: float = 1.2, **sizes) -> tuple:
    """Arguments of ``radius_neighbors``."""
    made = clouds.make(**sizes)
    return made["queries"], made["points"], radius, k, *made["options"]


def eager(queries: Tensor, points: Tensor, radius: float, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch, as a user would write it."""
    made = []
    for q in queries.split(clouds.queries_at_once(points.shape[-2]), -2):
        distances = torch.cdist(q, points)
        d, i = distances.topk(k, largest=False)
        inside = d <= radius
        more = ((distances <= radius).sum(-1) - k).clamp(min=0)
        made.append((torch.where(inside, d, torch.inf), torch.where(inside, i, -1), more))
    near, indices, truncated = zip(*made)
    return torch.cat(near, -2), torch.cat(indices, -2), torch.cat(truncated, -1)


def count(M: int, N: int, k: int = 16, dims: int = 3, B: int = 1, **_) -> dict[str, int]:
    """Elements that must be read and written at least once, and the most neighbours that can be found."""
    return dict(read=B * (M + N) * dims, written=2 * B * M * k, taps=B * M * k)
