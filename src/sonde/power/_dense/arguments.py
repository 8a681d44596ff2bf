"""Checks of arguments, and leading dimensions: callers may pass any number, kernels see one batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...op import checks
from ...op.torch_private import constant_in_graphs

WIDEST = 256  # the most numbers in a row of queries, keys or values: what a tile holds


def matrices(name: str, least: int = 2, **operands: Any) -> tuple[tuple[int, ...], list[Tensor]]:
    """The leading dimensions that these tensors share, and each tensor with them merged into one batch dimension.

    The last `least` dimensions are not leading ones. A tensor whose leading dimensions cannot be viewed as one is copied.
    """
    (first, x), *others = operands.items()
    for argument, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor; got {type(tensor).__name__}")
        checks.dense(name, argument, tensor)
        if tensor.ndim < least:
            raise ValueError(f"{name}: {argument} must have at least {least} dimensions; got {tensor.ndim}: {list(tensor.shape)}")
    for argument, tensor in others:
        if tensor.ndim != x.ndim:
            raise ValueError(
                f"{name}: {first} and {argument} must have equally many dimensions; "
                f"got {x.ndim}: {list(x.shape)} and {tensor.ndim}: {list(tensor.shape)}"
            )
        if tensor.shape[:-least] != x.shape[:-least]:
            B = [prod(t.shape[:-least]) for t in (x, tensor)]
            raise ValueError(
                f"{name}: {argument} must be {list(x.shape[:-least])} in its leading dimensions, as {first} is (B={B[0]}); "
                f"got {list(tensor.shape)} (B={B[1]}). Use expand, which copies nothing"
            )
    return tuple(x.shape[:-least]), [batched(tensor, least) for tensor in operands.values()]


def batched(x: Tensor, least: int = 2) -> Tensor:
    """The tensor with all but the last `least` dimensions merged into one."""
    leading = x.ndim - least
    return x if leading == 1 else x[None] if leading == 0 else x.reshape(prod(x.shape[:leading]), *x.shape[leading:])


def unbatched(x: Tensor, leading: Sequence[int]) -> Tensor:
    """The tensor with its first dimension split into these."""
    return x if len(leading) == 1 else x[0] if not leading else x.reshape(*leading, *x.shape[1:])


def widths(name: str, **sizes: int) -> None:
    """Check the lengths of rows, by argument."""
    for argument, size in sizes.items():
        if not 1 <= size <= WIDEST:
            raise ValueError(f"{name}: {argument} must have rows of 1 to {WIDEST} numbers; got {size}")


@constant_in_graphs
def tf32() -> bool:
    """Whether float32 operands of a product may be rounded to tf32: torch's own switch, which is off unless a user asks.

    This is its newer name. The older one, ``allow_tf32``, raises an error if the user has set the newer.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def number(name: str, argument: str, value: Any) -> float:
    """A finite number. One that a graph computes from sizes becomes a constant, as it does in torch: schemas have no others."""
    known = int, float, torch.SymInt, torch.SymFloat
    if not isinstance(value, (*known, Tensor)) and getattr(value, "ndim", None) == 0:
        value = value.item()  # of NumPy; torch.compile sees np.float64 as an array without dimensions, not as a float
    if isinstance(value, bool) or not isinstance(value, known):
        raise TypeError(f"{name}: {argument} must be a number; got {checks.kind(value)}")
    try:
        found = float(value)
    except OverflowError:  # an integer
        found = float("inf")
    if not abs(found) < float("inf"):
        raise ValueError(f"{name}: {argument} must be finite; got {found}")
    return found
