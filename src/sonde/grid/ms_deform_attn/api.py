"""Public ``ms_deform_attn``: documentation, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._pyramid import levels as pyramid
from . import reference

NAME = "ms_deform_attn"


def _check(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, levels: Any, logits: bool) -> dict[str, int]:
    n = checks.shapes(NAME, value=(value, "B S h D"), locations=(locations, "B Q h L P 2"), weights=(weights, "B Q h L P"))
    pyramid.check(NAME, "value", value, (shapes, starts, levels), "L", (n["L"],))
    return n


def _fake(value: Tensor, shapes: Any, starts: Any, locations: Tensor, weights: Tensor, levels: Any, logits: bool) -> Tensor:
    n = _check(value, shapes, starts, locations, weights, levels, logits)
    return value.new_empty(n["B"], n["Q"], n["h"] * n["D"])


_ms_deform_attn = operator(
    "ms_deform_attn(Tensor value, Tensor? spatial_shapes, Tensor? level_starts, Tensor locations, Tensor weights, "
    "SymInt[] levels, bool logits) -> Tensor",
    package=__package__,
    reference=reference.ms_deform_attn,
    check=_check,
    fake=_fake,
    differentiable=("value", "locations", "weights"),
    unbatched=("spatial_shapes", "level_starts"),
)


def arguments(value: Any, spatial_shapes: Any, level_starts: Any, locations: Any, weights: Any, logits: Any) -> tuple:
    """The schema's arguments from those of the public function."""
    if not isinstance(logits, bool):
        raise TypeError(f"{NAME}: logits must be True or False; got {logits!r}")
    sizes = weights.shape[3:4] if isinstance(weights, Tensor) and weights.ndim == 5 and not weights.is_nested else None
    shapes, starts, levels = pyramid.described(NAME, spatial_shapes, level_starts, "L", sizes)
    return value, shapes, starts, locations, weights, levels, logits


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor | Sequence,
    level_starts: Tensor | Sequence | None,
    locations: Tensor,
    weights: Tensor,
    *,
    logits: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    r"""Multi-scale deformable attention: each head of a query sums samples at a few places of a feature pyramid.

    $$\mathrm{out}_{bq,\,hD+c} = \sum_{l,p} \mathrm{weights}_{bqhlp}\;
      \mathrm{tap}(\mathrm{value}_{bhc}\text{ of level } l,\;\mathrm{locations}_{bqhlp})$$

    Convention:
        Values are rows, level by level, pixel by pixel (row-major). Locations are (u, v) in [0, 1], v along the rows of pixels:
        x = u·W − ½, y = v·H − ½. A corner outside its level counts as zero, as in ``grid_sample``, and so does a
        sample with a non-finite location, whatever its weight. With ``logits=True``, a softmax over all L·P samples of a query's
        head, including those outside, turns `weights` into weights.

        Levels known on the host (tuples, lists, CPU tensors) are checked. Those in GPU tensors are not, since that would wait for
        the device; whatever they contain, nothing outside the values is read. Under ``torch.compile``, tensors remain inputs of
        the graph, and tuples become its sizes.

        Value, locations and weights may differ in dtype and have any strides. Sums run in float32, or in float64 if an operand is
        float64. All three have gradients: the first derivative is fused, higher ones and forward mode go through the
        reference. The forward pass is deterministic; the gradient of the value is under
        ``torch.use_deterministic_algorithms(True)`` and always on CPUs.

    Args:
        value: ``[B, S, h, D]`` with S the sum of H·W over all levels.
        spatial_shapes: Height and width of every level, ``[L, 2]``.
        level_starts: The first row of every level, ``[L]``, in any order but without overlap; None computes it from
            the shapes, which must then be known on the host: not a tensor on a GPU or under ``torch.compile``.
        locations: Where each query's heads look, ``[B, Q, h, L, P, 2]``.
        weights: ``[B, Q, h, L, P]``.
        logits: Whether `weights` are logits, to which the softmax is still to be applied.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, Q, h·D]`` in the dtype of `value`.

    Example:
        >>> import torch, sonde
        >>> value = torch.arange(5.0).reshape(1, 5, 1, 1)  # levels of 2×2 pixels and of one
        >>> locations = torch.full((1, 1, 1, 2, 1, 2), 0.5)
        >>> weights = torch.tensor([0.5, 0.5]).reshape(1, 1, 1, 2, 1)
        >>> sonde.ms_deform_attn(value, [(2, 2), (1, 1)], None, locations, weights)
        tensor([[[2.7500]]])
    """
    args = arguments(value, spatial_shapes, level_starts, locations, weights, logits)
    return _ms_deform_attn(*args, impl=impl)
