"""Drop-ins for ``fused_grid_ops`` (later called ``fused_sample_ops``): ``import sonde.compat.fused_grid_ops as fused_grid_ops``."""

from __future__ import annotations

from torch import Tensor

from ..grid import sample_dot as _sample_dot
from ..grid import sample_sum as _sample_sum

__all__ = ["sample_dot", "sample_dot_fused", "sample_sum", "sample_sum_fused"]


def __dir__() -> list[str]:
    return __all__


def sample_dot(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor, num_octaves: int) -> Tensor:
    """Scalar products of queries, and of the positional encoding of depths, with image samples: :func:`sonde.sample_dot`.

    Samples and depths have gradients too. With ``num_octaves=0`` depths take no part; the original's result is then undefined.

    Args:
        images: ``[B, C, H, W]``.
        samples: Where to look, ``[B, Q, D, 2]`` in [−1, 1].
        queries: ``[B, heads, Q, C − 2·num_octaves]``.
        depths: ``[B, Q, D]``.
        num_octaves: Octaves of the encoding, which multiplies the last 2·num_octaves channels of the images.

    Returns:
        ``[B, heads, Q, D]``.
    """
    return _sample_dot(images, samples, queries, depths, num_octaves)


def sample_sum(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of image samples along each query's line: :func:`sonde.sample_sum`.

    Args:
        images: ``[B, C, H, W]``.
        samples: Where to look, ``[B, Q, D, 2]`` in [−1, 1].
        weights: ``[B, heads, Q, D]``.

    Returns:
        ``[B, heads, Q, C]``.
    """
    return _sample_sum(images, samples, weights)


sample_dot_fused = sample_dot
sample_sum_fused = sample_sum
