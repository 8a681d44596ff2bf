"""Labelled inputs of ``weighted_sum``: one list feeds tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# every edge a kernel can get wrong, small enough for the interpreter
SMALL = {
    "odd_sizes": dict(B=2, Q=7, C=5),
    "hostile": dict(B=2, Q=9, C=3),  # there are no coordinates here that could be hostile
    "one_pixel": dict(B=2, Q=1, C=3),
    "many_rows": dict(B=1, Q=300, C=2),
    "wide": dict(B=1, Q=3, C=200),
    "no_batch": dict(B=0, Q=3, C=2),
    "no_rows": dict(B=2, Q=0, C=2),
    "no_channels": dict(B=2, Q=3, C=0),
}
# the sizes that models use
BENCH = {"tokens": dict(B=16, Q=4096, C=256)}
# what tests/test_targets.py compiles; one case is compiled for every architecture
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=2, Q=64, C=32), dtype="float32", everywhere=True),
    dict(sizes=dict(B=1, Q=5, C=3), dtype="bfloat16"),
]


def make(
    B: int, Q: int, C: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **_: Any
) -> tuple[Tensor, Tensor]:
    """Arguments of ``weighted_sum``; sizes that other operators have are ignored."""
    g = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(B, Q, C, device=device, generator=g)
    return rows.to(dtype), torch.rand(B, Q, device=device, generator=g).to(dtype)


def eager(rows: Tensor, weights: Tensor) -> Tensor:
    """What a user of plain PyTorch writes."""
    return torch.einsum("bq,bqc->bc", weights, rows)


def count(B: int, Q: int, C: int, **_: Any) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added."""
    return dict(read=B * Q * (C + 1), written=B * C, taps=B * Q * C)
