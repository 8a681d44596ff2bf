"""Causal attention with a state of fixed size, as a layer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..op import checks
from ..power._dense.arguments import WIDEST
from ..power.power_attention.api import POWERS, PowerState, power_attention
from ..power.power_attention.reference import WIDEST_STATE
from ..power.sympow.api import sympow_dim

NAME = "PowerAttention"
LONGEST, SHORTEST = 12, 7  # initially the first head remembers about 2^12 tokens, the last one 2^7


class PowerAttention(nn.Module):
    r"""Causal self-attention with weights (q·k)^p, gates and a state of fixed size: :func:`sonde.power.power_attention`.

    $$\mathrm{out}_i = W_o \operatorname*{concat}_h \frac{\sum_{j \le i} w_{ij}\, W_v x_j}{\sum_{j \le i} w_{ij}}, \qquad
      w_{ij} = (W_q x_i \cdot W_k x_j)^p \prod_{j < m \le i} \mathrm{sigmoid}(W_g x_m + b_g)$$

    for each head. There is no positional encoding: the gates say how fast a head forgets. Each head of keys and values has a gate.
    Gates are at least float32, and so is their projection under autocast; only a layer in half precision projects them in half
    precision. Initially they do not depend on `x`: at each token the first head keeps 1 − 2⁻¹² of its state, the last one 1 − 2⁻⁷,
    and those between them have evenly spaced exponents.

    Args:
        embed_dim: Channels of the input and of the result.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys, values and gates; must divide `num_heads`, which it equals unless given.
        head_dim: Channels of a head, up to 256; embed_dim / num_heads unless given.
        power: 2 or 4. With 4 there is a state up to ``head_dim=32`` only.
        gates: Whether heads forget; without gates, a key's weight does not depend on how long ago it was.
        bias: Whether projections have biases. That of the gates always has one.
        chunk_size: Tokens in a chunk; chosen by length unless given. It changes rounding, time and memory.
        device: Where parameters are created.
        dtype: Of the parameters.

    Example:
        >>> import torch, sonde.nn
        >>> layer = sonde.nn.PowerAttention(embed_dim=32, num_heads=4, num_kv_heads=2)
        >>> x = torch.randn(1, 10, 32)
        >>> layer(x).shape
        torch.Size([1, 10, 32])
        >>> out, state = layer(x[:, :9], return_state=True)  # a prompt, then one token
        >>> last, state = layer(x[:, 9:], state, return_state=True)
        >>> torch.allclose(last, layer(x)[:, 9:], atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        power: int = 2,
        gates: bool = True,
        bias: bool = True,
        chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.counts(NAME, embed_dim=embed_dim, num_heads=num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        checks.counts(NAME, num_kv_heads=num_kv_heads)
        checks.divides(NAME, "num_kv_heads", "num_heads", num_heads=num_heads, num_kv_heads=num_kv_heads)
        if head_dim is None:
            checks.divides(NAME, "num_heads", "embed_dim", embed_dim=embed_dim, num_heads=num_heads)
            head_dim = embed_dim // num_heads
        checks.counts(NAME, head_dim=head_dim)
        if head_dim > WIDEST:
            raise ValueError(f"{NAME}: head_dim must be at most {WIDEST}; got {head_dim}. Use more heads")
        checks.choice(NAME, "power", power, POWERS)
        checks.flags(NAME, gates=gates, bias=bias)
        if chunk_size is not None:
            checks.counts(NAME, chunk_size=chunk_size)
        super().__init__()
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.power, self.gates, self.chunk_size = power, gates, chunk_size

        def linear(inputs: int, outputs: int, bias: bool = bias) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, device, dtype)

        self.q_proj = linear(embed_dim, num_heads * head_dim)
        self.k_proj = linear(embed_dim, num_kv_heads * head_dim)
        self.v_proj = linear(embed_dim, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, embed_dim)
        self.g_proj = linear(embed_dim, num_kv_heads, True) if gates else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier's uniform weights, zero biases, and gates as described in the class."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if self.g_proj is not None:
            nn.init.zeros_(self.g_proj.weight)
            exponents = torch.linspace(LONGEST, SHORTEST, self.num_kv_heads, device=self.g_proj.bias.device)
            self.g_proj.bias.copy_(torch.log(torch.expm1(exponents * math.log(2))))  # sigmoid of it is 1 − 2^−exponent

    def forward(self, x: Tensor, state: PowerState | None = None, return_state: bool = False) -> Tensor | tuple[Tensor, PowerState]:
        """Attend from each token to itself and those before it.

        Args:
            x: ``[B, T, embed_dim]``; any T, including 0, or 1 when decoding.
            state: What an earlier call returned for the tokens before these. The first dimension of each of its tensors is the
                batch, so ``PowerState(*(t[rows] for t in state))`` selects sequences. Gradients flow through it; `detach` its
                tensors to stop them.
            return_state: Whether to return the state after the last token as well. Its size does not depend on T.

        Returns:
            ``[B, T, embed_dim]``; with ``return_state=True`` also a :class:`sonde.power.PowerState`.
        """
        self._check(x, state, return_state)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        log_gate = self._log_gates(x)
        options: dict[str, Any] = dict(power=self.power, chunk_size=self.chunk_size, state=state)
        if not return_state:
            out: Tensor = self.o_proj(power_attention(q, k, v, log_gate, **options).flatten(-2))
            return out
        seen, state = power_attention(q, k, v, log_gate, return_state=True, **options)
        return self.o_proj(seen.flatten(-2)), state

    def initial_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PowerState:
        """The state before the first token: zeros. If decoding starts with it, all shapes are the same at every token.

        Args:
            batch_size: The number of sequences.
            device: That of the parameters unless given.
            dtype: float32 unless given, or float64 if the parameters are float64.
        """
        checks.count(NAME, "batch_size", batch_size)
        self._check_power()
        weight = self.q_proj.weight
        dtype = torch.promote_types(weight.dtype, torch.float32) if dtype is None else dtype
        made = (weight.new_zeros(batch_size, *sizes, dtype=dtype, device=device or weight.device) for sizes in self._sizes())
        return PowerState(*made)

    def _log_gates(self, x: Tensor) -> Tensor | None:
        """How much of the past each token keeps, as logarithms: [B, T, num_kv_heads], in float32 at least."""
        if self.g_proj is None:
            return None
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # bfloat16 rounds a logit of 8 by up to 0.03
            with torch.autocast(kind, enabled=False):
                logits = self.g_proj(x.to(self.g_proj.weight.dtype))
        else:
            logits = self.g_proj(x)
        return F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a state's tensors without the batch."""
        h, d = self.num_kv_heads, self.head_dim
        D = sympow_dim(d, self.power)
        return (h, D, d), (h, D), (h,)

    def _check_power(self) -> None:
        if self.power > 2 and self.head_dim > WIDEST_STATE:
            raise ValueError(
                f"{NAME}: with power={self.power} there is a state only up to head_dim={WIDEST_STATE}; "
                f"got head_dim={self.head_dim}. Use power=2, more heads, or no state"
            )

    def _check(self, x: Any, state: Any, return_state: Any) -> None:
        """Check arguments, not parameters: hooks may still move or cast parameters, or their inputs, before they are used."""
        checks.shapes(NAME, x=(x, f"B T {self.embed_dim}"))
        checks.flags(NAME, return_state=return_state)
        if return_state or state is not None:
            self._check_power()
        if state is None:
            return
        if not isinstance(state, (tuple, list)) or len(state) != len(PowerState._fields):
            raise TypeError(f"{NAME}: state must be a PowerState, as returned by an earlier call; got {checks.kind(state)}")
        for name, tensor, sizes in zip(PowerState._fields, state, self._sizes()):
            pattern = " ".join(["B", *map(str, sizes)])
            checks.shapes(NAME, x=(x, "B T _"), **{f"state.{name}": (tensor, pattern)})

    def extra_repr(self) -> str:
        chunk = "" if self.chunk_size is None else f", chunk_size={self.chunk_size}"
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"embed_dim={self.embed_dim}, {heads}, power={self.power}, gates={self.gates}{chunk}"
