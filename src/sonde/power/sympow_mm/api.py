"""Public ``sympow_mm``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ...op import checks
from ...op.plan import Impl
from ...op.register import operator
from .._dense.arguments import matrices, number, tf32, unbatched
from .._sympow.arguments import basis
from .._sympow.basis import dimension
from . import reference


def _shapes(
    a: Tensor, b: Tensor, accumulate: Tensor | None, power: int, expand: str, d_tile: int, scaled: bool, alpha: float, beta: float,
    tf32: bool,
) -> dict[str, int]:  # fmt: skip
    n = checks.shapes("sympow_mm", a=(a, "B M d" if expand == "k" else "B d K"))
    basis("sympow_mm", int(n["d"]), power, d_tile, a.shape)
    D = dimension(int(n["d"]), power, d_tile)
    which = f"D={D} for d={int(n['d'])}, power={power}, d_tile={d_tile}"
    if expand == "k" and getattr(b, "ndim", 0) == 3 and b.shape[1] != D:
        raise ValueError(f"sympow_mm: b must be [B, D, N] with B={n['B']} (from a) and {which}; got {list(b.shape)}")
    patterns = dict(k=("B M d", "B D N", "B M N"), m=("B d K", "B K N", "B D N"))[expand]
    n = checks.shapes("sympow_mm", a=(a, patterns[0]), b=(b, patterns[1]))
    if accumulate is not None:
        rows = n["M"] if expand == "k" else D
        made = checks.shapes("sympow_mm", a=(a, patterns[0]), accumulate=(accumulate, "B rows N"))
        if (made["rows"], made["N"]) != (rows, n["N"]):
            raise ValueError(
                f"sympow_mm: accumulate must be [B, {patterns[2][2]}, N] with B={n['B']} (from a), N={n['N']} (from b), "
                f"{which if expand == 'm' else f'M={rows}'}; got {list(accumulate.shape)}"
            )
    return {**n, "D": D}


def _fake(a: Tensor, *rest: Any) -> Tensor:
    n = _shapes(a, *rest)
    return a.new_empty(n["B"], n["M"] if rest[3] == "k" else n["D"], n["N"])


_sympow_mm = operator(
    "sympow_mm(Tensor a, Tensor b, Tensor? accumulate, int power, str expand, int d_tile, bool scaled, float alpha, float beta, "
    "bool tf32) -> Tensor",
    package=__package__,
    reference=reference.sympow_mm,
    check=_shapes,
    fake=_fake,
    differentiable=("a", "b", "accumulate"),
)


def arguments(
    a: Any, b: Any, power: Any, expand: Any, d_tile: Any = None, scale: Any = 1.0, scaled: Any = True, accumulate: Any = None,
    alpha: Any = 1.0, beta: Any = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    """The operator's arguments."""
    checks.choice("sympow_mm", "expand", expand, ("k", "m"))
    checks.flags("sympow_mm", scaled=scaled)
    factors = {n: number("sympow_mm", n, v) for n, v in (("scale", scale), ("alpha", alpha), ("beta", beta))}
    given = dict(a=a, b=b) if accumulate is None else dict(a=a, b=b, accumulate=accumulate)
    _, (a, b, *added) = matrices("sympow_mm", **given)
    power, d_tile = basis("sympow_mm", int(a.shape[-1] if expand == "k" else a.shape[-2]), power, d_tile, a.shape)
    accumulate = added[0] if added else None
    alpha, beta = number("sympow_mm", "alpha * scale", factors["alpha"] * factors["scale"]), factors["beta"]
    if accumulate is not None and beta == 0:
        _shapes(a, b, accumulate, power, expand, d_tile, scaled, alpha, beta, False)
        accumulate = None  # as in BLAS, it is not read if beta is 0
    return a, b, accumulate, power, expand, d_tile, scaled, alpha, beta, tf32()


def sympow_mm(
    a: Tensor, b: Tensor, power: int, *, expand: Literal["k", "m"], d_tile: int | None = None, scale: float = 1.0,
    scaled: bool = True, accumulate: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, impl: Impl = "auto",
) -> Tensor:  # fmt: skip
    r"""Product with a symmetric power φ (:func:`sympow`) that is never written to memory.

    $$\mathrm{expand}=\texttt{"k"}:\quad \mathrm{out} = \alpha\,\mathrm{scale}\;\varphi(a)\,b + \beta\,\mathrm{accumulate}$$
    $$\mathrm{expand}=\texttt{"m"}:\quad \mathrm{out} = \alpha\,\mathrm{scale}\;\varphi_{-2}(a)\,b + \beta\,\mathrm{accumulate}$$

    Convention:
        φ expands d to D = :func:`sympow_dim`: the last dimension of `a`, which is summed over, or the one before it, which is
        kept. ``"k"`` applies queries to a state, ``"m"`` builds a state from keys and values. The order of φ's columns is that of
        :func:`sympow`. Sums run in float32, or in float64 if any operand is float64; half-precision φ is rounded
        before it is multiplied, never more coarsely than by ``sympow``. float32 is multiplied as float32, unless
        ``torch.backends.cuda.matmul.allow_tf32`` is on. The gradient of `b` is the other expansion, that of `a` one kernel, which
        writes neither φ nor its gradient. Every result has the same bits in every run.

    Args:
        a: ``[…, M, d]`` for ``expand="k"``, ``[…, d, K]`` for ``"m"``.
        b: ``[…, D, N]`` or ``[…, K, N]``, with the same leading dimensions.
        power: From 1 to 4.
        expand: Whether φ's columns are summed over (``"k"``) or are rows of the result (``"m"``).
        d_tile: Divides d; the largest of 8, 4, 2 and 1 that does, unless given. 4, 8 and 16 are fast for power 2.
        scale: Multiplies φ.
        scaled: ``False`` omits the roots of multiplicities.
        accumulate: Added, if `beta` is not 0; of the result's shape.
        alpha: Multiplies the product.
        beta: Multiplies `accumulate`.
        impl: ``"auto"`` is Triton on GPUs and, on CPUs, ``"numba"``: Numba or torch's BLAS; ``"reference"`` is plain PyTorch.

    Returns:
        ``[…, M, N]`` or ``[…, D, N]`` in the dtype of `a`.

    Example:
        >>> import torch, sonde
        >>> keys, values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [10.0]])
        >>> state = sonde.power.sympow_mm(keys.mT, values, 2, expand="m")
        >>> sonde.power.sympow_mm(torch.tensor([[1.0, 1.0]]), state, 2, expand="k")  # Σ (q·k)² v = 9 · 1 + 49 · 10
        tensor([[499.]])
    """
    given = arguments(a, b, power, expand, d_tile, scale, scaled, accumulate, alpha, beta)
    return unbatched(_sympow_mm(*given, impl=impl), a.shape[:-2])
