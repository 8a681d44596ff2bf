"""Labelled inputs of ``radius_search``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._search import cases as clouds

SMALL, BENCH = clouds.SMALL, clouds.RADIUS
TARGETS = clouds.TARGETS


def make(radius: float = 1.2, **sizes) -> tuple:
    """Arguments of ``radius_search``."""
    made = clouds.make(**sizes)
    return made["queries"], made["points"], radius, *made["options"]


def eager(queries: Tensor, points: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch, as a user would write it, for ``[M, D]`` and ``[N, D]``."""
    counts, indices, distances = [], [], []
    for q in queries.split(clouds.queries_at_once(points.shape[-2])):
        d = torch.cdist(q, points)
        row, column = (d <= radius).nonzero(as_tuple=True)
        near = d[row, column]
        order = near.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        counts.append(torch.bincount(row, minlength=q.shape[0]))
        indices.append(column[order])
        distances.append(near[order])
    offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
    return offsets, torch.cat(indices), torch.cat(distances)


def count(M: int, N: int, dims: int = 3, B: int = 1, **_) -> dict[str, int]:
    """Elements that must be read and written at least once; the number of neighbours is not known in advance."""
    return dict(read=B * (M + N) * dims, written=B * M, taps=B * M)
