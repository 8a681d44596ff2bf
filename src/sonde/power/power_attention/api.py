"""Public ``power_attention``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...op import checks
from ...op.dtypes import accumulator
from ...op.plan import Impl
from ...op.register import operator
from .._dense.arguments import number, tf32, widths
from .._dense.reference import residual_dtype
from .._sympow.basis import default_tile, dimension
from . import reference

POWERS = (2, 4)


class PowerState(NamedTuple):
    """All that later tokens need of a sequence, in a fixed size; float32, or float64 if any operand is float64.

    Key j has the weight e^{G_T − G_j}, where G_j is the sum of the gates up to token j and G_T the sum of all gates.
    """

    S: Tensor  # [B, h, D, e], Σ φ(k) vᵀ
    z: Tensor  # [B, h, D], Σ φ(k)
    norms: Tensor  # [B, h], Σ ‖k‖^p: a sum of weights that is tiny beside it is only rounding error


torch.serialization.add_safe_globals([PowerState])  # so that `torch.load` reads a saved state


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None, z: Tensor | None, norms: Tensor | None,
    power: int, scale: float | None, chunk_size: int | None, return_state: bool, tf32: bool,
) -> dict[str, int]:  # fmt: skip
    given: dict[str, tuple[Any, str]] = dict(q=(q, "B T hq d"), k=(k, "B T h d"), v=(v, "B T h e"))
    if log_gate is not None:
        given["log_gate"] = (log_gate, "B T h")
    n = checks.shapes("power_attention", **given)
    if n["h"] == 0 or n["hq"] % n["h"]:
        raise ValueError(f"power_attention: q must have a multiple of the heads of k and v, {n['h']}; got {list(q.shape)}")
    widths("power_attention", q=n["d"], v=n["e"])
    d = int(n["d"])
    if power > 2 and d > reference.WIDEST_STATE and (return_state or S is not None):
        raise ValueError(
            f"power_attention: with power={power} there is a state only up to d={reference.WIDEST_STATE}; got d={d}, for which it "
            f"would have D={dimension(d, power, default_tile(d))} rows. Use power=2, or call it without a state"
        )
    n["D"] = dimension(d, power, default_tile(d))
    state = dict(S=(S, ("B", "h", "D", "e")), z=(z, ("B", "h", "D")), norms=(norms, ("B", "h")))
    for name, (tensor, letters) in state.items():
        if tensor is None:
            if any(t is not None for t, _ in state.values()):
                raise ValueError(f"power_attention: a state has S, z and norms; got no {name}")
            continue
        if isinstance(tensor, Tensor) and tuple(tensor.shape) != tuple(n[x] for x in letters):
            sizes = ", ".join(f"{x}={n[x]}" for x in letters)
            raise ValueError(
                f"power_attention: state.{name} must be [{', '.join(letters)}] with {sizes} (for d={d}, power={power}); "
                f"got {list(tensor.shape)}"
            )
        checks.shapes("power_attention", q=(q, "B T hq d"), **{f"state.{name}": (tensor, " ".join(letters))})
    return n


def _fake(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None, z: Tensor | None, norms: Tensor | None,
    power: int, scale: float | None, chunk_size: int | None, return_state: bool, tf32: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = _shapes(q, k, v, log_gate, S, z, norms, power, scale, chunk_size, return_state, tf32)
    wide = accumulator(q, k, v, log_gate, S, z)
    B, T, h, D, e = n["B"], n["T"], n["h"], n["D"], n["e"]

    def new(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=wide)

    out, lost = q.new_empty(B, T, n["hq"], e), residual_dtype(wide, q, k, v)
    state = (new(B, h, D, e), new(B, h, D), new(B, h)) if return_state else (new(B, T, 0), new(B, T, 0), new(B, T, 0))
    c = reference.rows_of_chunk(T, int(n["d"]), int(e), power, chunk_size)
    kept = new(B, T, n["hq"]), q.new_empty((B, T, n["hq"], e) if lost else (B, T, 0), dtype=lost or q.dtype)
    if c >= T:
        return out, *state, *kept, new(B, T, 0), new(B, T, 0)
    chunks = (T + c - 1) // c
    saved = q.new_empty((B, chunks, h, D, e), dtype=reference.kept_dtype(q, k, v, power, wide, q.device))
    return out, *state, *kept, saved, new(B, chunks, h, D)


_power_attention = operator(
    "power_attention(Tensor q, Tensor k, Tensor v, Tensor? log_gate, Tensor? S, Tensor? z, Tensor? norms, int power, float? scale, "
    "SymInt? chunk_size, bool return_state, bool tf32) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.power_attention,
    check=_shapes,
    fake=_fake,
    differentiable=("q", "k", "v", "log_gate", "S", "z"),
    saved=(0, 4, 5, 6, 7),
    no_grad=(3, 4, 5, 6, 7),
)


def arguments(
    q: Any, k: Any, v: Any, log_gate: Any = None, power: Any = 2, scale: Any = None, chunk_size: Any = None, state: Any = None,
    return_state: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The operator's arguments."""
    name = "power_attention"
    checks.flags(name, return_state=return_state)
    checks.count(name, "power", power, least=1)
    if power not in POWERS:
        odd = " (an odd power has negative weights)" if power % 2 else ""
        raise ValueError(f"{name}: power must be 2 or 4; got {power}{odd}")
    if chunk_size is not None:
        checks.count(name, "chunk_size", chunk_size, least=1)
    if state is None:
        state = (None, None, None)
    elif not isinstance(state, (tuple, list)) or len(state) != len(PowerState._fields):
        raise TypeError(f"{name}: state must be a PowerState, as returned by an earlier call; got {checks.kind(state)}")
    scale = None if scale is None else number(name, "scale", scale)
    return q, k, v, log_gate, *state, power, scale, chunk_size, return_state, tf32()


@overload
def power_attention(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, *, power: int = 2, scale: float | None = None,
    chunk_size: int | None = None, state: PowerState | None = None, return_state: Literal[False] = False, impl: Impl = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def power_attention(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, *, power: int = 2, scale: float | None = None,
    chunk_size: int | None = None, state: PowerState | None = None, return_state: Literal[True], impl: Impl = "auto",
) -> tuple[Tensor, PowerState]: ...  # fmt: skip
def power_attention(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, *, power: int = 2, scale: float | None = None,
    chunk_size: int | None = None, state: PowerState | None = None, return_state: bool = False, impl: Impl = "auto",
) -> Tensor | tuple[Tensor, PowerState]:  # fmt: skip
    r"""Causal attention with weights (σ q·k)^p in place of exp(σ q·k): the cost is linear in T, and the state has a fixed size.

    $$w_{ij} = (\sigma\, q_i \cdot k_j)^p\, e^{G_i - G_j} \text{ for } j \le i, \qquad
    \mathrm{out}_i = \frac{\sum_j w_{ij}\, v_j}{\sum_j w_{ij}}$$

    Convention:
        Tokens come before heads, ``[B, T, heads, d]``; :func:`attention` has them the other way round, as torch does. G are the
        inclusive sums of `log_gate` along T. A `state` stands for the tokens before the first one, so any split of a sequence into
        calls gives the same result, up to rounding. Long sequences are cut into chunks: the tokens of a chunk see each other
        through weights, and earlier chunks through a state, S = Σ φ(k) vᵀ with the symmetric power φ (:func:`sympow`). The length
        of chunks changes rounding, time and memory, but not the meaning. A query whose weights are all zero gives 0 and has zero
        gradients. So does one whose sum of weights is below 64·eps of Σ_j ‖q_i‖^p ‖k_j‖^p e^{G_i − G_j}, since such a sum is only
        rounding error. Gates below −1000, −∞ included, let nothing pass and have no gradient. Head i of `q` goes with head i // (hq
        / h) of `k` and `v`. Sums run in float32, or in float64 if any operand is float64; half-precision weights, φ and states of
        chunks are rounded before they are multiplied, as matrix units require. Infinite or NaN values may spread to earlier rows of
        the same tile. Every result has the same bits in every run. First derivatives are fused, including those of the returned
        state and those with respect to the given state's S and z.

    Args:
        q: ``[B, T, hq, d]``, d up to 256. Of any strides; here and below, rows that are not contiguous are copied.
        k: ``[B, T, h, d]``, where h divides hq.
        v: ``[B, T, h, e]``, e up to 256.
        log_gate: ``[B, T, h]``, at most 0: how much of the past each token keeps, as a logarithm. Positive gates are an error on
            CPUs; on GPUs they are not checked, since that would wait for the device, and weights may overflow.
        power: 2 or 4.
        scale: σ, $d^{-1/2}$ unless given. It cancels in the result, but 0 makes all results 0.
        chunk_size: Tokens in a chunk; chosen by length unless given. Short chunks take memory, as the backward pass keeps the state
            before each. With ``power=4`` and d above 32 it is ignored: states between chunks would be too large, so there is one
            chunk, and the cost is quadratic in T.
        state: What an earlier call returned. With ``power=4`` only up to d = 32, since D would grow too large.
        return_state: Whether to return the state after the last token as well.
        impl: ``"auto"`` is Triton on GPUs and, on CPUs, ``"numba"``: Numba or torch's BLAS; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, T, hq, e]`` in the dtype of `q`; with ``return_state=True`` also a :class:`PowerState`.

    Example:
        >>> import torch, sonde
        >>> q = k = torch.ones(1, 3, 1, 2)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)
        >>> sonde.power.power_attention(q, k, v).flatten()  # all weights are equal
        tensor([1., 2., 4.])
        >>> out, state = sonde.power.power_attention(q[:, :2], k[:, :2], v[:, :2], return_state=True)
        >>> sonde.power.power_attention(q[:, 2:], k[:, 2:], v[:, 2:], state=state).flatten()
        tensor([4.])
    """
    given = arguments(q, k, v, log_gate, power, scale, chunk_size, state, return_state)
    out, *made = _power_attention(*given, impl=impl)
    return (out, PowerState(*made[:3])) if return_state else out
