"""Point clouds as models have them, in any size: used by tests, benchmarks and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SOME: dict[str, Any] = dict(B=2, M=5, N=23, dims=3, F=5, k=3)
# edge cases, small enough for the interpreter
SMALL = {
    "odd_sizes": _SOME,
    "one_of_each": dict(B=1, M=1, N=1, dims=1, F=1, k=1),
    "plane": dict(_SOME, B=1, M=3, dims=2, N=70),
    "line": dict(_SOME, B=1, M=3, dims=1, N=70),
    "leaves": dict(_SOME, B=1, M=3, N=100, k=7),
    "wide": dict(_SOME, B=1, M=3, F=148),
    "many_neighbours": dict(_SOME, B=1, M=3, N=80, k=40),
    "few_points": dict(_SOME, N=2, k=5),
    "lines": dict(_SOME, layout="lines"),
    "one_pixel": dict(_SOME, M=7, layout="one_pixel"),
    "hostile": dict(_SOME, N=70, layout="hostile"),
    "one_segment_empty": dict(_SOME, B=1, N=70, layout="ragged"),
    "no_batch": dict(_SOME, B=0),
    "no_queries": dict(_SOME, M=0),
    "no_points": dict(_SOME, N=0),
}
WEIGHTED = {  # for operators with features
    "sigma": dict(_SOME, sigma_shape=()),
    "sigma_of_rows": dict(_SOME, N=70, sigma_shape=(2,)),
    "no_features": dict(_SOME, F=0),
}
# these must compile without spills, on one architecture or everywhere; enough points for three levels of boxes
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(M=50, N=140_000, dims=3, F=25, k=7, sigma_shape=(), radius=0.5), dtype="float32", everywhere=True),
    dict(sizes=dict(M=50, N=140_000, dims=2, F=150, k=64, sigma_shape=(), radius=0.5, layout="ragged"), dtype="bfloat16"),
    dict(sizes=dict(M=50, N=140_000, dims=3, F=3, k=16, sigma_shape=(), radius=0.5), dtype="float64"),
]

# coordinates that must neither spread to other queries nor cause out-of-bounds reads
HOSTILE = [float("nan"), float("inf"), -float("inf"), 40.0, 0.0, 0.5]

# benchmarks: M queries on N points
KNN = {
    "tutorial": dict(M=27_000, N=100_000, F=25, k=7, layout="tutorial"),
    "uniform": dict(M=100_000, N=300_000, F=25, k=7, layout="uniform_cube"),
    "ellipsoid": dict(M=100_000, N=300_000, F=25, k=7, layout="ellipsoid"),
    "clusters": dict(M=100_000, N=300_000, F=25, k=7, layout="clusters"),
    "geotransolver": dict(M=200_000, N=300_000, F=32, k=7, layout="near_surface"),
    "domino": dict(M=524_288, N=300_000, F=16, k=7, layout="box_of_surface"),
}
# queries have about `near` neighbours each
RADIUS = {
    "tutorial": dict(M=27_000, N=25_000, F=25, radius=0.1, near=4, sigma=0.1, layout="tutorial"),
    "tutorial_far": dict(M=27_000, N=25_000, F=25, radius=0.2, near=32, sigma=0.1, layout="tutorial"),
    "tutorial_wide": dict(M=27_000, N=25_000, F=128, radius=0.2, near=32, sigma=0.1, layout="tutorial"),
    "uniform": dict(M=100_000, N=300_000, F=25, radius=0.05, near=19, sigma=0.1, layout="uniform_cube"),
    "ellipsoid": dict(M=100_000, N=300_000, F=25, radius=0.02, near=106, sigma=0.1, layout="ellipsoid"),
    "clusters": dict(M=100_000, N=300_000, F=25, radius=0.002, near=479, sigma=0.1, layout="clusters"),
    "geotransolver": dict(M=200_000, N=300_000, F=32, radius=0.02, near=62, sigma=0.1, layout="near_surface"),
    "domino_0.01": dict(M=524_288, N=300_000, F=16, radius=0.01, near=1, sigma=0.1, layout="box_of_surface"),
    "domino_0.02": dict(M=524_288, N=300_000, F=16, radius=0.02, near=3, sigma=0.1, layout="box_of_surface"),
    "domino_0.05": dict(M=524_288, N=300_000, F=16, radius=0.05, near=52, sigma=0.1, layout="box_of_surface"),
    "domino_0.1": dict(M=524_288, N=300_000, F=16, radius=0.1, near=416, sigma=0.1, layout="box_of_surface"),
}


def cloud(
    M: int, N: int, dims: int = 3, B: int = 1, *, layout: str = "uniform", device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Queries ``[B, M, dims]`` and points ``[B, N, dims]`` in float32.

    ``uniform``: both in a cube of side 2. ``lines``: on one line, so that boxes are flat. ``one_pixel``: all points coincide.
    ``hostile``: duplicates, outliers and non-finite coordinates. ``tutorial``: a grid of queries, normally distributed points.
    ``ellipsoid``, ``near_surface``, ``box_of_surface``: points on an ellipsoid; queries on it, near it, or all over its box.
    ``clusters``: 50 tight clusters and a few outliers, queries distributed like points.
    """
    g = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=g)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    def surface(n: int) -> Tensor:
        x = torch.nn.functional.normalize(normal(B, n, dims), dim=-1)
        return x * torch.tensor([1.0, 0.5, 0.25], device=device)[:dims]

    if layout == "tutorial":
        side = round(M ** (1 / dims))
        axis = torch.linspace(-1, 1, side, device=device)
        return torch.cartesian_prod(*[axis] * dims).reshape(1, -1, dims)[:, :M].expand(B, -1, dims).contiguous(), normal(B, N, dims)
    if layout == "ellipsoid":
        return surface(M), surface(N)
    if layout == "near_surface":
        return surface(M) * (1 + 0.05 * uniform(B, M, 1)), surface(N)
    if layout == "box_of_surface":
        return (2 * uniform(B, M, dims) - 1) * torch.tensor([1.2, 0.7, 0.45], device=device)[:dims], surface(N)
    if layout == "clusters":
        centres = 2 * uniform(B, 50, dims) - 1
        made = []
        for n in (M, N):
            which = torch.randint(50, (B, n, 1), device=device, generator=g).expand(-1, -1, dims)
            x = centres.gather(1, which) + 0.002 * normal(B, n, dims)
            made.append(torch.where(uniform(B, n, 1) < 0.001, 100 * normal(B, n, dims), x))
        return made[0], made[1]
    queries, points = 2 * uniform(B, M, dims) - 1, 2 * uniform(B, N, dims) - 1
    if layout == "lines":
        ahead = torch.tensor([1.0, 0.5, 0.25], device=device)[:dims]
        queries, points = queries[..., :1] * ahead, points[..., :1] * ahead
    elif layout == "one_pixel":
        points = torch.full_like(points, 0.25)
    elif layout == "hostile":
        bad = torch.tensor(HOSTILE, device=device)
        for x in (queries, points):
            values = bad[torch.randint(len(HOSTILE), x.shape, device=device, generator=g)]
            x.copy_(torch.where(uniform(*x.shape) < 0.1, values, x))
        points[:, N // 2 :] = points[:, : N - N // 2].clone()  # duplicates
    return queries, points


def make(
    B: int | None = None,
    M: int = 3,
    N: int = 20,
    dims: int = 3,
    F: int = 0,
    *,
    sigma: float = 0.5,
    sigma_shape: tuple | None = None,
    layout: str = "uniform",
    dtype: torch.dtype = torch.float32,
    coords: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    **_,
) -> dict:
    """Queries, points, features, sigma and options (index, batch); `coords` is the dtype of coordinates, float32 or wider."""
    queries, points = cloud(M, N, dims, 1 if B is None else B, layout=layout, device=device, seed=seed)
    g = torch.Generator(device).manual_seed(seed + 1)
    features = torch.randn(*points.shape[:2], F, device=device, generator=g)
    coords = coords or torch.promote_types(dtype, torch.float32)
    width = sigma if sigma_shape is None else torch.full(sigma_shape, sigma, dtype=coords, device=device)
    ragged = layout == "ragged"
    made: dict[str, Any] = dict(
        queries=queries.to(coords),
        points=points.to(coords),
        features=features.to(dtype),
        sigma=width,
        options=(None, ([0, M // 3, M // 3, M - 1, M], [0, N // 5, N // 2, N // 2, N])) if ragged else (),
    )
    if B is None or ragged:
        made |= {key: made[key][0] for key in ("queries", "points", "features")}
    return made


def queries_at_once(N: int) -> int:
    """How many queries plain PyTorch compares with all N points at a time."""
    return max(1, 2**26 // max(1, N))
