"""Labelled inputs of ``ms_deform_attn``: one list feeds tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._pyramid import cases as pyramid

_HEADS = dict(C=32, heads=8)
_FOUR = ((100, 167), (50, 84), (25, 42), (13, 21))  # 800×1333 pixels by strides of 8 to 64
_FIVE = ((200, 334), *_FOUR)
_CAR = ((116, 200), (58, 100), (29, 50), (15, 25))
# name: sizes; D points of each of Q queries in each level, C channels of each head
BENCH = {
    "ddetr_enc": dict(_HEADS, B=1, Q=22223, D=4, levels=_FOUR, layout="pixels"),
    "ddetr_enc_b2": dict(_HEADS, B=2, Q=22223, D=4, levels=_FOUR, layout="pixels"),
    "ddetr_dec": dict(_HEADS, B=1, Q=300, D=4, levels=_FOUR, layout="boxes"),
    "ddetr_dec_b2": dict(_HEADS, B=2, Q=300, D=4, levels=_FOUR, layout="boxes"),
    "dino4_dec": dict(_HEADS, B=1, Q=900, D=4, levels=_FOUR, layout="boxes"),
    "dino4_dec_b2": dict(_HEADS, B=2, Q=900, D=4, levels=_FOUR, layout="boxes"),
    "dino5_enc": dict(_HEADS, B=1, Q=89023, D=4, levels=_FIVE, layout="pixels"),
    "rtdetr_r50_infer": dict(_HEADS, B=1, Q=300, D=4, levels=((80, 80), (40, 40), (20, 20)), layout="boxes"),
    "bevformer_base_tsa": dict(_HEADS, B=2, Q=40000, D=4, levels=((200, 200),), layout="boxes"),
    "bevformer_base_sca": dict(_HEADS, B=6, Q=9426, D=8, levels=_CAR, layout="boxes"),
}

_SOME = dict(B=2, C=5, H=6, W=7, Q=5, D=3, heads=3, L=2)
# every edge a kernel can get wrong, small enough for the interpreter
SMALL = {
    "odd_sizes": _SOME,
    "one_of_each": dict(B=1, C=1, H=1, W=1, Q=1, D=1, heads=1, L=1),
    "logits": dict(_SOME, logits=True),
    "wide": dict(_SOME, B=1, C=148, heads=2, Q=3),
    "one_head": dict(_SOME, C=20, heads=1, L=1),
    "many_heads": dict(_SOME, C=1, heads=20, Q=3),
    "many_points": dict(_SOME, B=1, Q=2, D=37, logits=True),
    "many_levels": dict(_SOME, B=1, levels=((5, 3), (2, 2), (11, 2), (1, 1), (3, 4))),
    "empty_level": dict(_SOME, B=1, levels=((5, 3), (0, 4), (4, 0))),
    "one_pixel": dict(_SOME, C=4, Q=7, layout="one_pixel"),
    "hostile": dict(_SOME, Q=7, layout="hostile"),
    "hostile_logits": dict(_SOME, Q=7, layout="hostile", logits=True),
    "no_batch": dict(_SOME, B=0),
    "no_queries": dict(_SOME, Q=0),
    "no_points": dict(_SOME, D=0),
    "no_points_logits": dict(_SOME, D=0, logits=True),
    "no_levels": dict(_SOME, L=0),
    "no_heads": dict(_SOME, heads=0),
    "no_channels": dict(_SOME, C=0),
    "no_pixels": dict(_SOME, H=0),
}
_MANY = dict(pyramid.MODEL, D=4, Q=2000)
TARGETS = [
    *pyramid.TARGETS,
    dict(sizes=_MANY, dtype="float32", everywhere=True),
    dict(sizes=dict(pyramid.MODEL, D=4, logits=True), dtype="bfloat16"),
    dict(sizes=_MANY, dtype="bfloat16"),
    dict(sizes=dict(_MANY, D=8, C=256), dtype="float32"),
]


def make(
    B: int,
    C: int,
    Q: int,
    D: int,
    heads: int,
    H: int = 0,
    W: int = 0,
    L: int = 2,
    *,
    levels: tuple | None = None,
    logits: bool = False,
    layout: str = "uniform",
    dtype: torch.dtype = torch.float32,
    coords: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    **_,
) -> tuple[Tensor, tuple, None, Tensor, Tensor, bool]:
    """Arguments of ``ms_deform_attn``; `levels` are H×W halved again and again, or given.

    ``pixels``: as in an encoder, each query is a pixel of a level and its heads look in eight directions around it, in every
    level. ``boxes``: as in a decoder, they look into boxes of random sizes. For other layouts see ``_pyramid.cases.scattered``.
    """
    g = torch.Generator(device).manual_seed(seed)
    levels = levels or pyramid.halves(H, W, L)
    rows, L = sum(h * w for h, w in levels), len(levels)
    value = torch.randn(B, rows, heads, C, device=device, generator=g)
    if layout == "pixels":
        locations = pyramid.exact(_around(_pixels(levels, device), (B, Q, heads, L, D), levels, g))
    elif layout == "boxes":
        centre, size = (torch.rand(B, Q, 1, 1, 1, 2, device=device, generator=g) for _ in range(2))
        spread = torch.randn(B, Q, heads, L, D, 2, device=device, generator=g)
        locations = pyramid.exact(centre + (0.025 + 0.15 * size) * spread)
    else:
        locations = pyramid.scattered((B, Q, heads, L, D), layout, g)
    weights = torch.randn(B, Q, heads, L * D, device=device, generator=g)
    if not logits and L * D:
        weights = weights.softmax(-1)
    coords = coords or torch.promote_types(dtype, torch.float32)
    return value.to(dtype), levels, None, locations.to(coords), weights.reshape(B, Q, heads, L, D).to(dtype), bool(logits)


def _pixels(levels: tuple, device: str) -> Tensor:
    """The centre of every pixel of every level, ``[S, 2]``."""
    centres = []
    for h, w in levels:
        v, u = ((torch.arange(n, device=device) + 0.5) / n for n in (h, w))
        centres.append(torch.stack(torch.meshgrid(u, v, indexing="xy"), -1).reshape(-1, 2))
    return torch.cat(centres)


def _around(centres: Tensor, shape: tuple, levels: tuple, g: torch.Generator) -> Tensor:
    """Each head looks in its own direction; each point is one pixel further along it, with noise of half a pixel."""
    _, _, heads, _, P = shape
    angle = torch.arange(heads, device=g.device) * (2 * math.pi / max(1, heads))
    ahead = torch.stack([angle.cos(), angle.sin()], -1)
    ahead = ahead / ahead.abs().amax(-1, keepdim=True)
    step = ahead[:, None, None] * torch.arange(1, P + 1, device=g.device)[:, None]
    pixels = step + 0.5 * torch.randn(*shape, 2, device=g.device, generator=g)
    return centres[:, None, None, None] + pixels / torch.tensor(levels, device=g.device).flip(1)[:, None]


def eager(value: Tensor, spatial_shapes: tuple, level_starts: None, locations: Tensor, weights: Tensor, logits: bool) -> Tensor:
    """What a user of plain PyTorch writes, and the models' own fallback."""
    (B, _, h, D), (Q, L, P) = value.shape, (weights.shape[1], *weights.shape[3:])
    wide = torch.promote_types(value.dtype, locations.dtype)
    weights = weights.to(wide)
    if logits:
        weights = weights.flatten(3).softmax(-1).unflatten(3, (L, P))
    grid = (2 * locations - 1).to(wide)
    values = []
    maps = value.split([height * width for height, width in spatial_shapes], 1)
    for size, level, at in zip(spatial_shapes, maps, grid.unbind(3)):
        pixels = level.flatten(2).transpose(1, 2).reshape(B * h, D, *size).to(wide)
        values.append(F.grid_sample(pixels, at.transpose(1, 2).flatten(0, 1), align_corners=False))
    sampled = torch.stack(values, -2).flatten(-2)  # [B·h, D, Q, L·P]
    out = (sampled * weights.transpose(1, 2).reshape(B * h, 1, Q, L * P)).sum(-1)
    return out.view(B, h * D, Q).transpose(1, 2).contiguous().to(value.dtype)


def count(B: int, C: int, Q: int, D: int, heads: int, H: int = 0, W: int = 0, L: int = 2, levels=None, **_) -> dict[str, int]:
    """Elements that must move at least once, and bilinear taps (samples times channels)."""
    levels = levels or pyramid.halves(H, W, L)
    samples = B * Q * heads * len(levels) * D
    read = B * sum(h * w for h, w in levels) * heads * C + 3 * samples
    return dict(read=read, written=B * Q * heads * C, taps=samples * C)
