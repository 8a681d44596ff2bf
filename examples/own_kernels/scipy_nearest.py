"""SciPy's k-d tree as the CPU kernel of a k-nearest-neighbour search, in one operator with CuPy's and cuML's for GPUs.

    distances, indices = nearest(queries, points, k)  # [M, k] each, nearest first

The gradient of the distances is written once, from the indices that the search found, and serves all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

import sonde


def reference(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if not 1 <= queries.shape[1] <= 3:
        raise ValueError(f"nearest: points must have one to three coordinates; got {queries.shape[1]}")
    squares = (queries[:, None] - points).square().sum(-1)
    squares, indices = squares.topk(k, largest=False)
    apart = squares > 0
    return torch.where(apart, squares.where(apart, 1).sqrt(), 0), indices  # the derivative at zero is zero


@sonde.operator("external::nearest", reference=reference, no_grad=(1,), saved=(0, 1))
def nearest(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]: ...


@nearest.register("scipy", deterministic=True)
def with_a_tree(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    from scipy.spatial import cKDTree  # without SciPy, the other implementations still work

    tree = cKDTree(points.double().numpy())
    distances, indices = tree.query(queries.double().numpy(), k=range(1, k + 1))
    wide = torch.promote_types(queries.dtype, points.dtype)
    return torch.from_numpy(distances).to(wide), torch.from_numpy(indices)


nearest.register("cupy", "own_kernels.cupy_nearest:nearest", deterministic=True)  # imported by the first call that needs it
nearest.register("cuml", "own_kernels.cuml_nearest:nearest")


def gradients(grad: Tensor, queries: Tensor, points: Tensor, k: int, distances: Tensor, indices: Tensor, *, needs):
    apart = distances > 0
    slopes = torch.where(apart, grad / distances.where(apart, 1), 0)[..., None] * (queries[:, None] - points[indices])
    d_points = None
    if needs.points:
        d_points = torch.zeros(points.shape, dtype=slopes.dtype, device=slopes.device)
        d_points = d_points.index_add(0, indices.flatten(), slopes.flatten(0, 1), alpha=-1).to(points.dtype)
    return slopes.sum(1).to(queries.dtype) if needs.queries else None, d_points


for impl in ("scipy", "cupy", "cuml"):
    nearest.register_backward(impl, gradients, deterministic=True)  # index_add follows torch's deterministic mode
