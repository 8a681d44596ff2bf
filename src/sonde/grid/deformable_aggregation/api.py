"""Public ``deformable_aggregation``: documentation, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._pyramid import levels as pyramid
from . import reference

NAME = "deformable_aggregation"
Outside = Literal["drop", "zeros"]


def _check(features: Any, shapes: Any, starts: Any, locations: Any, weights: Any, levels: Any, drop: bool) -> dict[str, int]:
    operands = dict(features=(features, "B S C"), locations=(locations, "B A P cams 2"), weights=(weights, "B A P cams L G"))
    n = checks.shapes(NAME, **operands)
    if n["C"] % n["G"] if n["G"] else n["C"]:
        raise ValueError(
            f"{NAME}: weights must be [B, A, P, cams, L, G] with G groups that divide C={n['C']} channels (from features); "
            f"got {list(weights.shape)}"
        )
    pyramid.check(NAME, "features", features, (shapes, starts, levels), "cams L", (n["cams"], n["L"]))
    return n


def _fake(features: Tensor, shapes: Any, starts: Any, locations: Tensor, weights: Tensor, levels: Any, drop: bool) -> Tensor:
    n = _check(features, shapes, starts, locations, weights, levels, drop)
    return features.new_empty(n["B"], n["A"], n["C"])


_deformable_aggregation = operator(
    "deformable_aggregation(Tensor features, Tensor? spatial_shapes, Tensor? level_starts, Tensor locations, Tensor weights, "
    "SymInt[] levels, bool drop) -> Tensor",
    package=__package__,
    reference=reference.deformable_aggregation,
    check=_check,
    fake=_fake,
    differentiable=("features", "locations", "weights"),
    unbatched=("spatial_shapes", "level_starts"),
)


def arguments(features: Any, spatial_shapes: Any, level_starts: Any, locations: Any, weights: Any, outside: Any) -> tuple:
    """The schema's arguments from those of the public function."""
    if not isinstance(outside, str) or outside not in get_args(Outside):
        raise ValueError(f"{NAME}: outside must be one of {', '.join(map(repr, get_args(Outside)))}; got {outside!r}")
    if isinstance(features, (list, tuple)):
        if not all(isinstance(x, Tensor) for x in features):
            kind = f"{type(features).__name__} of {type(next(x for x in features if not isinstance(x, Tensor))).__name__}"
            raise TypeError(f"{NAME}: features must be a tensor [B, S, C], or tensors [B, cams, C, H, W] in a list; got {kind}")
        if spatial_shapes is not None or level_starts is not None:
            raise ValueError(
                f"{NAME}: spatial_shapes and level_starts must be None where features is a list of maps, which have shapes; "
                f"got {type(spatial_shapes).__name__} and {type(level_starts).__name__}"
            )
        features, spatial_shapes, level_starts = pyramid.feature_maps_format(NAME, features, "features")
    sizes = weights.shape[3:5] if isinstance(weights, Tensor) and weights.ndim == 6 and not weights.is_nested else None
    shapes, starts, levels = pyramid.described(NAME, spatial_shapes, level_starts, "cams L", sizes)
    return features, shapes, starts, locations, weights, levels, outside == "drop"


def deformable_aggregation(
    features: Tensor | Sequence[Tensor],
    spatial_shapes: Tensor | Sequence | None = None,
    level_starts: Tensor | Sequence | None = None,
    locations: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    outside: Outside = "drop",
    impl: Impl = "auto",
) -> Tensor:
    r"""Weighted sum of the features sampled at each anchor's key points, over points, cameras and pyramid levels.

    $$\mathrm{out}_{bac} = \sum_{p,m,l} \mathrm{weights}_{bapml\,g(c)}\;
      \mathrm{tap}(\mathrm{features}_{bc}\text{ of camera } m\text{, level } l,\;\mathrm{locations}_{bapm}),
      \qquad g(c) = \lfloor c\,G/C \rfloor$$

    Convention:
        Features are rows of channels, camera by camera, level by level, pixel by pixel (row-major), as
        :func:`feature_maps_format` lays them out. Locations are (u, v) in [0, 1], v along the rows of pixels: x = u·W − ½,
        y = v·H − ½. A corner outside its level counts as zero. ``outside="drop"`` drops a sample if u or v is ≤ 0
        or ≥ 1, as the CUDA extensions of SparseDrive and Sparse4D do; ``"zeros"`` pads with zeros, as
        ``grid_sample`` and the models' own fallback do. They differ within half a pixel of the edges. A sample with a non-finite
        location contributes nothing, whatever its weight.

        Levels known on the host (tuples, lists, CPU tensors) are checked. Those in GPU tensors are not, since that would wait for
        the device; whatever they contain, nothing outside the features is read. Under ``torch.compile``, tensors remain inputs of
        the graph, and tuples become its sizes.

        Features, locations and weights may differ in dtype and have any strides. Sums run in float32, or in float64 if an operand
        is float64. All three have gradients: the first derivative is fused, higher ones and forward mode go through the
        reference. The forward pass is deterministic; the gradient of the features is under
        ``torch.use_deterministic_algorithms(True)`` and always on CPUs.

    Args:
        features: ``[B, S, C]`` with S the sum of H·W over all cameras and levels; or a list of maps ``[B, cams, C, H, W]``, one
            for each level, then without `spatial_shapes` and `level_starts`.
        spatial_shapes: Height and width of every level, ``[cams, L, 2]``.
        level_starts: The first row of every level, ``[cams, L]``, in any order but without overlap; None computes it
            from the shapes, which must then be known on the host: not a tensor on a GPU or under ``torch.compile``.
        locations: Where each key point is in each camera's image, ``[B, A, P, cams, 2]``.
        weights: ``[B, A, P, cams, L, G]``; the C channels are cut into G equal groups.
        outside: ``"drop"`` or ``"zeros"``.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, A, C]`` in the dtype of `features`.

    Example:
        >>> import torch, sonde
        >>> features = torch.arange(5.0).reshape(1, 5, 1)  # one camera, levels of 2×2 pixels and of one
        >>> locations = torch.tensor([0.5, 0.5]).reshape(1, 1, 1, 1, 2)
        >>> weights = torch.tensor([1.0, 10.0]).reshape(1, 1, 1, 1, 2, 1)
        >>> sonde.deformable_aggregation(features, [[(2, 2), (1, 1)]], None, locations, weights)
        tensor([[[41.5000]]])
    """
    args = arguments(features, spatial_shapes, level_starts, locations, weights, outside)
    return _deformable_aggregation(*args, impl=impl)


def feature_maps_format(maps: Sequence[Tensor]) -> tuple[Tensor, tuple, tuple]:
    """The features of `deformable_aggregation` from maps ``[B, cams, C, H, W]``, one for each level, by one copy.

    Returns:
        features ``[B, S, C]``, spatial_shapes ``[cams, L, 2]`` and level_starts ``[cams, L]``; the latter two are tuples of
        integers, so that nothing waits for a device.

    Example:
        >>> import torch, sonde
        >>> features, shapes, starts = sonde.feature_maps_format([torch.zeros(1, 2, 8, 4, 6), torch.zeros(1, 2, 8, 2, 3)])
        >>> features.shape, shapes, starts
        (torch.Size([1, 60, 8]), (((4, 6), (2, 3)), ((4, 6), (2, 3))), ((0, 24), (30, 54)))
    """
    return pyramid.feature_maps_format("feature_maps_format", maps)
