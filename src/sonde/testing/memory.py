"""Memory that reveals wrong accesses: red zones around inputs, and new tensors that are poisoned and fenced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..op import allocator, torch_private
from ..op.cache import forget_calls

PAD = 64  # elements on either side
LAYOUTS = ("contiguous", "channels_last", "reversed", "sliced", "misaligned", "expanded", "padded_rows")


def restride(t: Tensor, layout: str) -> Tensor:
    """The values of `t` in another memory layout (``expanded``: those of its first row, in every row)."""
    if layout == "channels_last" and t.ndim == 4:
        return t.contiguous(memory_format=torch.channels_last)
    if layout == "reversed":
        return t.permute(*range(t.ndim)[::-1]).contiguous().permute(*range(t.ndim)[::-1])
    if layout == "sliced" and t.ndim:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), poison(t.dtype), dtype=t.dtype, device=t.device)
        return wide[..., 1::2].copy_(t)
    if layout == "misaligned":
        flat = torch.full((t.numel() + 1,), poison(t.dtype), dtype=t.dtype, device=t.device)
        return flat[1:].view(t.shape).copy_(t)
    if layout == "expanded":
        return t[:1].expand(t.shape) if t.ndim and t.shape[0] else t
    if layout == "padded_rows" and t.ndim > 1:
        wide = torch.full((*t.shape[:-2], t.shape[-2] + 1, t.shape[-1] + 3), poison(t.dtype), dtype=t.dtype, device=t.device)
        return wide[..., 1:, 2 : 2 + t.shape[-1]].copy_(t)
    return t.contiguous()


def poison(dtype: torch.dtype) -> Any:
    """NaN or, for integers, a value that no computation gives by chance."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max // 2


def redzone(t: Any, pad: int = PAD, fill: float = torch.nan) -> Any:
    """The same values and strides in the middle of a buffer of NaN (or `fill`), so that a stray read poisons the result."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    span = span_of(t)
    buffer = torch.full((span + 2 * pad,), fill, dtype=t.dtype, device=t.device)
    if span:
        buffer[pad : pad + span] = t.detach().as_strided((span,), (1,))  # including gaps, since elements may share memory
    return buffer.as_strided(t.shape, t.stride(), pad)


def zones(t: Tensor, pad: int = PAD) -> Tensor:
    """The red zones of a tensor that :func:`redzone` made."""
    span = span_of(t)
    whole = t.detach().as_strided((span + 2 * pad,), (1,), 0)
    return torch.cat([whole[:pad], whole[pad + span :]])


def span_of(t: Tensor) -> int:
    """The number of elements from the first to the last, including both."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0


@contextmanager
def poisoned(pad: int = PAD, arrays: bool = False) -> Iterator[None]:
    """Uninitialised memory is NaN (or an absurd integer) and fenced: reading it shows in results, writing past it is an error.

    It replaces torch's Python functions that return uninitialised memory; with `arrays` those of NumPy and CuPy, too, whose memory
    is poisoned but not fenced. Numba recognises NumPy's functions by identity, so with `arrays` all its kernels must already be
    compiled.
    """
    fences: list[tuple[Tensor, int, Any]] = []

    def fence(t: Tensor) -> Tensor:
        if t.device.type == "meta" or t.layout is not torch.strided or type(t) is not Tensor:
            return t
        bad, span = poison(t.dtype), span_of(t)
        buffer = torch.full((span + 2 * pad,), bad, dtype=t.dtype, device=t.device)
        fences.append((buffer, span, bad))
        return buffer.as_strided(t.shape, t.stride(), pad)

    def spoil(array: Any) -> Any:
        if array.dtype.kind in "fc":
            array.fill(float("nan"))
        elif array.dtype.kind in "iu":
            array.fill((1 << (8 * array.dtype.itemsize - 2)) - 1)
        return array

    forget_calls()  # prepared calls already hold the original functions
    reused, allocator.CAN_COUNT_OWNERS = allocator.CAN_COUNT_OWNERS, False
    owners: list[tuple[Any, str, Any]] = [(torch, n, fence) for n in ("empty", "empty_like", "empty_strided")]
    owners += [(Tensor, n, fence) for n in ("new_empty", "new_empty_strided")]
    owners += [(torch_private, n, fence) for n in ("_empty_strided_cpu", "_empty_strided_cuda") if getattr(torch_private, n)]
    libraries = [sys.modules[n] for n in ("numpy", "cupy") if arrays and n in sys.modules]
    owners += [(library, n, spoil) for library in libraries for n in ("empty", "empty_like")]
    before = [(owner, n, bad, n in vars(owner), getattr(owner, n)) for owner, n, bad in owners]
    for owner, n, bad, _, real in before:
        setattr(owner, n, lambda *a, _bad=bad, _real=real, **k: _bad(_real(*a, **k)))
    try:
        yield
    finally:
        for owner, n, _, own, real in before:
            if own:
                setattr(owner, n, real)
            else:
                delattr(owner, n)
        allocator.CAN_COUNT_OWNERS = reused
        forget_calls()
    for buffer, span, bad in fences:
        edges = torch.cat([buffer[:pad], buffer[pad + span :]])
        intact = edges.isnan() if bad != bad else edges == bad
        if not intact.all():
            raise AssertionError(f"wrote outside a tensor of {span} elements")
