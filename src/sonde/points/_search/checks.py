"""Checks of numbers and offsets, as far as the host can read them, and of which sizes kernels support."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...jit import Unsupported
from ...op import plan
from ...op.checks import in_memory, readable

DIMENSIONS = 3  # most dimensions of a kernel; more use the reference
NEIGHBOURS = 64  # most neighbours per query of a GPU kernel
MOST = 2**31 - 1  # most neighbours per query at all, padding included


def implementation(name: str, impl: str, tensor: Tensor, D: int, k: int | None = None, rows: int = 0) -> str:
    """Resolve `impl`: raises ``Unsupported`` if it has no kernel for these sizes; ``"auto"`` falls back to the reference."""
    chosen = plan.choose(name, impl, tensor)
    if chosen == "reference":
        return chosen
    reason = None
    if D > DIMENSIONS:
        reason = f"has kernels for 1 to {DIMENSIONS} dimensions, got {D}"
    elif chosen == "triton" and k is not None and k > NEIGHBOURS:
        reason = f"has kernels for k up to {NEIGHBOURS}, got {k}"
    elif chosen == "triton" and k is not None and not torch.compiler.is_compiling() and rows * k >= 2**31:
        reason = f"has kernels for fewer than 2³¹ neighbours in all, got {rows} × {k}"
    if reason and impl != "auto":
        raise Unsupported(f"{name}: impl={impl!r} {reason}; use impl='auto' or impl='reference'")
    return "reference" if reason else chosen


def columns(name: str, k: int, rows: int, tensor: Tensor) -> None:
    """Refuse a k whose results exceed the memory of the device, before anything is allocated."""
    if not isinstance(k, int):  # symbolic, in a compiled graph
        return
    if k > MOST:
        raise ValueError(f"{name}: k must be less than 2³¹; got {k}")
    if not isinstance(rows, int) or not in_memory(tensor):
        return
    size, room = rows * k * (tensor.element_size() + 8), _memory(tensor.device)
    if size > room:
        raise ValueError(
            f"{name}: k={k} neighbours of {rows} queries take {size / 2**30:,.0f} GiB, and {tensor.device} has "
            f"{room / 2**30:,.0f}; use a smaller k"
        )


def _memory(device: torch.device) -> int:
    """Total bytes of memory, or a large number if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 2**47


def plain(x: Any) -> bool:
    """Whether `x` is an ordinary tensor, not a subclass, and readable."""
    return type(x) in (Tensor, torch.nn.Parameter) and readable(x)


def offsets(name: str, argument: str, value: Any, count: int, device: torch.device) -> Tensor:
    """Offsets as an int64 tensor on `device`. Values are checked on CPUs only, since reading a GPU tensor would sync."""
    if not isinstance(value, Tensor):
        text = isinstance(value, (str, bytes, bytearray, memoryview))
        if not isinstance(value, Sequence) or text or not all(type(v) is int for v in value):
            raise TypeError(f"{name}: {argument} must be an integer tensor or a list of integers; got {value!r}")
        if any(not -(2**63) <= v < 2**63 for v in value):
            raise _no_offsets(name, argument, count, [*value])
        value = torch.tensor(value, dtype=torch.int64, device="cpu")
    if value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: {argument} must be int64 or int32; got {value.dtype}")
    if value.ndim != 1 or value.shape[0] < 1:
        raise ValueError(f"{name}: {argument} must be a vector of S + 1 offsets; got {list(value.shape)}")
    if value.device.type == "cpu" and plain(value):
        numbers = value.tolist()
        if numbers[0] != 0 or numbers[-1] != count or any(a > b for a, b in pairwise(numbers)):
            raise _no_offsets(name, argument, count, numbers)
    return value.to(device, torch.int64, non_blocking=True).contiguous()


def _no_offsets(name: str, argument: str, count: int, numbers: list[int]) -> ValueError:
    brief = str(numbers) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:8]))}, … {numbers[-1]}]"
    return ValueError(f"{name}: {argument} must ascend from 0 to {count}, where the last segment ends; got {brief}")


def positive(name: str, argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: {argument} must be a number > 0; got {value!r} ({type(value).__name__})")
    if not value > 0:
        raise ValueError(f"{name}: {argument} must be a number > 0; got {value}")
    try:
        return float(value)
    except OverflowError:  # an integer that no float holds
        return torch.inf
