"""What ``power_attention`` means, in plain PyTorch: the quadratic form, with a state before and after the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op import checks
from ...op.dtypes import accumulator
from .._dense.reference import product, scale_of
from .._sympow.basis import default_tile, dimension
from .._sympow.reference import power_of

LEAST_GATE = -1000.0  # e^−1000 is 0 in every dtype, so smaller gates, −∞ included, are raised to it
WIDEST_STATE = 32  # the largest d that has a state with power 4
CHUNK = 1024  # rows of a chunk, unless given


def power_attention(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None, z: Tensor | None, norms: Tensor | None,
    power: int, scale: float | None, chunk_size: int | None, return_state: bool, tf32: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The result, the new state, and empty tensors in place of the results that only backward passes read."""
    refuse_growth("power_attention", "log_gate", log_gate)
    wide = accumulator(q, k, v, log_gate, S, z)
    groups, tile = q.shape[2] // max(1, k.shape[2]), default_tile(q.shape[3])
    x, y, values = (t.to(wide).transpose(1, 2) for t in (q, k, v))  # heads first
    G = sums_of_gates(log_gate, k)
    i = torch.arange(q.shape[1], device=q.device)
    seen = i <= i[:, None]
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(~seen, -torch.inf).exp().to(wide)
    left = G.exp().to(wide)[..., None]  # share of the initial state that is left
    keys, values_of, decays, lefts = (t.repeat_interleave(groups, 1) for t in (y, values, decay, left))
    weights = torch.where(seen, product(x, keys.mT), 0) ** power * decays  # without σ, which cancels
    total, norm = product(weights, values_of), weights.sum(-1, keepdim=True)
    lengths = length(y, power)
    most = product(decay, lengths[..., None])
    if S is not None and z is not None and norms is not None:
        phi = power_of(x, power, tile, True) * lefts
        total = total + product(phi, S.to(wide).repeat_interleave(groups, 1))
        norm = norm + product(phi, z.to(wide)[..., None].repeat_interleave(groups, 1))
        most = most + left.detach() * norms.to(wide)[..., None, None]
    most = most.detach().repeat_interleave(groups, 1) * length(x, power)[..., None]
    dead = is_rounding(norm.detach(), most, least_share(wide, q, scale))
    out = torch.where(dead, 0, total / torch.where(dead, 1, norm)).transpose(1, 2).to(q.dtype)
    nothing = out.detach()[..., :0].flatten(2)
    made = _state(y, values, G, S, z, norms, power, tile, wide) if return_state else [nothing.to(wide)] * 3
    return out.contiguous(), *made, *[nothing.to(wide).clone() for _ in range(4)]


def _state(
    y: Tensor, values: Tensor, G: Tensor, S: Tensor | None, z: Tensor | None, norms: Tensor | None, power: int, tile: int,
    wide: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The state after the sequence."""
    end = G[..., -1:] if G.shape[-1] else G.new_zeros(*G.shape[:-1], 1)
    left, last = (end - G).exp().to(wide)[..., None], end.exp().to(wide)
    phi = power_of(y, power, tile, True)
    made = [product(phi.mT, values * left), product(phi.mT, left)[..., 0]]
    made.append(product(length(y, power)[..., None, :], left.detach())[..., 0, 0])
    if S is not None and z is not None and norms is not None:
        made = [
            made[0] + last[..., None] * S.to(wide),
            made[1] + last * z.to(wide),
            made[2] + last[..., 0].detach() * norms.to(wide),
        ]
    return made


def refuse_growth(name: str, argument: str, log_gate: Tensor | None) -> None:
    """Positive gates are an error where the host can read them without waiting for a device."""
    if log_gate is None or log_gate.device.type != "cpu" or not checks.readable(log_gate):
        return
    if (log_gate > 0).any():
        raise ValueError(
            f"{name}: {argument} must be at most 0; got {log_gate.max().item():.4g}. "
            "Use torch.nn.functional.logsigmoid of a projection, for example"
        )


def sums_of_gates(log_gate: Tensor | None, k: Tensor) -> Tensor:
    """G, the inclusive sums of the gates, heads first and in float64, where their differences are exact."""
    if log_gate is None:
        return torch.zeros(k.shape[0], k.shape[2], k.shape[1], dtype=torch.float64, device=k.device)
    return log_gate.double().clamp(min=LEAST_GATE).transpose(1, 2).cumsum(-1)


def length(x: Tensor, power: int) -> Tensor:
    """‖x‖^p of the last dimension, without a gradient."""
    found: Tensor = (x.detach() * x.detach()).sum(-1) ** (power // 2)
    return found


def is_rounding(norm: Tensor, most: Tensor, least: float) -> Tensor:
    """Whether a sum of weights is only rounding error: below the share `least` of its largest possible value, or so small that
    weights underflow, and gradients, which are divided by it, overflow."""
    about = torch.finfo(norm.dtype)
    return (norm <= (least * most).clamp(min=about.tiny / about.eps)) & (most < torch.inf)


def least_share(wide: torch.dtype, q: Tensor, scale: float | None) -> float:
    """See ``is_rounding``. With a scale of 0 every row must give 0, and no sum of weights exceeds twice its largest value."""
    return 2.0 if scale_of(q, scale) == 0 else 64 * torch.finfo(wide).eps


def rows_of_chunk(T: int, d: int, e: int, power: int, chunk_size: int | None) -> int:
    """Rows per chunk: all of them if states would be too large, or if the quadratic form costs less."""
    if power > 2 and d > WIDEST_STATE:
        return max(1, T)
    if chunk_size is not None:  # compared with T alone: an exported graph may hold for all lengths up to `chunk_size`, or above
        return max(1, T) if chunk_size >= T else int(chunk_size)
    D = dimension(d, power, default_tile(d))
    if T <= 2 * CHUNK or T * (d + e) <= 6 * D * e:
        return max(1, T)
    return CHUNK


def kept_dtype(q: Tensor, k: Tensor, v: Tensor, power: int, wide: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the states between chunks. Matrix units multiply them in the operands' dtype, which must have the range for it:
    bfloat16 has it, float16 does not. CPUs multiply in `wide`."""
    narrow = q.dtype == k.dtype == v.dtype == torch.bfloat16 and wide == torch.float32 and power == 2
    return torch.bfloat16 if narrow and device.type != "cpu" else wide
