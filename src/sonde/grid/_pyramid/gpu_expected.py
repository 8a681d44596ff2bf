"""Expected results of the pyramid kernels, for tuning: their references, run on a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def host(table: bool, shapes: Tensor, starts: Tensor) -> tuple[int, ...]:
    """(h, w, start) of each level."""
    if table:
        return tuple(shapes.flatten().tolist())
    return tuple(torch.cat([shapes.reshape(-1, 2), starts.reshape(-1, 1)], 1).flatten().tolist())


def portions(queries: int, each: int) -> list[slice]:
    """Slices of queries with `each` numbers per query, small enough for the memory of the reference."""
    step = max(1, (1 << 25) // max(1, each))
    return [slice(q, q + step) for q in range(0, queries, step)]


def gradients(
    reference: Callable, levels: tuple[int, ...], flag: bool, some: Sequence[slice], grad: Tensor, features: Tensor,
    locations: Tensor, weights: Tensor, results: Sequence[Tensor | None], wide: torch.dtype,
) -> dict[int, Tensor]:  # fmt: skip
    """Expected results of a gradient kernel, keyed by the position of the argument."""
    leaf = features.detach().to(wide).requires_grad_()
    d_features, others = torch.zeros_like(leaf, memory_format=torch.contiguous_format), []
    for q in some:
        given = [leaf, *(x[:, q].detach().to(wide).requires_grad_() for x in (locations, weights))]
        with torch.enable_grad():
            out = reference(given[0], None, None, given[1], given[2], levels, flag)
        found = torch.autograd.grad(out, given, grad[:, q].to(wide))
        d_features += found[0]
        others.append(found[1:])
    wanted = [d_features, *(torch.cat(x, 1) for x in zip(*others))]
    return {6 + i: want for i, (want, result) in enumerate(zip(wanted, results)) if result is not None}
