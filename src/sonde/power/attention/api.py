"""Public ``attention``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from ...op import checks
from ...op.dtypes import accumulator
from ...op.plan import Impl
from ...op.register import operator
from .._dense.arguments import number, tf32, widths
from .._dense.reference import residual_dtype
from . import reference


def _shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool) -> dict[str, int]:
    n = checks.shapes("attention", q=(q, "B hq T d"), k=(k, "B h S d"), v=(v, "B h S e"))
    if n["h"] == 0 or n["hq"] % n["h"]:
        raise ValueError(f"attention: q must have a multiple of the heads of k and v, {n['h']}; got {list(q.shape)}")
    widths("attention", q=n["d"], v=n["e"])
    return n


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    n = _shapes(q, k, v, causal, scale, tf32)
    rows = n["B"], n["hq"], n["T"]
    lost = residual_dtype(accumulator(q, k, v), q, k, v)
    return (
        q.new_empty(*rows, n["e"]),
        q.new_empty(rows, dtype=accumulator(q, k, v)),
        q.new_empty(*rows, n["e"], dtype=lost) if lost else q.new_empty(*rows, 0),
    )


_attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale, bool tf32) -> (Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.attention,
    check=_shapes,
    fake=_fake,
    differentiable=("q", "k", "v"),
    saved=(0, 1, 2),
    no_grad=(1, 2),
)


def arguments(q: Any, k: Any, v: Any, causal: Any = False, scale: Any = None, return_lse: Any = False) -> tuple[Any, ...]:
    """The operator's arguments."""
    checks.flags("attention", causal=causal, return_lse=return_lse)
    return q, k, v, causal, None if scale is None else number("attention", "scale", scale), tf32()


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, return_lse: Literal[False] = False,
    impl: Impl = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, return_lse: Literal[True],
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, return_lse: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    r"""Exact softmax attention: $\mathrm{out}_i = \sum_j \mathrm{softmax}_j(\mathrm{scale}\; q_i \cdot k_j)\, v_j$.

    Convention:
        As ``torch.nn.functional.scaled_dot_product_attention``, whose `is_causal` is `causal` here. With ``causal=True`` query i
        sees the keys j ≤ i, counted from the beginning, even if there are more keys than queries. Head i of `q` goes with head i
        // (hq / h) of `k` and `v`. Logits and sums are float32, or float64 if any operand is float64; half-precision weights are
        rounded before they are multiplied, as matrix units require. Rows of very negative logits are as exact as others. Without
        any key the result is 0. In the causal case, a later value that is infinite or NaN may make a row NaN, as in torch. All
        three inputs have fused gradients, which recompute the weights; the log-sum-exp has none. For the gradients, the rounding
        error of a half-precision result is kept too. Every result has the same bits in every run.

    Args:
        q: ``[B, hq, T, d]``, d up to 256. Of any strides; here and below, rows that are not contiguous are copied.
        k: ``[B, h, S, d]``, where h divides hq.
        v: ``[B, h, S, e]``, e up to 256.
        causal: Whether keys after the query's own position are left out.
        scale: Multiplies the logits; $d^{-1/2}$ unless given.
        return_lse: Whether the logarithm of the sum of exponentials is returned as well.
        impl: ``"auto"`` is Triton on GPUs and, on CPUs, ``"numba"``: Numba or torch's BLAS; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, hq, T, e]`` in the dtype of `q`; with ``return_lse=True`` also $\log \sum_j \exp(\mathrm{scale}\; q_i \cdot k_j)$,
        ``[B, hq, T]`` in float32, or float64.

    Example:
        >>> import torch, sonde
        >>> q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2)
        >>> sonde.power.attention(q, k, torch.tensor([[[[1.0], [3.0]]]]))
        tensor([[[[2.]]]])
    """
    out, lse, _ = _attention(*arguments(q, k, v, causal, scale, return_lse), impl=impl)
    return (out, lse) if return_lse else out
