"""Drop-ins for the ``ops`` of SparseDrive and Sparse4D; :func:`sonde.deformable_aggregation` documents what they compute.

Unlike the originals, whose result is always float32, the result has the dtype of the feature maps; shapes and starts may also be
tuples of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..grid import deformable_aggregation as _deformable_aggregation
from ..grid import feature_maps_format as _feature_maps_format
from ..grid._pyramid import levels as pyramid
from ..op import checks

__all__ = ["CUDA_EXT_AVAILABLE", "DeformableAggregationFunction", "deformable_aggregation_function", "feature_maps_format"]


def __dir__() -> list[str]:
    return __all__


CUDA_EXT_AVAILABLE = True  # models check this before they take the fused path


def deformable_aggregation_function(
    feature_maps: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sampling_location: Tensor, weights: Tensor
) -> Tensor:
    """Sample the feature maps at each anchor's key points, and sum with the weights.

    Args:
        feature_maps: ``[B, S, C]``.
        spatial_shape: ``[cams, L, 2]``.
        scale_start_index: ``[cams, L]``.
        sampling_location: ``[B, anchors, points, cams, 2]``.
        weights: ``[B, anchors, points, cams, L, groups]``.

    Returns:
        ``[B, anchors, C]``.
    """
    return _deformable_aggregation(feature_maps, spatial_shape, scale_start_index, sampling_location, weights)


def feature_maps_format(feature_maps: Sequence[Any], inverse: bool = False) -> list[Any]:
    """Convert feature maps to rows of pixels, and back.

    Args:
        feature_maps: Maps ``[B, cams, C, H, W]``, one for each level; or a list of such lists, where groups of cameras have maps
            of different sizes. With `inverse`, what this function returned.
        inverse: Convert back to maps.

    Returns:
        ``[features, spatial_shape, scale_start_index]``, ``[B, S, C]``, ``[cams, L, 2]`` and ``[cams, L]``, the latter two on the
        CPU, so that reading them never waits for the GPU. The starts count from the first row of all groups; in the originals
        each group counts from its own first row, which their kernel misreads. With `inverse`, a list of maps for each run of
        consecutive cameras with equal sizes.

    Example:
        >>> import torch
        >>> maps = [torch.zeros(1, 2, 8, 4, 6), torch.zeros(1, 2, 8, 2, 3)]
        >>> features, spatial_shape, scale_start_index = feature_maps_format(maps)
        >>> features.shape, scale_start_index.tolist()
        (torch.Size([1, 60, 8]), [[0, 24], [30, 54]])
        >>> [x.shape for x in feature_maps_format([features, spatial_shape, scale_start_index], inverse=True)[0]]
        [torch.Size([1, 2, 8, 4, 6]), torch.Size([1, 2, 8, 2, 3])]
    """
    checks.flags(_FORMAT, inverse=inverse)
    if inverse:
        return _maps(feature_maps)
    groups = _groups(feature_maps)
    rows, shapes, starts = [], [], []
    first = 0
    for maps in groups:
        features, shape, start = _feature_maps_format(maps)
        rows.append(features)
        shapes.append(torch.tensor(shape, device="cpu"))
        starts.append(torch.tensor(start, device="cpu") + first)
        first += features.shape[1]
    return [rows[0] if len(rows) == 1 else torch.cat(rows, 1), torch.cat(shapes), torch.cat(starts)]


class DeformableAggregationFunction:
    """``DeformableAggregationFunction.apply`` and, for Sparse4D, ``DeformableAggregationFunction.feature_maps_format``."""

    apply = staticmethod(deformable_aggregation_function)
    feature_maps_format = staticmethod(feature_maps_format)


_FORMAT = "feature_maps_format"
_NAMES = pyramid.Names("feature_maps[1]", "feature_maps[2]", "feature_maps[1]")


def _groups(given: Any) -> Sequence[Any]:
    """Lists of maps, one for each group of cameras."""
    if not isinstance(given, (list, tuple)) or not given:
        raise TypeError(
            f"{_FORMAT}: feature_maps must be a list of tensors [B, cams, C, H, W], one for each level, or a list of such lists, "
            f"one for each group of cameras; got {checks.kind(given)}"
        )
    if not any(isinstance(x, (list, tuple)) for x in given):
        pyramid.check_maps(_FORMAT, feature_maps=given)
        return [given]
    pyramid.check_maps(_FORMAT, **{f"feature_maps[{g}]": maps for g, maps in enumerate(given)})
    return given


def _maps(given: Any) -> list[list[Tensor]]:
    if not isinstance(given, (list, tuple)) or len(given) != 3:
        expected = "[features, spatial_shape, scale_start_index] where inverse=True"
        raise TypeError(f"{_FORMAT}: feature_maps must be {expected}; got {checks.kind(given)}")
    features, shapes, _ = given
    checks.shapes(_FORMAT, **{"feature_maps[0]": (features, "B S C")})
    shapes = pyramid.listed(_FORMAT, _NAMES.shapes, shapes)
    levels = pyramid.described(_FORMAT, shapes, None, "cams L", None, _NAMES)
    pyramid.check(_FORMAT, "feature_maps[0]", features, levels, "cams L", (len(levels[2]) // 3,), _NAMES)
    groups = [(shape, len(list(cameras))) for shape, cameras in groupby(shapes)]
    sizes = [[h * w for h, w in shape] for shape, _ in groups]
    parts = features.split([cams * sum(size) for (_, cams), size in zip(groups, sizes)], 1)
    return [
        [x.unflatten(2, hw).permute(0, 1, 4, 2, 3) for x, hw in zip(part.unflatten(1, (cams, -1)).split(size, 2), shape)]
        for part, (shape, cams), size in zip(parts, groups, sizes)
    ]
