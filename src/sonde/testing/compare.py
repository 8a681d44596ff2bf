"""Comparison of results, and messages about those that differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative, in norm


def layout(got: Tensor, want: Tensor) -> str | None:
    """How two results differ in shape, dtype or device; None if they do not."""
    if got.shape != want.shape:
        return f"has shape {list(got.shape)}, the reference {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"is {_name(got.dtype)}, the reference {_name(want.dtype)}"
    if got.device != want.device:
        return f"is on {got.device}, the reference on {want.device}"
    return None


def strides(got: Tensor, want: Tensor) -> str | None:
    """How strides differ: they must not, since graphs are compiled for the reference's strides."""
    pairs = [(a, b) for n, a, b in zip(got.shape, got.stride(), want.stride()) if n > 1]
    if got.numel() and any(a != b for a, b in pairs):
        return (
            f"has strides {got.stride()}, the reference {want.stride()}: compiled graphs go by the reference's. "
            "Let both return contiguous tensors"
        )
    return None


def difference(got: Tensor, want: Tensor, tolerance: float | None = None, allowance: float = 0.0) -> str | None:
    """How the values differ, if the norm of the difference exceeds `tolerance` · ‖want‖ + `allowance`; else None."""
    if got.numel() == 0:
        return None
    got, want = got.detach(), want.detach()
    if not (got.is_floating_point() or got.is_complex()):
        wrong = got != want
        return _worst(got, want, wrong, wrong.double()) if wrong.any() else None
    limit = TOLERANCE.get(got.dtype, 1e-5) if tolerance is None else tolerance
    a, b = got.double(), want.double()
    odd = (a.isnan() != b.isnan()) | (a.isinf() & (a != b)) | (b.isinf() & (a != b))
    odd &= ~(a.isnan() & b.isnan())
    if odd.any():
        return _worst(got, want, odd, odd.double())
    both = a.isfinite() & b.isfinite()
    zero = torch.zeros((), dtype=a.dtype, device=a.device)
    off, scale = torch.where(both, a - b, zero), torch.where(both, b, zero).norm().item()
    found, allowed = off.norm().item(), limit * scale + allowance + torch.finfo(got.dtype).tiny
    if found <= allowed:
        return None
    relative = f"{found / scale:.2g} of its norm, allowed are {allowed / scale:.2g}" if scale else f"{found:.2g}, where it is zero"
    return f"differs from the reference by {relative}; {_worst(got, want, off.abs() > limit * b.abs() + allowance, off.abs())}"


def _worst(got: Tensor, want: Tensor, wrong: Tensor, by: Tensor) -> str:
    place = [int(i) for i in torch.unravel_index(by.argmax(), by.shape)]
    here, there = got[tuple(place)].item(), want[tuple(place)].item()
    count = f"{int(wrong.sum())} of {got.numel()} elements differ, the worst at {place}: " if got.ndim else ""
    return f"{count}got {_short(here)}, expected {_short(there)}"


def _short(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """True if all bits are equal, including NaN and the signs of zeros."""
    return all(x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)
