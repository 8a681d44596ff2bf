"""Where other views see the rays of a view's pixels: sample points along epipolar lines, with their depths, in plain PyTorch.

A point at depth d on the ray of the query pixel x is seen by a source camera at the homogeneous image point

    p(d) = H x + e / d,        H = K' R'⁻¹ R K⁻¹ (the homography at infinity),   e = K' R'⁻¹ (c − c') (the epipole),

which is linear in 1/d. So is each of the conditions "in front of the camera" and "right of the left border" … "above the lower
border". The visible part of the depth range is therefore found by clipping one interval of 1/d by a few linear functions, and
nothing special happens when the epipole is inside the image, at infinity, or behind the camera.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..op import checks

NAME = "epipolar_samples"
FAR = 30.0  # no image is cropped so far, in its own sizes, from where the camera looks; in pixels, those of more than 62 are
OUTSIDE = -2.0  # the place of masked samples: outside of every image, so code that ignores the mask reads zeros


class EpipolarSamples(NamedTuple):
    """What :func:`epipolar_samples` returns, ready for :func:`sonde.sample_attention`."""

    samples: Tensor  # [B, V, Q, D, 2], (x, y) in [−1, 1], from the nearest to the farthest
    depths: Tensor  # [B, V, Q, D], of each sample in the query's camera
    mask: Tensor  # [B, V, Q, D], False where the source sees nothing of the ray


def pixel_centres(height: int, width: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """The centre (x, y) of each pixel in [−1, 1], row by row: ``[height·width, 2]``.

    Example:
        >>> import sonde.nn
        >>> sonde.nn.pixel_centres(1, 2)
        tensor([[-0.5000,  0.0000],
                [ 0.5000,  0.0000]])
    """
    checks.counts("pixel_centres", height=height, width=width)
    y, x = ((2 * torch.arange(size, dtype=dtype, device=device) + 1) / size - 1 for size in (height, width))
    return torch.stack([x.expand(height, -1), y[:, None].expand(-1, width)], -1).flatten(0, 1)


def relative_disparity(depths: Tensor, near: Tensor | float, far: Tensor | float) -> Tensor:
    """0 at `near`, 1 at `far`, linear in 1/depth: the best input of a positional encoding of depths.

    Example:
        >>> import torch, sonde.nn
        >>> sonde.nn.relative_disparity(torch.tensor([1.0, 2.0, 4.0]), 1.0, 4.0)
        tensor([0.0000, 0.6667, 1.0000])
    """
    name = "relative_disparity"
    if not isinstance(depths, Tensor) or depths.dtype not in checks.FLOATS:
        raise TypeError(f"{name}: depths must be a tensor of floating point numbers; got {checks.kind(depths)}")
    for argument, value in (("near", near), ("far", far)):
        if not isinstance(value, Tensor):
            checks.positive(name, argument, value)
    nearest, farthest = 1 / (near * torch.ones_like(depths)), 1 / (far * torch.ones_like(depths))
    return (nearest - 1 / depths) / (nearest - farthest).clamp(min=torch.finfo(depths.dtype).tiny)


def epipolar_samples(
    points: Tensor,
    intrinsics: Tensor,
    extrinsics: Tensor,
    source_intrinsics: Tensor,
    source_extrinsics: Tensor,
    near: Tensor | float,
    far: Tensor | float,
    num_samples: int,
) -> EpipolarSamples:
    """Sample points along the epipolar lines of query points in other views, and the depth of each.

    The part of a query's ray between the depths `near` and `far` is projected into each source view and clipped to its image;
    samples are spaced evenly along what remains, at the middles of `num_samples` equal pieces.

    Convention:
        Cameras look along z, x is right and y is down. Extrinsics take camera coordinates to the world; only rotation (or any
        invertible 3×3 matrix) and centre are read. Intrinsics are normalised: they take camera coordinates to [0, 1] × [0, 1], from
        the upper left corner of the image to the lower right one, whatever its resolution. If yours are in pixels, divide the first
        row by the width and the second by the height, see ``docs/epipolar.md``; such are refused on CPUs, where they can be read
        without waiting. Depths are coordinates z in the query's camera, not
        distances. A query is masked in a source that sees no part of its ray, because all of it is behind the camera or outside of
        the image; also if both cameras have the same centre, so that the depth cannot be told. Masked samples are outside of the
        image, at depth `near`. Everything is in float32, or float64 if an operand is, under autocast too. Gradients of points,
        cameras and depths are finite for all invertible cameras; nothing waits for the device.

    Args:
        points: The queries' places in their own image, ``[B, Q, 2]``, (x, y) in [−1, 1]; see :func:`pixel_centres`.
        intrinsics: Of the queries' cameras, ``[B, 3, 3]``.
        extrinsics: ``[B, 4, 4]``.
        source_intrinsics: Of the cameras to look from, ``[B, V, 3, 3]``.
        source_extrinsics: ``[B, V, 4, 4]``.
        near: The nearest depth, a number or ``[B]``; > 0.
        far: The farthest, finite and no less than `near`.
        num_samples: D, samples for each query and source.

    Returns:
        ``samples`` ``[B, V, Q, D, 2]`` in [−1, 1], ``depths`` and ``mask`` ``[B, V, Q, D]``.

    Example:
        >>> import torch, sonde.nn
        >>> camera, beside = torch.eye(4), torch.eye(4)
        >>> beside[0, 3] = 1.0  # one to the right
        >>> K = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
        >>> centre = torch.zeros(1, 1, 2)
        >>> lines = sonde.nn.epipolar_samples(centre, K[None], camera[None], K[None, None], beside[None, None], 1.0, 100.0, 3)
        >>> lines.samples[0, 0, 0]  # clipped by the left border, where the depth is 2
        tensor([[-0.8367,  0.0000],
                [-0.5100,  0.0000],
                [-0.1833,  0.0000]])
        >>> lines.depths[0, 0, 0]
        tensor([ 2.3904,  3.9216, 10.9091])
    """
    checks.counts(NAME, num_samples=num_samples)
    operands = dict(points=(points, "B Q 2"), intrinsics=(intrinsics, "B 3 3"), extrinsics=(extrinsics, "B 4 4"))
    operands["source_intrinsics"] = (source_intrinsics, "B V 3 3")
    operands["source_extrinsics"] = (source_extrinsics, "B V 4 4")
    sizes = checks.shapes(NAME, **operands)
    check_depth_range(NAME, near, far, "B", sizes, points.device)
    check_intrinsics(NAME, intrinsics=intrinsics, source_intrinsics=source_intrinsics)
    dtype = torch.float32
    for x in (points, intrinsics, extrinsics, source_intrinsics, source_extrinsics, near, far):
        dtype = torch.promote_types(dtype, x.dtype) if isinstance(x, Tensor) else dtype
    nearest, farthest = (
        x.to(dtype).reshape(-1, 1, 1) if isinstance(x, Tensor) else points.new_full((1, 1, 1), x, dtype=dtype) for x in (near, far)
    )
    K, camera, source_K, source = (x.to(dtype) for x in (intrinsics, extrinsics, source_intrinsics, source_extrinsics))
    return _samples(points.to(dtype), K[:, None], camera[:, None], source_K, source, nearest, farthest, num_samples)


def check_depth_range(name: str, near: Any, far: Any, pattern: str, sizes: dict[str, int], device: torch.device) -> None:
    """Numbers, or tensors of the pattern, whose values stay on their device."""
    for argument, value in (("near", near), ("far", far)):
        if isinstance(value, Tensor):
            checks.broadcast(name, argument, value, pattern, sizes, device, checks.FLOATS)
        else:
            checks.positive(name, argument, value)
    if not isinstance(near, Tensor) and not isinstance(far, Tensor) and near > far:
        raise ValueError(f"{name}: near must be no more than far; got {near} and {far}")


def check_intrinsics(name: str, **given: Tensor) -> None:
    """Refuse intrinsics in pixels, with which hardly any ray is seen. Only those on CPUs can be read without waiting."""
    for argument, K in given.items():
        if K.device.type != "cpu" or type(K) not in (Tensor, torch.nn.Parameter) or not checks.readable(K):
            continue
        centres = (K[..., :2, 2] / K[..., 2:, 2]).detach().reshape(-1, 2)
        wrong = centres[((centres - 0.5).abs() > FAR).any(-1) & centres.isfinite().all(-1)]
        if len(wrong):
            x, y = wrong[0].tolist()
            raise ValueError(
                f"{name}: {argument} must take camera coordinates to [0, 1] × [0, 1] of the image; got a principal point at "
                f"({x:.6g}, {y:.6g}), as in pixels. Divide the first row by the width and the second by the height"
            )


def _samples(
    points: Tensor, K: Tensor, camera: Tensor, source_K: Tensor, source: Tensor, near: Tensor, far: Tensor, D: int
) -> EpipolarSamples:
    """Everything in one dtype; the query's camera ``[B, 1, …]``, sources ``[B, V, …]``, near and far ``[B or 1, 1, 1]``."""
    eps = torch.finfo(points.dtype).eps
    into_source = _product(source_K, _inverse(source[..., :3, :3]))  # [B, V, 3, 3]
    homography = _product(into_source, _product(camera[..., :3, :3], _inverse(K)))
    centre, source_centre = camera[..., :3, 3], source[..., :3, 3]
    epipole = _apply(into_source, centre - source_centre)[:, :, None]  # [B, V, 1, 3]
    places = torch.cat([(points + 1) / 2, torch.ones_like(points[..., :1])], -1)
    ray = _apply(homography[:, :, None], places[:, None])  # [B, V, Q, 3]: where the ray ends, infinitely far

    ends = [ray + epipole / depth[..., None] for depth in (near, far)]
    lengths = [ray.detach().norm(dim=-1) + epipole.detach().norm(dim=-1) / depth.detach() for depth in (near, far)]
    start, end, seen = _clip(*(_inside(p, length, eps) for p, length in zip(ends, lengths)))
    larger = torch.maximum(centre.norm(dim=-1), source_centre.norm(dim=-1))
    apart = (centre - source_centre).norm(dim=-1) > 4 * eps * larger
    seen = seen & apart[..., None]
    start, end = torch.where(seen, start, 0), torch.where(seen, end, 0)

    first, last = ((1 - t[..., None]) * ends[0] + t[..., None] * ends[1] for t in (start, end))
    z_first, z_last = (torch.where(seen, p[..., 2], 1)[..., None] for p in (first, last))  # [B, V, Q, 1]
    along = (torch.arange(D, device=points.device, dtype=points.dtype) + 0.5) / D
    from_first, to_last = (p[..., None, :2] / z[..., None] for p, z in ((first, z_first), (last, z_last)))
    seen_at = (1 - along[:, None]) * from_first + along[:, None] * to_last  # [B, V, Q, D, 2]
    # evenly in the image is not evenly in 1/depth: the share of the interval at each sample is what triangulation gives
    share = along * z_first / (along * z_first + (1 - along) * z_last)
    t = start[..., None] + share * (end - start)[..., None]
    depths = 1 / ((1 - t) / near[..., None] + t / far[..., None])
    mask = seen[..., None].expand(depths.shape)
    return EpipolarSamples(torch.where(mask[..., None], 2 * seen_at - 1, OUTSIDE), depths, mask)


def _inside(p: Tensor, length: Tensor, eps: float) -> Tensor:
    """Five numbers for each homogeneous point, none of them negative if the source sees it: ``[…, 5]``.

    The last one excludes points close to the camera's centre, through which a ray may pass: there, rounding would decide where a
    point is seen.
    """
    x, y, z = p.unbind(-1)
    found = torch.stack([x, z - x, y, z - y, z - eps**0.5 * length], -1)
    return torch.where(found.abs() <= 8 * eps * length[..., None], 0, found)  # a line along the border is inside


def _clip(at_near: Tensor, at_far: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The part of [0, 1] (from near to far) in which linear functions with these values at both ends are not negative."""
    near_in, far_in = at_near >= 0, at_far >= 0
    crosses = near_in != far_in
    at = at_near / torch.where(crosses, at_near - at_far, 1)
    start = torch.where(crosses & far_in, at, 0).amax(-1)
    end = torch.where(crosses & near_in, at, 1).amin(-1)
    return start, end, (near_in | far_in).all(-1) & (start <= end)


# Products of small matrices are written out: autocast and TF32 would take digits off a matmul, and linalg.inv waits for the device.


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[..., None, :, :]).sum(-2)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix * vector[..., None, :]).sum(-1)


def _inverse(m: Tensor) -> Tensor:
    """Invert 3×3 matrices: the cross products of their rows, as columns, divided by the determinant."""
    a, b, c = m.unbind(-2)
    columns = torch.stack([torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)], -1)
    return columns / (a * columns[..., 0]).sum(-1)[..., None, None]
