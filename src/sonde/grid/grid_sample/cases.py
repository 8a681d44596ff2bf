"""Labelled inputs of ``grid_sample``: one list feeds tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .._epipolar import cases as epipolar

# name: sizes; the result has Q rows of D pixels, and K slices if the input is a volume of depth Z
BENCH = {
    "random_64": dict(B=8, C=64, H=128, W=128, Q=128, D=128, layout="random"),
    "identity_rgb": dict(B=4, C=3, H=1080, W=1920, Q=1080, D=1920, layout="identity"),
    "flow_rgb": dict(B=4, C=3, H=1080, W=1920, Q=1080, D=1920, layout="flow"),
    "identity_256": dict(B=8, C=256, H=64, W=64, Q=64, D=64, layout="identity"),
    "flow_256": dict(B=8, C=256, H=64, W=64, Q=64, D=64, layout="flow"),
    "random_volume": dict(B=2, C=32, Z=64, H=64, W=64, K=64, Q=64, D=64, layout="random"),
    "flow_volume": dict(B=2, C=32, Z=64, H=64, W=64, K=64, Q=64, D=64, layout="flow"),
}

_PLANE, _VOLUME = dict(B=2, C=3, H=6, W=7, Q=5, D=3), dict(B=1, C=2, Z=3, H=4, W=5, K=2, Q=3, D=2)
# every edge a kernel can get wrong, small enough for the interpreter
SMALL = {
    "odd_sizes": dict(_PLANE, C=5),
    "one_of_each": dict(B=1, C=1, H=1, W=1, Q=1, D=1),
    "wide": dict(B=1, C=70, H=5, W=4, Q=3, D=6),
    "nearest": dict(_PLANE, mode="nearest"),
    "bicubic": dict(_PLANE, C=2, mode="bicubic", corners=True),
    "border": dict(_PLANE, padding="border"),
    "reflection": dict(_PLANE, padding="reflection", corners=True),
    "bicubic_reflection": dict(_PLANE, B=1, C=2, H=2, mode="bicubic", padding="reflection"),
    "volume": _VOLUME,
    "volume_reflection": dict(_VOLUME, padding="reflection"),
    "volume_nearest": dict(_VOLUME, mode="nearest", padding="border", corners=True),
    "one_pixel": dict(B=1, C=4, H=5, W=5, Q=7, D=4, layout="one_pixel"),
    "hostile": dict(B=2, C=4, H=5, W=6, Q=7, D=4, layout="hostile"),
    "hostile_border": dict(B=1, C=3, H=5, W=6, Q=7, D=4, layout="hostile", padding="border"),
    "hostile_bicubic": dict(B=1, C=2, H=5, W=6, Q=7, D=4, layout="hostile", padding="reflection", mode="bicubic", seed=1),
    "hostile_volume": dict(_VOLUME, layout="hostile", padding="reflection", corners=True),
    "smooth": dict(B=1, C=3, H=5, W=9, Q=6, D=9, layout="flow"),
    "smooth_volume": dict(_VOLUME, Q=4, D=5, layout="identity"),
    "one_input": dict(_PLANE, B=2, inputs=1),
    "one_grid": dict(_PLANE, B=2, grids=1),
    "no_batch": dict(_PLANE, B=0),
    "no_queries": dict(_PLANE, Q=0),
    "no_channels": dict(_PLANE, C=0),
    "no_pixels": dict(_PLANE, H=0),
    "no_slices": dict(_VOLUME, Z=0, padding="reflection"),
}
# these must compile without spills, on one architecture or everywhere: the epipolar ones, few channels, most taps, most axes
TARGETS = [
    *epipolar.TARGETS,
    dict(sizes=dict(B=1, C=3, H=8, W=8, Q=8, D=8, padding="border", corners=True), dtype="float32", everywhere=True),
    dict(sizes=dict(B=1, C=64, H=8, W=8, Q=8, D=8, mode="bicubic", padding="reflection"), dtype="float32"),
    dict(sizes=dict(B=1, C=32, Z=8, H=8, W=8, K=4, Q=4, D=4), dtype="float32"),
]


def make(
    B: int,
    C: int,
    H: int,
    W: int,
    Q: int,
    D: int,
    *,
    Z: int | None = None,
    K: int = 1,
    inputs: int | None = None,
    grids: int | None = None,
    mode: str = "bilinear",
    padding: str = "zeros",
    corners: bool = False,
    layout: str = "uniform",
    dtype: torch.dtype = torch.float32,
    coords: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    **_,
) -> tuple[Tensor, Tensor, str, str, bool]:
    """Arguments of ``grid_sample``; `inputs` and `grids` are batch sizes, B unless given.

    ``uniform``: anywhere in ±1.25. ``random``: in ±1. ``identity``: each pixel of the result is one of the input. ``flow`` and
    ``lines``: the same, displaced smoothly. ``one_pixel``: all in one place. ``hostile``: uniform, mixed with coordinates that are
    huge, non-finite or exactly on an edge.
    """
    g = torch.Generator(device).manual_seed(seed)
    size, points = ((H, W), (Q, D)) if Z is None else ((Z, H, W), (K, Q, D))
    n, d = B if grids is None else grids, len(size)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=g)

    input = torch.randn(B if inputs is None else inputs, C, *size, device=device, generator=g).to(dtype)
    if layout == "one_pixel":
        grid = torch.full((n, *points, d), 0.1, device=device)
    elif layout in ("identity", "flow", "lines"):
        places = [(torch.arange(m, device=device) * 2 + 1) / max(1, m) - 1 for m in points]
        grid = torch.stack(torch.meshgrid(*places, indexing="ij")[::-1], -1).expand(n, *points, d)
        if layout != "identity":
            turn = 3 * grid.flip(-1) + 6 * uniform(n, *[1] * d, d)
            grid = grid + 0.1 * turn.sin()
    else:
        grid = (2 if layout == "random" else 2.5) * (uniform(n, *points, d) - 0.5)
        if layout == "hostile":
            values = torch.tensor(epipolar.HOSTILE, device=device)
            bad = values[torch.randint(len(values), grid.shape, device=device, generator=g)]
            grid = torch.where(uniform(*grid.shape) < 0.4, bad, grid)
    coords = coords or torch.promote_types(dtype, torch.float32)
    return input, grid.contiguous().to(coords), mode, padding, bool(corners)


def eager(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    """What a user of plain PyTorch writes."""
    wide, B = torch.promote_types(input.dtype, grid.dtype), max(input.shape[0], grid.shape[0])
    input_, grid = (t.to(wide).expand(B, *t.shape[1:]) for t in (input, grid))
    return F.grid_sample(input_, grid, mode, padding_mode, align_corners).to(input.dtype)


def count(B: int, C: int, H: int, W: int, Q: int, D: int, Z: int | None = None, K: int = 1, **_) -> dict[str, int]:
    """Elements that must move at least once, and taps (samples times channels)."""
    size, points = ((H, W), (Q, D)) if Z is None else ((Z, H, W), (K, Q, D))
    samples = B * prod(points)
    return dict(read=B * C * prod(size) + samples * len(size), written=samples * C, taps=samples * C)
