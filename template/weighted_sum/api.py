"""Public ``weighted_sum``: documentation, checks, choice of implementation."""

from __future__ import annotations

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from . import reference


def _shapes(rows: Tensor, weights: Tensor) -> dict[str, int]:
    return checks.shapes("weighted_sum", rows=(rows, "B Q C"), weights=(weights, "B Q"))


def _fake(rows: Tensor, weights: Tensor) -> Tensor:
    n = _shapes(rows, weights)
    return rows.new_empty(n["B"], n["C"])


_weighted_sum = operator(
    "weighted_sum(Tensor rows, Tensor weights) -> Tensor",
    package=__package__,
    reference=reference.weighted_sum,
    check=_shapes,
    fake=_fake,
    differentiable=("rows", "weights"),
)


def weighted_sum(rows: Tensor, weights: Tensor, *, impl: Impl = "auto") -> Tensor:
    r"""Sum of rows, each times its weight: $\mathrm{out}_{bc} = \sum_q \mathrm{weights}_{bq}\,\mathrm{rows}_{bqc}$.

    Args:
        rows: ``[B, Q, C]``.
        weights: ``[B, Q]``.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, C]`` in the dtype of `rows`.

    Example:
        >>> import torch, sonde
        >>> sonde.weighted_sum(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[1.0, 10.0]]))
        tensor([[31., 42.]])
    """
    return _weighted_sum(rows, weights, impl=impl)
