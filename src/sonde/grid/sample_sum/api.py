"""Public ``sample_sum``: documentation, checks, choice of implementation."""

from __future__ import annotations

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from . import reference


def _shapes(images: Tensor, samples: Tensor, weights: Tensor) -> dict[str, int]:
    return checks.shapes("sample_sum", images=(images, "B C H W"), samples=(samples, "B Q D 2"), weights=(weights, "B h Q D"))


def _fake(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    n = _shapes(images, samples, weights)
    return images.new_empty(n["B"], n["h"], n["Q"], n["C"])


_sample_sum = operator(
    "sample_sum(Tensor images, Tensor samples, Tensor weights) -> Tensor",
    package=__package__,
    reference=reference.sample_sum,
    check=_shapes,
    fake=_fake,
    differentiable=("images", "samples", "weights"),
    channels_last=("images",),
)


def sample_sum(images: Tensor, samples: Tensor, weights: Tensor, *, impl: Impl = "auto") -> Tensor:
    r"""Weighted sum of bilinear image samples along each query's line, for several heads at once.

    $$\mathrm{out}_{bhqc} = \sum_d \mathrm{weights}_{bhqd}\;\mathrm{tap}(\mathrm{images}_{bc},\,\mathrm{samples}_{bqd})$$

    Convention:
        Coordinates are (x, y) in [−1, 1] with ``align_corners=False``: x = ((u + 1)·W − 1)/2. A corner outside the image
        counts as zero, and so does a sample with a non-finite coordinate, whatever its weight. Images may be contiguous or
        channels-last (never copied); images, samples and weights may differ in dtype. Sums run in float32, or in float64 if
        any operand is float64. All three inputs have gradients: the first derivative is fused, higher ones and forward mode
        go through the reference. The forward pass is deterministic; the gradient of the images is under
        ``torch.use_deterministic_algorithms(True)`` and always on CPUs.

    Args:
        images: ``[B, C, H, W]``.
        samples: Where to look, ``[B, Q, D, 2]``.
        weights: One per head and sample, ``[B, h, Q, D]``.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, h, Q, C]`` in the dtype of `images`.

    Example:
        >>> import torch, sonde
        >>> images = torch.arange(4.0).reshape(1, 1, 2, 2)
        >>> centre, corner = [0.0, 0.0], [-0.5, -0.5]
        >>> samples = torch.tensor([[[centre, corner]]])
        >>> sonde.sample_sum(images, samples, torch.ones(1, 1, 1, 2))
        tensor([[[[1.5000]]]])
    """
    return _sample_sum(images, samples, weights, impl=impl)
