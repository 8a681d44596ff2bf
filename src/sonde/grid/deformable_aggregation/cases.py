"""Labelled inputs of ``deformable_aggregation``: one list feeds tests, benchmarks, the tuner and the tables of the docs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._pyramid import cases as pyramid

_CARS = dict(C=32, heads=8, cams=6, levels=((64, 176), (32, 88), (16, 44), (8, 22)))  # 256×704 pixels of six cameras
_DET, _MAP = dict(_CARS, Q=900, D=13, layout="boxes"), dict(_CARS, Q=100, D=300, layout="lanes")
# name: sizes; Q anchors of D key points each, C channels of each of the heads (the groups of weights)
BENCH = {
    "sparsedrive_det": dict(_DET, B=1),
    "sparsedrive_det_b6": dict(_DET, B=6),
    "sparsedrive_det_uniform": dict(_DET, B=1, layout="inside"),
    "sparsedrive_map": dict(_MAP, B=1),
    "sparsedrive_map_b6": dict(_MAP, B=6),
    "sparsedrive_map_uniform": dict(_MAP, B=1, layout="inside"),
    "sparse4dv3": dict(_DET, B=1, Q=1220),
    "sparse4dv3_uniform": dict(_DET, B=1, Q=1220, layout="inside"),
    "sparse4dv3_train": dict(_DET, B=6, Q=1220),
}

_SOME = dict(B=2, C=5, H=6, W=7, Q=5, D=3, heads=3, cams=2, L=2)
# every edge a kernel can get wrong, small enough for the interpreter
SMALL = {
    "odd_sizes": _SOME,
    "one_of_each": dict(B=1, C=1, H=1, W=1, Q=1, D=1, heads=1, cams=1, L=1),
    "zeros": dict(_SOME, outside="zeros"),
    "wide": dict(_SOME, B=1, C=37, heads=4, Q=3),
    "one_group": dict(_SOME, C=20, heads=1, cams=3, Q=2),
    "groups_of_one": dict(_SOME, C=1, heads=20, Q=2),
    "one_camera": dict(_SOME, cams=1, L=3),
    "many_points": dict(_SOME, B=1, Q=2, D=37, cams=1),
    "cameras_differ": dict(_SOME, levels=(((5, 3), (2, 2)), ((4, 7), (3, 1)), ((1, 1), (11, 2))), cams=3),
    "empty_level": dict(_SOME, B=1, levels=(((5, 3), (0, 4)), ((4, 0), (3, 2)))),
    "one_pixel": dict(_SOME, C=4, Q=7, layout="one_pixel"),
    "hostile": dict(_SOME, Q=7, layout="hostile"),
    "hostile_zeros": dict(_SOME, Q=7, layout="hostile", outside="zeros"),
    "no_batch": dict(_SOME, B=0),
    "no_anchors": dict(_SOME, Q=0),
    "no_points": dict(_SOME, D=0),
    "no_cameras": dict(_SOME, cams=0),
    "no_levels": dict(_SOME, L=0),
    "no_groups": dict(_SOME, heads=0),
    "no_channels": dict(_SOME, C=0),
    "no_pixels": dict(_SOME, H=0),
}
TARGETS = [
    *pyramid.TARGETS,
    dict(sizes=pyramid.MODEL, dtype="bfloat16", everywhere=True),
    dict(sizes=pyramid.MODEL, dtype="float32"),
    dict(sizes=dict(pyramid.MODEL, outside="zeros"), dtype="bfloat16"),
]


def make(
    B: int,
    C: int,
    Q: int,
    D: int,
    heads: int,
    H: int = 0,
    W: int = 0,
    cams: int = 2,
    L: int = 2,
    *,
    levels: tuple | None = None,
    outside: str = "drop",
    layout: str = "uniform",
    dtype: torch.dtype = torch.float32,
    coords: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    **_,
) -> tuple[Tensor, tuple, None, Tensor, Tensor, str]:
    """Arguments of ``deformable_aggregation``; `levels` are H×W halved again and again, or given, for all cameras or for each.

    ``boxes``: key points of boxes around a car, seen by its cameras: 18 % of them lie in an image. ``lanes``: key points of lines
    on the ground. For other layouts see ``_pyramid.cases.scattered``.
    """
    g = torch.Generator(device).manual_seed(seed)
    shapes = _shapes(cams, levels or pyramid.halves(H, W, L))
    rows, L = sum(h * w for of_camera in shapes for h, w in of_camera), len(shapes[0]) if shapes else L
    features = torch.randn(B, rows, heads * C, device=device, generator=g)
    if layout in ("boxes", "lanes"):
        points = (_boxes if layout == "boxes" else _lanes)(B, Q, D, g)
        locations = pyramid.exact(_seen(points, cams, shapes[0][0][0] / shapes[0][0][1]))
    else:
        locations = pyramid.scattered((B, Q, D, cams), layout, g)
    weights = torch.randn(B, Q, D * cams * L, heads, device=device, generator=g)
    weights = weights.softmax(2) if D * cams * L else weights
    coords = coords or torch.promote_types(dtype, torch.float32)
    return features.to(dtype), shapes, None, locations.to(coords), weights.reshape(B, Q, D, cams, L, heads).to(dtype), outside


def _shapes(cams: int, levels: tuple) -> tuple:
    return levels if levels and isinstance(levels[0][0], tuple) else (levels,) * cams


def _boxes(B: int, Q: int, D: int, g: torch.Generator) -> Tensor:
    """Key points in metres, x ahead, y to the left, z up: boxes as large as cars, anywhere within 55 m."""
    r, turn, z, inside = (torch.rand(B, Q, *shape, device=g.device, generator=g) for shape in ((1,), (1,), (1,), (D, 3)))
    angle = 2 * math.pi * turn
    centre = torch.stack([55 * r.sqrt() * angle.cos(), 55 * r.sqrt() * angle.sin(), 1.5 * z - 0.3], -1)
    return centre + (inside - 0.5) * torch.tensor([4.6, 2.0, 1.7], device=g.device)


def _lanes(B: int, Q: int, D: int, g: torch.Generator) -> Tensor:
    """Key points along lines in 60×30 m around the car: fifteen per metre, three at each of five heights near the ground."""
    place, turn, jitter = (torch.rand(B, Q, *shape, device=g.device, generator=g) for shape in ((1, 2), (1,), (D, 2)))
    point = torch.arange(D, device=g.device)
    along, angle = point // 15 - D // 30, 2 * math.pi * turn
    ground = (place - 0.5) * torch.tensor([60.0, 30.0], device=g.device) + 2.1 * (jitter - 0.5)
    ground = ground + along[:, None] * torch.stack([angle.cos(), angle.sin()], -1)
    height = 0.05 + torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0], device=g.device)[point % 15 // 3]
    return torch.cat([ground, height[:, None].expand(B, Q, D, 1)], -1)


def _seen(points: Tensor, cams: int, aspect: float) -> Tensor:
    """Points ``[…, 3]`` in the images of cameras 1.5 m above the ground that look all around, ``[…, cams, 2]``.

    As in the models, a depth is at least 1e-5, so that points behind a camera fall far outside its image.
    """
    yaw = torch.arange(cams, device=points.device) * (2 * math.pi / max(1, cams))
    focal = torch.full_like(yaw, 1266 / 1600)
    focal[cams // 2 :: cams] = 809 / 1600  # the rear camera has a wider view
    x, y, z = points[..., None, :].unbind(-1)
    depth = (x * yaw.cos() + y * yaw.sin() - 1.2).clamp(min=1e-5)
    u = 0.5 + focal * (x * yaw.sin() - y * yaw.cos()) / depth
    horizon = 1 - (900 - 491) / 1600 / aspect  # images are cropped at the top
    return torch.stack([u, horizon + focal / aspect * (1.5 - z) / depth], -1)


def eager(features: Tensor, spatial_shapes: tuple, level_starts: None, locations: Tensor, weights: Tensor, outside: str) -> Tensor:
    """What a user of plain PyTorch writes, and the models' own fallback."""
    B, A, P, cams = locations.shape[:4]
    (_, rows, C), G = features.shape, weights.shape[-1]
    wide = torch.promote_types(features.dtype, locations.dtype)
    if outside == "drop":
        weights = weights * ((locations > 0) & (locations < 1)).all(-1)[..., None, None]
    grid = (2 * locations - 1).to(wide).permute(0, 3, 1, 2, 4).reshape(B * cams, A, P, 2)
    maps = features.reshape(B, cams, rows // cams, C).split([h * w for h, w in spatial_shapes[0]], 2)
    out = torch.zeros((), dtype=wide, device=features.device)
    for (h, w), level, weight in zip(spatial_shapes[0], maps, weights.to(wide).unbind(4)):
        pixels = level.transpose(2, 3).reshape(B * cams, C, h, w).to(wide)
        values = F.grid_sample(pixels, grid, align_corners=False).reshape(B, cams, G, C // G, A, P)
        out = out + torch.einsum("bmgcap,bapmg->bagc", values, weight)
    return out.reshape(B, A, C).to(features.dtype)


def count(B: int, C: int, Q: int, D: int, heads: int, H: int = 0, W: int = 0, cams: int = 2, L: int = 2, levels=None, **_) -> dict:
    """Elements that must move at least once, and bilinear taps (samples times channels, as if all were inside)."""
    shapes = _shapes(cams, levels or pyramid.halves(H, W, L))
    rows, L = sum(h * w for of_camera in shapes for h, w in of_camera), len(shapes[0]) if shapes else L
    samples = B * Q * D * cams
    read = B * rows * heads * C + samples * (2 + L * heads)
    return dict(read=read, written=B * Q * heads * C, taps=samples * L * heads * C)
