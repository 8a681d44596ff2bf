"""Public ``mm``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._dense.arguments import matrices, tf32, unbatched
from . import reference


def _shapes(a: Tensor, b: Tensor, tf32: bool) -> dict[str, int]:
    return checks.shapes("mm", a=(a, "B M K"), b=(b, "B K N"))


def _fake(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    n = _shapes(a, b, tf32)
    return a.new_empty(n["B"], n["M"], n["N"])


_mm = operator(
    "mm(Tensor a, Tensor b, bool tf32) -> Tensor",
    package=__package__,
    reference=reference.mm,
    check=_shapes,
    fake=_fake,
    differentiable=("a", "b"),
)


def arguments(a: Any, b: Any) -> tuple[Any, ...]:
    """The operator's arguments."""
    return (*_matrices(a, b)[1], tf32())


def _matrices(a: Any, b: Any) -> tuple[tuple[int, ...], list[Tensor]]:
    leading, operands = matrices("mm", a=a, b=b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"mm: b must be […, K, N] with K={a.shape[-1]} (from a, {list(a.shape)}); got {list(b.shape)}")
    return leading, operands


def mm(a: Tensor, b: Tensor, *, impl: Impl = "auto") -> Tensor:
    r"""Product of matrices: $\mathrm{out}_{mn} = \sum_k a_{mk}\,b_{kn}$.

    Convention:
        Any strides; transposed and sliced operands are read in place. Sums run in float32, or in float64 if any operand
        is float64, and are rounded once. Operands of different dtypes are multiplied in the one that holds both. float32 is
        multiplied as float32, unless ``torch.backends.cuda.matmul.allow_tf32`` is on; CPUs ignore that switch. Both operands have
        gradients, which are products too. Every result has the same bits in every run.

    Args:
        a: ``[…, M, K]``.
        b: ``[…, K, N]``, with the same leading dimensions: nothing is broadcast, but an expanded tensor is not copied.
        impl: ``"auto"`` is Triton on GPUs and, on CPUs, ``"numba"``, which is torch's BLAS; ``"reference"`` is plain PyTorch.

    Returns:
        ``[…, M, N]`` in the dtype of `a`.

    Example:
        >>> import torch, sonde
        >>> sonde.power.mm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
        tensor([[11.]])
    """
    leading, operands = _matrices(a, b)
    return unbatched(_mm(*operands, tf32(), impl=impl), leading)
