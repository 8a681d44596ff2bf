"""Named inputs of ``sample_attention``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._epipolar import cases as epipolar

SMALL: dict[str, dict[str, Any]] = {
    **epipolar.SMALL,
    "views": dict(B=2, C=5, H=4, W=5, Q=3, D=3, heads=2, octaves=1, views=3, layout="uniform"),
    "masked": dict(B=2, C=4, H=5, W=4, Q=6, D=5, heads=2, octaves=1, masked=0.6),
    "masked_views": dict(B=1, C=4, H=5, W=4, Q=6, D=3, heads=2, views=2, masked=0.7, layout="hostile"),
    "values": dict(B=2, C=4, H=4, W=5, Q=3, D=3, heads=2, octaves=1, C_v=7, layout="hostile"),
    "many_values": dict(B=1, C=3, H=3, W=4, Q=2, D=2, heads=2, C_v=70, views=2, masked=0.3),
    "sixteen_heads": dict(B=1, C=36, H=4, W=4, Q=2, D=5, heads=16, octaves=1),
    "wide_channels": dict(B=1, C=300, H=4, W=3, Q=2, D=3, heads=2, octaves=2),
}
BENCH: dict[str, dict[str, Any]] = {
    **epipolar.EPIPOLAR,
    "mvs_three_views": dict(B=1, C=128, H=64, W=64, Q=4096, D=32, heads=4, views=3),
    "one_head": dict(B=4, C=256, H=64, W=64, Q=4096, D=32, heads=1),
}
TARGETS: list[dict[str, Any]] = [
    *epipolar.TARGETS,
    dict(sizes=dict(B=1, C=128, H=8, W=8, Q=4, D=32, heads=4, C_v=48, views=2, masked=0.2), dtype="float32"),
    dict(sizes=dict(B=1, C=64, H=8, W=8, Q=4, D=16, heads=16), dtype="bfloat16"),
    dict(sizes=dict(B=1, C=256, H=8, W=8, Q=4, D=16, heads=1), dtype="float32", everywhere=True),
]


def make(
    octaves: int = 0,
    *,
    views: int = 0,
    masked: float = 0.0,
    C_v: int | None = None,
    scale: float | None = None,
    seed: int = 0,
    **sizes,
) -> tuple[Tensor | int | float | None, ...]:
    """Arguments of ``sample_attention``; `masked` is the share of masked samples, and of queries whose samples are all masked."""
    several = {**sizes, "B": sizes["B"] * max(1, views)}
    made = epipolar.epipolar(octaves=octaves, seed=seed, **several)
    images, samples, depths = made["images"], made["samples"], made["depths"]
    g = torch.Generator(images.device).manual_seed(seed + 1)
    values = mask = None
    if C_v is not None:
        values = torch.randn(images.shape[0], C_v, *images.shape[2:], device=images.device, generator=g).to(images.dtype)
    if masked:
        draw = torch.rand(samples.shape[:3], device=images.device, generator=g)
        mask = (draw > masked) & (draw[:, :, :1] > masked / 4)
    queries = made["queries"][: sizes["B"]] * max(1, sizes["C"]) ** 0.5  # logits of unit variance
    if views:
        parts: list[Any] = [
            x if x is None else x.unflatten(0, (sizes["B"], views)) for x in (images, samples, depths, values, mask)
        ]
        images, samples, depths, values, mask = parts
    return images, samples, queries, depths, octaves, values, scale, mask


def eager(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor, num_octaves: int, values: Tensor | None = None,
    scale: float | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What a user of plain PyTorch writes."""
    views = images.shape[1] if images.ndim == 5 else 1
    if images.ndim == 5:
        images, samples, depths = images.flatten(0, 1), samples.flatten(0, 1), depths.flatten(0, 1)
        values = None if values is None else values.flatten(0, 1)
        mask = None if mask is None else mask.flatten(0, 1)
    taken = epipolar.every_sample(images, samples)
    plain, encoded = taken.split([queries.shape[3], 2 * num_octaves], 1)
    rows = queries.to(taken.dtype).repeat_interleave(views, 0)
    logits = torch.einsum("bhqc,bcqd->bhqd", rows, plain)
    if num_octaves:
        frequencies = 2 * math.pi * 2.0 ** torch.arange(num_octaves, device=depths.device, dtype=depths.dtype)
        phase = frequencies[:, None, None] * depths[:, None]
        waves = torch.stack([phase.sin(), phase.cos()], 2).flatten(1, 2)
        logits = logits + (waves * encoded).sum(1)[:, None]
    logits = logits * (queries.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    weights = logits.unflatten(0, (-1, views)).movedim(1, 3).flatten(3).softmax(-1)
    weights = weights.unflatten(3, (views, -1)).movedim(3, 1)
    seen = plain if values is None else epipolar.every_sample(values, samples)
    out = torch.einsum("bvhqd,bvcqd->bhqc", weights, seen.unflatten(0, (-1, views)))
    return out.to((images if values is None else values).dtype)


def count(
    B: int, C: int, H: int, W: int, Q: int, D: int, heads: int, octaves: int = 0, views: int = 1, C_v: int | None = None, **_
) -> dict[str, int]:
    """Elements that must be read and written at least once, and bilinear taps (samples times channels)."""
    channels, of_values, N = C + 2 * octaves, C_v or 0, B * max(1, views)
    read = N * ((channels + of_values) * H * W + Q * D * (2 + (octaves > 0))) + B * heads * Q * C
    written = B * heads * Q * (C if C_v is None else C_v)
    return dict(read=read, written=written, taps=N * Q * D * (channels + of_values))
