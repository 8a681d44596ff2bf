"""Argument checks at the public boundary: what was expected, what came, what to do. Nothing is launched before they pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def shapes(name: str, **operands: tuple[Any, str]) -> dict[str, int]:
    """Check tensors against patterns such as ``"B C H W"`` and return the size of each letter.

    A letter stands for one size wherever it occurs; a number stands for itself. All tensors must be floating point
    and on one device.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    device = None
    for argument, (tensor, pattern) in operands.items():
        letters = pattern.split()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor [{', '.join(letters)}]; got {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name}: {argument} must be float16, bfloat16, float32 or float64; got {tensor.dtype}. "
                f"Convert it, for example with {argument}.float()"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: {argument} must be a dense tensor; got {tensor.layout}. Use {argument}.to_dense()")
        if device is None:
            device, first = tensor.device, argument
        elif tensor.device != device:
            raise ValueError(
                f"{name}: {argument} must be on {device}, where {first} is; got {tensor.device}. Use {argument}.to({first}.device)"
            )
        if tensor.ndim != len(letters):
            raise ValueError(
                f"{name}: {argument} must have {len(letters)} dimensions [{', '.join(letters)}]; "
                f"got {tensor.ndim}: {list(tensor.shape)}"
            )
        for letter, size in zip(letters, tensor.shape):
            known_size = sizes.get(letter)
            if known_size is None:
                sizes[letter], origin[letter] = known_size, _ = (int(letter) if letter.isdigit() else size), argument
            if size != known_size:
                known = [f"{k}={sizes[k]} (from {origin[k]})" for k in letters if origin.get(k, argument) != argument]
                expected = f" with {', '.join(known)}" if known else ""
                raise ValueError(f"{name}: {argument} must be [{', '.join(letters)}]{expected}; got {list(tensor.shape)}")
    return sizes


def count(name: str, argument: str, value: Any) -> Any:
    """A non-negative integer; booleans are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: {argument} must be an integer >= 0; got {value!r} ({type(value).__name__})")
    if value < 0:
        raise ValueError(f"{name}: {argument} must be an integer >= 0; got {value}")
    return value
