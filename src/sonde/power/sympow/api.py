"""Public ``sympow``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._dense.arguments import batched, matrices
from .._sympow.arguments import basis
from .._sympow.basis import dimension
from . import reference


def _check(x: Tensor, power: int, d_tile: int, scaled: bool) -> None:
    d = checks.shapes("sympow", x=(x, "B d"))["d"]
    basis("sympow", int(d), power, d_tile, x.shape)


def _fake(x: Tensor, power: int, d_tile: int, scaled: bool) -> Tensor:
    _check(x, power, d_tile, scaled)
    return x.new_empty(x.shape[0], dimension(int(x.shape[1]), power, d_tile))


_sympow = operator(
    "sympow(Tensor x, int power, int d_tile, bool scaled) -> Tensor",
    package=__package__,
    reference=reference.sympow,
    check=_check,
    fake=_fake,
    differentiable=("x",),
)


def _rows(x: Any, power: Any, d_tile: Any, dim: Any, scaled: Any) -> tuple[Tensor, int, int]:
    """`x` with the dimension last, the power and the size of tiles."""
    matrices("sympow", least=1, x=x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"sympow: dim must be an integer; got {checks.kind(dim)}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"sympow: dim must be in [{-x.ndim}, {x.ndim - 1}]; got {dim}")
    checks.flags("sympow", scaled=scaled)
    x = x if dim in (-1, x.ndim - 1) else x.movedim(dim, -1)
    return x, *basis("sympow", int(x.shape[-1]), power, d_tile, x.shape)


def arguments(x: Any, power: Any, d_tile: Any = None, dim: Any = -1, scaled: Any = True) -> tuple[Any, ...]:
    """The operator's arguments."""
    rows, power, d_tile = _rows(x, power, d_tile, dim, scaled)
    return batched(rows, 1), power, d_tile, scaled


def sympow(x: Tensor, power: int, *, d_tile: int | None = None, dim: int = -1, scaled: bool = True, impl: Impl = "auto") -> Tensor:
    r"""Symmetric tensor power φ: $\langle\varphi(x), \varphi(y)\rangle = (x \cdot y)^p$ for all x and y.

    $$\varphi(x)_{t, a_0 \ldots a_{p-1}} = \sqrt{\mathrm{mult}(s_t)}\;\prod_i x_{s_t[p-1-i]\,d_\mathrm{tile} + a_i}$$

    Convention:
        x is cut into n = d / d_tile tiles, and $s_t$ runs through the sequences of p tiles that do not increase, its first
        index fastest: for n = 3 and p = 2 (0,0) (1,0) (2,0) (1,1) (2,1) (2,2). mult(s) is the number of its distinct permutations.
        D = C(n + p − 1, p) · d_tileᵖ (:func:`sympow_dim`); ``d_tile=1`` is the smallest basis, ``d_tile=d`` the full tensor
        power. Products and roots are taken in float32, or in float64, and rounded once. The first derivative is fused,
        higher ones go through the reference.

    Args:
        x: ``[…, d]``.
        power: p, from 1 to 4.
        d_tile: Divides d; the largest of 8, 4, 2 and 1 that does, unless given.
        dim: The dimension to expand: d in `x`, D in the result.
        scaled: ``False`` omits the root.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[…, D]`` in the dtype of `x`.

    Example:
        >>> import torch, sonde
        >>> sonde.power.sympow(torch.tensor([1.0, 2.0, 3.0]), 2, d_tile=1)
        tensor([1.0000, 2.8284, 4.2426, 4.0000, 8.4853, 9.0000])
    """
    rows, power, d_tile = _rows(x, power, d_tile, dim, scaled)
    out = _sympow(batched(rows, 1), power, d_tile, scaled, impl=impl)
    return out.reshape(*rows.shape[:-1], out.shape[-1]).movedim(-1, dim)


def sympow_dim(d: int, power: int, d_tile: int | None = None) -> int:
    """D, the size of :func:`sympow`'s result: C(d / d_tile + power − 1, power) · d_tile**power.

    Args:
        d: Size of the vector that is raised to the power.
        power: From 1 to 4.
        d_tile: Divides d; the largest of 8, 4, 2 and 1 that does, unless given.

    Example:
        >>> import sonde
        >>> sonde.power.sympow_dim(64, 2, 8), sonde.power.sympow_dim(64, 2, 1)
        (2304, 2080)
    """
    checks.count("sympow_dim", "d", d, least=1)
    return dimension(d, *basis("sympow_dim", d, power, d_tile))
