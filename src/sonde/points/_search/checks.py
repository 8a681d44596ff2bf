"""Numbers and offsets that calls bring along, checked where the host knows them, and who has kernels for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...jit import Unsupported
from ...op import plan
from ...op.torch_private import dispatch_modes, is_fake, transforming

DIMENSIONS = 3  # that kernels have; more go through the reference
NEIGHBOURS = 64  # that a GPU kernel holds
MOST = 2**31 - 1  # neighbours of a query, those that are not there included


def implementation(name: str, impl: str, tensor: Tensor, D: int, k: int | None = None, rows: int = 0) -> str:
    """Who runs: `impl`, or an error that says why it cannot; ``"auto"`` goes through the reference where kernels end."""
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
    """Refuse a k of which no device could hold the results, before anything is made; what is less is padded."""
    if not isinstance(k, int):  # a graph's
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
    """Bytes in all, as far as they are known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 2**47


def in_sight(*tensors: Tensor) -> bool:
    """Whether numbers may be looked at: nobody traces, maps or plans."""
    return in_memory(*tensors) and not transforming()


def in_memory(*tensors: Tensor) -> bool:
    """Whether there are numbers: nobody traces or plans."""
    if torch.compiler.is_compiling() or dispatch_modes():
        return False
    return all(t.device.type != "meta" and not is_fake(t) for t in tensors)


def plain(x: Any) -> bool:
    """Whether `x` is a tensor with memory of its own that nobody traces."""
    return type(x) in (Tensor, torch.nn.Parameter) and in_sight(x)


def offsets(name: str, argument: str, value: Any, count: int, device: torch.device) -> Tensor:
    """As an int64 tensor on `device`. What the host knows is checked; a device's tensor is not looked into."""
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
