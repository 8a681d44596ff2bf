"""Inputs of epipolar attention, as pixelSplat makes them, in any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# name: sizes; C counts the channels of the queries, the images have 2·octaves more
EPIPOLAR: dict[str, dict[str, Any]] = {
    "pixelsplat_train": dict(B=14, C=128, H=64, W=64, Q=4096, D=32, heads=4, octaves=10),
    "pixelsplat_infer": dict(B=2, C=128, H=64, W=64, Q=4096, D=32, heads=4, octaves=10),
    "fused_sample_ops": dict(B=8, C=128, H=128, W=256, Q=256, D=123, heads=4, octaves=6),
}

# every edge case a kernel can get wrong, small enough for the interpreter
SMALL: dict[str, dict[str, Any]] = {
    "odd_sizes": dict(B=2, C=5, H=6, W=7, Q=5, D=3, heads=3, octaves=2),
    "one_of_each": dict(B=1, C=1, H=1, W=1, Q=1, D=1, heads=1),
    "wide": dict(B=1, C=128, H=5, W=4, Q=3, D=6, heads=4, octaves=10),
    "many_samples": dict(B=1, C=4, H=9, W=8, Q=2, D=37, heads=1, octaves=1),
    "many_heads": dict(B=1, C=4, H=3, W=5, Q=3, D=2, heads=9),
    "one_pixel": dict(B=2, C=8, H=5, W=5, Q=7, D=4, heads=2, octaves=1, layout="one_pixel"),
    "hostile": dict(B=2, C=8, H=5, W=6, Q=7, D=4, heads=2, octaves=1, layout="hostile"),
    "no_batch": dict(B=0, C=8, H=5, W=5, Q=3, D=2, heads=2, octaves=1),
    "no_queries": dict(B=2, C=8, H=5, W=5, Q=0, D=2, heads=2, octaves=1),
    "no_samples": dict(B=2, C=8, H=5, W=5, Q=3, D=0, heads=2, octaves=1),
    "no_heads": dict(B=2, C=8, H=5, W=5, Q=3, D=2, heads=0, octaves=1),
    "no_channels": dict(B=2, C=0, H=5, W=5, Q=3, D=2, heads=2),
    "no_pixels": dict(B=2, C=8, H=0, W=5, Q=3, D=2, heads=2, octaves=1),
}

# channels, heads, octaves, D and dtype are compile-time constants: a real case, an odd one, more samples than a program holds
_REAL = dict(B=1, C=128, H=8, W=8, Q=4, D=32, heads=4, octaves=10)
_ODD = dict(B=1, C=17, H=5, W=7, Q=3, D=5, heads=3)
_DEEP = dict(B=1, C=20, H=5, W=7, Q=3, D=200, heads=1)
# must compile without spills: those marked `everywhere` on all architectures, the others on one
TARGETS: list[dict[str, Any]] = [
    dict(sizes=_REAL, dtype="float32", everywhere=True),
    dict(sizes=_REAL, dtype="bfloat16"),
    dict(sizes=_ODD, dtype="float32"),
    dict(sizes=_DEEP, dtype="float16"),
]

# coordinates that must not overflow, change other samples, or read outside the image
HOSTILE = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 1e7, -1.0, 1.0, 0.0, -1.3, 1.4, 2.0**31]


def epipolar(
    B: int,
    C: int,
    H: int,
    W: int,
    Q: int,
    D: int,
    heads: int,
    octaves: int = 0,
    *,
    layout: str = "lines",
    dtype: torch.dtype = torch.float32,
    coords: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """images, samples, queries, depths and weights; `coords` is the dtype of samples and depths (float32 or wider).

    ``lines``: each query's samples lie on a line through the image; 15 % of the queries see nothing, with all samples at
    (−1, −1), as in pixelSplat. ``uniform``: anywhere in ±1.25. ``one_pixel``: all in one place. ``hostile``: uniform, mixed
    with coordinates that are huge, non-finite or exactly on an edge.
    """
    g = torch.Generator(device).manual_seed(seed)
    coords = coords or torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=g)

    if layout == "lines":
        side = max(1, round(Q**0.5))
        row = (torch.arange(Q, device=device) // side)[None, :, None] / max(1, Q // side) * 2 - 1  # a row shares its line
        along = (torch.arange(D, device=device) + 0.5) / max(1, D) * 2 - 1
        x = along * (0.3 + 0.7 * uniform(B, Q, 1)) + 0.2 * (uniform(B, Q, 1) - 0.5)
        y = row + 0.3 * (uniform(B, 1, 1) - 0.5) * x + 0.02 * normal(B, Q, 1)
        samples = torch.stack([x, y], -1)
        samples = torch.where(uniform(B, Q, 1, 1) < 0.15, -1.0, samples)
    elif layout == "one_pixel":
        samples = torch.full((B, Q, D, 2), 0.1, device=device)
    else:
        samples = 2.5 * uniform(B, Q, D, 2) - 1.25
        if layout == "hostile":
            values = torch.tensor(HOSTILE, device=device)
            bad = values[torch.randint(len(HOSTILE), samples.shape, device=device, generator=g)]
            samples = torch.where(uniform(B, Q, D, 2) < 0.4, bad, samples)
    return dict(
        images=normal(B, C + 2 * octaves, H, W).to(dtype),
        samples=samples.to(coords),
        queries=(normal(B, heads, Q, C) / max(1, C) ** 0.5).to(dtype),
        depths=uniform(B, Q, D).sort(-1).values.to(coords),
        weights=normal(B, heads, Q, D).softmax(-1).to(dtype) if D else normal(B, heads, Q, D).to(dtype),
    )


def every_sample(images: Tensor, samples: Tensor) -> Tensor:
    """Every sample of every channel, ``[B, C, Q, D]``: the intermediate that a user of plain PyTorch has to store."""
    wide = torch.promote_types(images.dtype, samples.dtype)
    return F.grid_sample(images.to(wide), samples.to(wide), align_corners=False)
