"""NVIDIA Warp: the radius aggregation of PhysicsNeMo's tutorial, with a hash grid, and its gradient written by hand.

    out_i = Σ_j w_ij · features_j,   w_ij = exp(−d_ij / σ) / Σ_k exp(−d_ik / σ),   over the points with d_ij ≤ radius

The tutorial differentiates its kernel with Warp's tape, which replays the kernel line by line. For the division by the
normaliser it does not run the loop over neighbours again, so that adjoint is missing. Here it is Δ_i = grad_i · out_i:

    ∂features_j = Σ_i w_ij · grad_i,   ∂d_ij = −(w_ij / σ) · (grad_i · features_j − Δ_i)
"""

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

import sonde

wp.config.quiet = True
wp.init()


@wp.func
def nearest(grid: wp.uint64, points: wp.array(dtype=wp.vec3), q: wp.vec3, radius: float) -> float:
    """The smallest distance in the ball, or the radius. It is subtracted, so that not all exponentials underflow."""
    least = float(radius)
    for j in wp.hash_grid_query(grid, q, radius):
        least = wp.min(least, wp.length(q - points[j]))
    return least


@wp.func
def normaliser(grid: wp.uint64, points: wp.array(dtype=wp.vec3), q: wp.vec3, radius: float, sigma: float, least: float) -> float:
    total = float(0.0)
    for j in wp.hash_grid_query(grid, q, radius):
        d = wp.length(q - points[j])
        if d <= radius:
            total += wp.exp((least - d) / sigma)
    return total


@wp.kernel
def forward(
    grid: wp.uint64, queries: wp.array(dtype=wp.vec3), points: wp.array(dtype=wp.vec3), features: wp.array2d(dtype=float),
    radius: float, sigma: float, out: wp.array2d(dtype=float),
):  # fmt: skip
    i = wp.tid()
    q = queries[i]
    least = nearest(grid, points, q, radius)
    total = normaliser(grid, points, q, radius, sigma, least)
    for j in wp.hash_grid_query(grid, q, radius):
        d = wp.length(q - points[j])
        if d <= radius:
            w = wp.exp((least - d) / sigma) / total
            for f in range(features.shape[1]):
                out[i, f] = out[i, f] + w * features[j, f]


@wp.kernel
def backward(
    grid: wp.uint64, queries: wp.array(dtype=wp.vec3), points: wp.array(dtype=wp.vec3), features: wp.array2d(dtype=float),
    radius: float, sigma: float, out: wp.array2d(dtype=float), grad: wp.array2d(dtype=float),
    d_queries: wp.array(dtype=wp.vec3), d_points: wp.array(dtype=wp.vec3), d_features: wp.array2d(dtype=float),
):  # fmt: skip
    i = wp.tid()
    q = queries[i]
    least = nearest(grid, points, q, radius)
    total = normaliser(grid, points, q, radius, sigma, least)
    mean = float(0.0)
    for f in range(features.shape[1]):
        mean += grad[i, f] * out[i, f]
    for j in wp.hash_grid_query(grid, q, radius):
        away = q - points[j]
        d = wp.length(away)
        if d <= radius:
            w = wp.exp((least - d) / sigma) / total
            a = float(0.0)
            for f in range(features.shape[1]):
                a += grad[i, f] * features[j, f]
                wp.atomic_add(d_features, j, f, w * grad[i, f])
            if d > 0.0:
                step = -w / sigma * (a - mean) / d * away
                wp.atomic_add(d_queries, i, step)
                wp.atomic_add(d_points, j, -step)


def reference(queries: Tensor, points: Tensor, features: Tensor, radius: float, sigma: float) -> Tensor:
    if queries.shape[1] != 3 or points.shape[1] != 3:
        raise ValueError(f"radius_aggregate: coordinates must be [.., 3]; got {list(queries.shape)} and {list(points.shape)}")
    squares = (queries[:, None] - points).square().sum(-1)
    inside = squares <= radius * radius
    apart = inside & (squares > 0)
    distances = torch.where(apart, squares.where(apart, 1).sqrt(), 0)
    logits = torch.where(inside, -distances / sigma, -torch.inf)
    some = inside.any(1, keepdim=True)
    return torch.where(some, logits.where(some, 0).softmax(1), 0).to(features.dtype) @ features


@sonde.operator("external::radius_aggregate", reference=reference, saved=(0,))
def radius_aggregate(queries: Tensor, points: Tensor, features: Tensor, radius: float, sigma: float) -> Tensor: ...


class Arrays:
    """Warp's views of float32 tensors, the grid, and the stream to launch on."""

    def __init__(self, queries: Tensor, points: Tensor, radius: float) -> None:
        self.device, self.on_gpu = wp.device_from_torch(queries.device), queries.is_cuda
        self.queries, self.points = self.vectors(queries), self.vectors(points)
        with self.stream():
            self.grid = wp.HashGrid(32, 32, 32, self.device)
            self.grid.build(self.points, radius)

    def stream(self):
        stream = wp.stream_from_torch(torch.cuda.current_stream()) if self.on_gpu else None
        return wp.ScopedStream(stream)

    @staticmethod
    def vectors(x: Tensor):
        return wp.from_torch(x.float().contiguous(), dtype=wp.vec3)

    def launch(self, kernel, *inputs) -> None:
        with self.stream():
            wp.launch(kernel, len(self.queries), [self.grid.id, self.queries, self.points, *inputs], device=self.device)


@radius_aggregate.register("warp")
def _(queries, points, features, radius, sigma):
    out = torch.zeros(len(queries), features.shape[1], device=queries.device)
    if len(queries) and len(points):
        arrays = Arrays(queries, points, radius)
        arrays.launch(forward, wp.from_torch(features.float().contiguous()), radius, sigma, wp.from_torch(out))
    return out.to(features.dtype)


@radius_aggregate.register_backward("warp")
def _(grad, queries, points, features, radius, sigma, out):
    d_queries, d_points, d_features = (torch.zeros(x.shape, device=x.device) for x in (queries, points, features))
    if len(queries) and len(points):
        given = [wp.from_torch(x.float().contiguous()) for x in (features, out, grad)]
        vectors = [wp.from_torch(x, dtype=wp.vec3) for x in (d_queries, d_points)]
        arrays = Arrays(queries, points, radius)
        arrays.launch(backward, given[0], radius, sigma, *given[1:], *vectors, wp.from_torch(d_features))
    return d_queries.to(queries.dtype), d_points.to(points.dtype), d_features.to(features.dtype)
