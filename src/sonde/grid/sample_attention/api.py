"""Public ``sample_attention``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...op import checks
from ...op.dtypes import accumulator
from ...op.plan import Impl, recording
from ...op.register import operator
from .._epipolar.checks import check_encoding
from . import reference

NAME = "sample_attention"


def _check(
    images: Any, samples: Any, queries: Any, depths: Any, values: Any, mask: Any, views: int, num_octaves: int, scale: Any
) -> dict[str, int]:
    """Check the schema's arguments; images, samples, depths, values and mask have the views of a batch row as consecutive rows."""
    checks.count(NAME, "views", views, 1)
    several = "" if views == 1 else "V·"
    operands = dict(images=(images, f"{several}B C H W"), samples=(samples, f"{several}B Q D 2"), queries=(queries, "B h Q C'"))
    if depths is not None:
        operands["depths"] = (depths, f"{several}B Q D")
    if values is not None:
        operands["values"] = (values, f"{several}B C_v H W")
    n = checks.shapes(NAME, **operands)
    check_encoding(NAME, n, queries, depths, num_octaves)
    if views > 1 and n["V·B"] != views * n["B"]:
        raise ValueError(f"{NAME}: images must have {views} views for each of B={n['B']} rows of queries; got {n['V·B']}")
    if mask is not None:
        checks.mask(NAME, "mask", mask, f"{several}B Q D", n, images.device)
    if scale is not None:
        checks.positive(NAME, "scale", scale)
    return n


def _fake(images: Tensor, samples: Tensor, queries: Tensor, depths: Any, values: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    n = _check(images, samples, queries, depths, values, *rest)
    out = (images if values is None else values).new_empty(n["B"], n["h"], n["Q"], n["C'" if values is None else "C_v"])
    wide = accumulator(images, samples, queries, depths, values)
    total = (*out.shape[:3], out.shape[3] if out.dtype != wide else 0)
    return out, out.new_empty(out.shape[:3], dtype=wide), out.new_empty(total, dtype=wide)


_sample_attention = operator(
    "sample_attention(Tensor images, Tensor samples, Tensor queries, Tensor? depths, Tensor? values, Tensor? mask, "
    "SymInt views, SymInt num_octaves, float? scale) -> (Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.sample_attention,
    check=_check,
    fake=_fake,
    differentiable=("images", "samples", "queries", "depths", "values"),
    channels_last=("images", "values"),
    saved=(0, 1, 2),
    no_grad=(1, 2),
)


def arguments(
    images: Any, samples: Any, queries: Any, depths: Any = None, num_octaves: Any = 0, values: Any = None, scale: Any = None,
    mask: Any = None,
) -> tuple:  # fmt: skip
    """Convert public arguments to the schema's: the views of a batch row become consecutive rows."""
    views = 1
    if isinstance(images, Tensor) and images.ndim == 5 and getattr(samples, "ndim", 5) == 5:
        patterns = dict(images="B V C H W", samples="B V Q D 2", queries="B h Q C'", depths="B V Q D", values="B V C_v H W")
        given = dict(images=images, samples=samples, queries=queries, depths=depths, values=values)
        n = checks.shapes(NAME, **{name: (x, patterns[name]) for name, x in given.items() if x is not None})
        if mask is not None:
            checks.mask(NAME, "mask", mask, "B V Q D", n, images.device)
        views = checks.count(NAME, "the number of views", n["V"], 1)
        images, samples, depths, values, mask = (x if x is None else _rows(x) for x in (images, samples, depths, values, mask))
    return images, samples, queries, depths, values, mask, views, num_octaves, scale


def _rows(x: Tensor) -> Tensor:
    """Views as rows of the batch."""
    if torch.compiler.is_compiling() or not recording():
        return x.flatten(0, 1)
    # a plan's device may not exist here, and then autograd cannot record a view
    return x.detach().flatten(0, 1).requires_grad_(x.requires_grad)


def sample_attention(
    images: Tensor,
    samples: Tensor,
    queries: Tensor,
    depths: Tensor | None = None,
    num_octaves: int = 0,
    *,
    values: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Attention of queries over bilinear image samples along each query's line, for several heads, in one pass.

    $$\mathrm{out}_{bhqc} = \sum_d p_{bhqd}\;\mathrm{tap}(\mathrm{values}_{bc},\,\mathrm{samples}_{bqd}), \qquad
      p = \mathrm{softmax}_d\bigl(\mathrm{scale}\cdot\mathrm{sample\_dot}(\mathrm{images}, \mathrm{samples}, \mathrm{queries},
      \mathrm{depths}, \mathrm{num\_octaves})\bigr)$$

    Each sample is read once, for the scores and the values of all heads; neither samples nor scores are ever stored. With several
    views, ``images [B, V, C, H, W]`` and everything that belongs to samples ``[B, V, …]``, the softmax runs over the samples of
    all views of a query.

    Convention:
        Coordinates and depths are those of :func:`sample_dot`. A sample outside of its image, or with a non-finite coordinate,
        has logit 0 and value 0 and takes part in the softmax; only `mask` leaves samples out. A query without any sample
        gives 0 and zero gradients. Operands may differ in dtype, images and values may be contiguous or channels-last (never
        copied). Sums run in float32, or in float64 if an operand is float64. Images, samples, queries, depths and values have
        gradients: the first derivative is fused and recomputes what it needs, higher ones and forward mode go through the
        reference. The forward pass is deterministic; the gradients of images and values are under
        ``torch.use_deterministic_algorithms(True)`` and always on CPUs.

    Args:
        images: What queries are compared with, ``[B, C, H, W]`` or ``[B, V, C, H, W]``.
        samples: Where to look, ``[B, Q, D, 2]`` or ``[B, V, Q, D, 2]``.
        queries: ``[B, h, Q, C']`` with C' = C − 2·num_octaves.
        depths: ``[B, Q, D]`` or ``[B, V, Q, D]``; needed where `num_octaves` > 0.
        num_octaves: Octaves of the positional encoding, which multiplies the last 2·num_octaves channels of the images.
        values: What is summed, ``[B, C_v, H, W]`` or ``[B, V, C_v, H, W]``; the first C' channels of `images` unless given.
        scale: Factor of the logits; C'^−½ unless given.
        mask: False for samples that take no part, ``[B, Q, D]`` or ``[B, V, Q, D]``.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, h, Q, C_v]`` in the dtype of `values`, or of `images`.

    Example:
        >>> import torch, sonde
        >>> images = torch.tensor([[[[1.0, 3.0]]]])  # two pixels of one channel
        >>> samples = torch.tensor([[[[-0.5, 0.0], [0.5, 0.0]]]])  # the centre of each
        >>> queries = torch.tensor([[[[0.0]], [[100.0]]]])  # two heads: one that looks everywhere, one that wants the largest
        >>> sonde.sample_attention(images, samples, queries)
        tensor([[[[2.]],
        <BLANKLINE>
                 [[3.]]]])
    """
    args = arguments(images, samples, queries, depths, num_octaves, values, scale, mask)
    return _sample_attention(*args, impl=impl)[0]
