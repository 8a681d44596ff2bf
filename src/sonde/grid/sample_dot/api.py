"""Public ``sample_dot``: documentation, checks, choice of implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._epipolar.checks import check_encoding
from . import reference


def _shapes(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> dict[str, int]:
    operands = dict(images=(images, "B C H W"), samples=(samples, "B Q D 2"), queries=(queries, "B h Q C'"))
    if depths is not None:
        operands["depths"] = (depths, "B Q D")
    n = checks.shapes("sample_dot", **operands)
    check_encoding("sample_dot", n, queries, depths, num_octaves)
    return n


def _fake(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> Tensor:
    n = _shapes(images, samples, queries, depths, num_octaves)
    return images.new_empty(n["B"], n["h"], n["Q"], n["D"], dtype=torch.promote_types(images.dtype, queries.dtype))


_sample_dot = operator(
    "sample_dot(Tensor images, Tensor samples, Tensor queries, Tensor? depths, int num_octaves) -> Tensor",
    package=__package__,
    reference=reference.sample_dot,
    check=_shapes,
    fake=_fake,
    differentiable=("images", "samples", "queries", "depths"),
    channels_last=("images",),
)


def sample_dot(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None = None, num_octaves: int = 0, *, impl: Impl = "auto"
) -> Tensor:
    r"""Scalar products of queries with bilinear image samples along each query's line, for several heads at once.

    $$\mathrm{out}_{bhqd} = \sum_{c<C'} \mathrm{tap}_c\,\mathrm{queries}_{bhqc}
      + \sum_{f} \bigl(\mathrm{tap}_{C'+2f}\sin 2\pi r_f + \mathrm{tap}_{C'+2f+1}\cos 2\pi r_f\bigr)$$

    with tap_c = tap(images_{bc}, samples_{bqd}), C' = C − 2·num_octaves, t = 2^f·depths_{bqd} and r_f = t − round(t).

    Convention:
        Coordinates are (x, y) in [−1, 1] with ``align_corners=False``: x = ((u + 1)·W − 1)/2. A corner outside the image counts as
        zero; a sample that sees no pixel, or has a non-finite coordinate, gives exactly 0. The last 2·num_octaves channels of the
        images are multiplied by the positional encoding of the depth (octave-major, sine then cosine), the same for every head.
        Images may be contiguous or channels-last (never copied); operands may differ in dtype. Sums run in float32, or in float64
        if any operand is float64. All four tensors have gradients: the first derivative is fused, higher ones and forward mode go
        through the reference. The forward pass is deterministic; the gradient of the images is under
        ``torch.use_deterministic_algorithms(True)`` and always on CPUs.

    Args:
        images: ``[B, C, H, W]``.
        samples: Where to look, ``[B, Q, D, 2]``.
        queries: ``[B, h, Q, C']``.
        depths: ``[B, Q, D]``; needed where `num_octaves` > 0.
        num_octaves: Octaves of the positional encoding.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, h, Q, D]`` in the promoted dtype of `images` and `queries`.

    Example:
        >>> import torch, sonde
        >>> images = torch.tensor([[[[1.0]], [[2.0]], [[4.0]]]])  # three channels of one pixel
        >>> samples = torch.zeros(1, 1, 1, 2)
        >>> sonde.sample_dot(images, samples, torch.full((1, 1, 1, 1), 5.0), torch.full((1, 1, 1), 0.25), num_octaves=1)
        tensor([[[[7.]]]])
    """
    return _sample_dot(images, samples, queries, depths, num_octaves, impl=impl)
