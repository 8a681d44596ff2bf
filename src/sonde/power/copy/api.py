"""Public ``copy``: documentation, checks, choice of implementation."""

from __future__ import annotations

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from . import reference


def _check(x: Tensor) -> None:
    checks.shapes("copy", x=(x, " ".join(f"n{i}" for i in range(getattr(x, "ndim", 1)))))


def _fake(x: Tensor) -> Tensor:
    _check(x)
    return x.new_empty(x.shape)


_copy = operator(
    "copy(Tensor x) -> Tensor",
    package=__package__,
    reference=reference.copy,
    check=_check,
    fake=_fake,
    differentiable=("x",),
)


def copy(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """A contiguous copy of a tensor of any strides. The simplest operator, and our measure of bandwidth.

    Convention:
        Dimensions that are adjacent in memory are merged. Tiles are read along the dimension that is contiguous in `x` and
        written along the one that is contiguous in the result. The gradient is a contiguous copy of the incoming one.

    Args:
        x: Of any shape and strides.
        impl: ``"auto"`` is Triton on GPUs and, on CPUs, ``"numba"``, which is torch's own copy; ``"reference"`` is plain PyTorch.

    Returns:
        The same numbers in the same dtype, contiguous, always in new memory.

    Example:
        >>> import torch, sonde
        >>> sonde.power.copy(torch.arange(4.0).view(2, 2).mT)
        tensor([[0., 2.],
                [1., 3.]])
    """
    return _copy(x, impl=impl)
