"""Numba: a recurrence along time, which plain PyTorch runs step by step, and its gradient, the same recurrence backwards.

out[b, t] = decay · out[b, t − 1] + (1 − decay) · x[b, t]
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

import sonde


@numba.njit(parallel=True, cache=True)
def along(x, decay, out):
    for b in numba.prange(x.shape[0]):
        state = 0.0
        for t in range(x.shape[1]):
            state = decay * state + (1 - decay) * x[b, t]
            out[b, t] = state


def reference(x: Tensor, decay: float) -> Tensor:
    state, out = torch.zeros_like(x[:, 0], dtype=torch.promote_types(x.dtype, torch.float32)), []
    for column in x.unbind(1):
        state = decay * state + (1 - decay) * column
        out.append(state)
    return torch.stack(out, 1).to(x.dtype)


def run(x: Tensor, decay: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = torch.empty(x.shape, dtype=wide.dtype)
    along(wide.numpy(), decay, out.numpy())
    return out.to(x.dtype)


def gradient(grad: Tensor, x: Tensor, decay: float) -> Tensor:
    return run(grad.flip(1), decay).flip(1)


@sonde.operator("external::smooth", reference=reference, backward=gradient, devices="cpu", deterministic=True, batched=True)
def smooth(x: Tensor, decay: float) -> Tensor:
    return run(x, decay)
