"""Drop-ins for ``retention``: power retention for sequences, and for decoding with a cache of recent keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..op import checks
from ..op.dtypes import accumulator
from ..power import PowerState, power_attention, sympow, sympow_dim
from ..power._dense.arguments import number, widths
from ..power._dense.reference import product
from ..power.power_attention.reference import is_rounding, least_share, length, refuse_growth, sums_of_gates

__all__ = ["power_retention", "power_retention_inference"]

DEGREES, STATED = (2, 4), 2  # the degrees that are supported, and the one that has a state


def __dir__() -> list[str]:
    return __all__


def power_retention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    log_G: Tensor | None = None,
    initial_state: Tensor | None = None,
    sum_of_keys: Tensor | None = None,
    return_final_state: bool = False,
    deg: int = 2,
    scale: float | None = None,
    chunk_size: int | None = None,
    switch_over_seq_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None]:
    """Causal attention with weights (scale · q·k)^deg and gates: :func:`sonde.power.power_attention`.

    Results are those of the original, with these differences. States have another basis (for d = 64 and deg = 2, D is 2304, not
    2560) and are float32, or float64 if any operand is, so the libraries cannot use each other's states. Unknown keyword arguments
    are an error. ``scale=0`` does not mean the default: it makes all results 0. A query that is at right angles to all its keys,
    within the precision of float32 sums, gives 0, not an average of its chunk. Chunks may have any length, which only changes the
    rounding.

    Args:
        Q: ``[B, T, hq, d]``.
        K: ``[B, T, h, d]``, where h divides hq.
        V: ``[B, T, h, e]``.
        log_G: Logarithms of the gates, at most 0, ``[B, T, h]``.
        initial_state: The state after the tokens before these, ``[B, h, D, e]``; for ``deg=2``, as in the original.
        sum_of_keys: The other half of the state, ``[B, h, D]``.
        return_final_state: Whether to return the state as well.
        deg: 2 or 4.
        scale: $d^{-1/2}$ unless given.
        chunk_size: Tokens in a chunk; chosen by length unless given, which is best: backward passes keep one state per chunk, so
            short chunks take much memory.
        switch_over_seq_len: Up to this length there are no chunks; `chunk_size` unless given.

    Returns:
        ``[B, T, hq, e]``; with ``return_final_state=True`` also the state and the sum of keys. As in the original, both are None
        for a sequence that begins without a state if its length, rounded up to whole chunks, is below `switch_over_seq_len`:
        its keys and values are still the cache of :func:`power_retention_inference`.
    """
    name = "power_retention"
    n = _check(name, Q, K, V, log_G, deg, scale)
    checks.flags(name, return_final_state=return_final_state)
    for argument, value in (("chunk_size", chunk_size), ("switch_over_seq_len", switch_over_seq_len)):
        if value is not None:
            checks.count(name, argument, value, least=1)
    state = _state(name, n, Q, initial_state, sum_of_keys, deg)
    most = chunk_size if switch_over_seq_len is None else switch_over_seq_len
    cached = False
    if state is None and most is not None:
        chunk = 1 if chunk_size is None else chunk_size
        cached = -(-n["T"] // chunk) * chunk < most
        chunk_size = max(1, n["T"]) if n["T"] <= most else chunk_size
    options: dict[str, Any] = dict(power=deg, scale=scale, chunk_size=chunk_size, state=state)
    if return_final_state and not cached:
        _check_stated(name, deg)
    refuse_growth(name, "log_G", log_G)
    if not return_final_state or cached:
        out = power_attention(Q, K, V, log_G, **options)
        return (out, None, None) if return_final_state else out
    out, made = power_attention(Q, K, V, log_G, return_state=True, **options)
    return out, made.S, made.z


def power_retention_inference(
    Q: Tensor,
    K: Tensor | None,
    V: Tensor | None,
    log_G: Tensor | None = None,
    initial_state: Tensor | None = None,
    sum_of_keys: Tensor | None = None,
    deg: int = 2,
    scale: float | None = None,
    switch_over_seq_len: int | None = 512,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of a sequence's last tokens to a state, and to a cache of the keys and values since that state.

    Once the cache has `switch_over_seq_len` rows, the returned state contains them, and the caller empties the cache. Until then
    the state is returned unchanged. :func:`power_retention` lists the differences from the original; one more is that each of
    several queries sees the state through the gates up to its own token, not through all gates. :class:`sonde.nn.PowerAttention` is
    a layer without a cache, which adds every token to the state at once.

    Args:
        Q: The last tokens' queries, ``[B, Tq, hq, d]``; Tq is 1 when decoding.
        K: The cache, including the last tokens, ``[B, T, h, d]``; None if there is only a state.
        V: ``[B, T, h, e]``, or None.
        log_G: Logarithms of the cache's gates, ``[B, T, h]``.
        initial_state: The state after the tokens before the cache, ``[B, h, D, e]``; for ``deg=2``.
        sum_of_keys: The other half of the state, ``[B, h, D]``.
        deg: 2 or 4; with 4 there is no state, so `switch_over_seq_len` must be None, or longer than the cache.
        scale: $d^{-1/2}$ unless given.
        switch_over_seq_len: The length at which the cache is added to the state; None: never.

    Returns:
        ``[B, Tq, hq, e]``, the state and the sum of keys, which are None as long as there is no state.
    """
    name = "power_retention_inference"
    if (K is None) != (V is None):
        raise TypeError(f"{name}: K and V must be given together; got no {'K' if K is None else 'V'}")
    if K is None or V is None:
        if not isinstance(initial_state, Tensor):
            raise TypeError(
                f"{name}: without K and V, there must be queries and an initial_state; got {checks.kind(initial_state)}"
            )
        n = checks.shapes(name, Q=(Q, "B Tq hq d"), initial_state=(initial_state, "B h D e"))
        B, h, d, e = n["B"], n["h"], n["d"], n["e"]
        K, V, log_G = Q.new_empty(B, 0, h, d), Q.new_empty(B, 0, h, e), None  # gates of an empty cache have no effect
    n = _check(name, Q, K, V, log_G, deg, scale, "Tq")
    if switch_over_seq_len is not None:
        checks.count(name, "switch_over_seq_len", switch_over_seq_len, least=1)
    if n["Tq"] > n["T"] > 0:
        raise ValueError(f"{name}: K must contain the keys of all {n['Tq']} queries; got {n['T']} rows")
    state = _state(name, n, Q, initial_state, sum_of_keys, deg)
    folds = switch_over_seq_len is not None and n["T"] >= switch_over_seq_len
    if folds:
        _check_stated(name, deg)
    refuse_growth(name, "log_G", log_G)
    out = _last(Q, K, V, log_G, state, deg, scale)
    if folds:
        _, state = power_attention(K, K, V, log_G, power=deg, state=state, return_state=True)
        return out, state.S, state.z
    return out, initial_state, sum_of_keys


def _last(Q: Tensor, K: Tensor, V: Tensor, log_G: Tensor | None, state: PowerState | None, deg: int, scale: float | None) -> Tensor:
    """The results of only the last tokens, in plain PyTorch, since a cache has few queries and keys."""
    (B, rows, hq, _), (T, h) = Q.shape, K.shape[1:3]
    wide = accumulator(Q, K, V, log_G, *(() if state is None else state[:2]))
    x = Q.to(wide).reshape(B, rows, h, hq // h, Q.shape[3]).permute(0, 2, 3, 1, 4)  # [B, h, groups, Tq, d]
    keys, values = (t.to(wide).transpose(1, 2)[:, :, None] for t in (K, V))
    G = sums_of_gates(log_G, K)[:, :, None]
    since = G[..., T - rows :] if T else G.new_zeros(B, h, 1, rows)
    token = torch.arange(T, device=Q.device)
    seen = token <= torch.arange(T - rows, T, device=Q.device)[:, None]
    decay = (since[..., :, None] - G[..., None, :]).masked_fill(~seen, -torch.inf).exp().to(wide)
    weights = torch.where(seen, product(x, keys.mT), 0) ** deg * decay
    total, norm = product(weights, values), weights.sum(-1, keepdim=True)
    most = product(decay, length(keys, deg)[..., None])
    if state is not None:
        S, z, norms = (t.to(wide) for t in state)
        left = since.exp().to(wide)[..., None]
        phi = sympow(x, deg) * left
        total = total + product(phi, S[:, :, None])
        norm = norm + product(phi, z[:, :, None, :, None])
        most = most + left * norms[..., None, None, None]
    most = (most * length(x, deg)[..., None]).detach()
    dead = is_rounding(norm.detach(), most, least_share(wide, Q, scale))
    out = torch.where(dead, 0, total / torch.where(dead, 1, norm))
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(Q.dtype)


def _check(name: str, Q: Any, K: Any, V: Any, log_G: Any, deg: Any, scale: Any, rows: str = "T") -> dict[str, int]:
    given: dict[str, tuple[Any, str]] = dict(Q=(Q, f"B {rows} hq d"), K=(K, "B T h d"), V=(V, "B T h e"))
    if log_G is not None:
        given["log_G"] = (log_G, "B T h")
    n = checks.shapes(name, **given)
    if n["h"] == 0 or n["hq"] % n["h"]:
        raise ValueError(f"{name}: Q must have a multiple of the heads of K and V, {n['h']}; got {list(Q.shape)}")
    widths(name, Q=n["d"], V=n["e"])
    checks.choice(name, "deg", deg, DEGREES)
    if scale is not None:
        number(name, "scale", scale)
    return n


def _check_stated(name: str, deg: int) -> None:
    if deg != STATED:
        raise ValueError(
            f"{name}: there is a state for deg={STATED} only; got deg={deg}. "
            "Leave the state out, or use sonde.power.power_attention"
        )


def _state(name: str, n: dict[str, int], Q: Tensor, S: Any, z: Any, deg: int) -> PowerState | None:
    """The state of ``power_attention``, which also needs Σ ‖k‖²: computed from z, since φ contains the squares of a key."""
    if S is None and z is None:
        return None
    if S is None or z is None:
        missing = "initial_state" if S is None else "sum_of_keys"
        raise TypeError(f"{name}: initial_state and sum_of_keys must be given together; got no {missing}")
    _check_stated(name, deg)
    d, D = n["d"], sympow_dim(n["d"], deg)
    if isinstance(S, Tensor) and S.ndim == 4 and S.shape[2] != D:
        raise ValueError(
            f"{name}: initial_state must have D={D} rows, since d={d}; got {S.shape[2]}. "
            "States of the original library have another basis: make one from the tokens"
        )
    h, e = n["h"], n["e"]
    checks.shapes(name, Q=(Q, "B Tq hq d"), initial_state=(S, f"B {h} {D} {e}"), sum_of_keys=(z, f"B {h} {D}"))
    wide = accumulator(z)
    squares = sympow(torch.eye(d, dtype=wide, device=z.device), deg).sum(0)  # 1 where φ has a square, else 0
    return PowerState(S, z, product(z.detach().to(wide), squares[:, None])[..., 0])
