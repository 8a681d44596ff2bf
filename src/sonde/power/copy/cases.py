"""Named inputs of ``copy``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALL = {
    "odd_sizes": dict(B=3, M=13, N=7),
    "hostile": dict(B=2, M=70, N=9, order=(1, 2, 0)),
    "one_pixel": dict(B=1, M=1, N=1),
    "turned": dict(B=2, M=37, N=70, order=(0, 2, 1)),
    "reversed": dict(B=5, M=33, N=20, order=(2, 1, 0)),
    "every_second": dict(B=2, M=9, N=33, step=2),
    "long": dict(B=1, M=1, N=5000),
    "no_batch": dict(B=0, M=3, N=2),
    "no_columns": dict(B=2, M=3, N=0),
}
BENCH = {
    "contiguous": dict(B=1, M=16384, N=8192),
    "transposed": dict(B=1, M=16384, N=8192, order=(0, 2, 1)),
    "every_second": dict(B=1, M=16384, N=4096, step=2),
    "bthd_to_bhtd": dict(B=16, M=8192, N=64, split=16),
}
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=2, M=64, N=64), dtype="float32", everywhere=True),
    dict(sizes=dict(B=1, M=512, N=512, order=(0, 2, 1)), dtype="bfloat16"),
    dict(sizes=dict(B=3, M=20, N=9, step=2), dtype="float64"),
]


def make(
    B: int, M: int, N: int, *, order: tuple[int, ...] = (0, 1, 2), step: int = 1, split: int = 0,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **_: Any,
) -> tuple[Tensor]:  # fmt: skip
    """Arguments of ``copy``: [B, M, N] whose dimensions lie in memory in this `order`."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(B, M, N * step, device=device, generator=g).to(dtype)[..., ::step]
    if split:  # [B, split, M / split, N], a view of a tensor whose heads come after its tokens
        return (x.unflatten(1, (-1, split)).transpose(1, 2),)
    back = [order.index(i) for i in range(3)]
    return (x.permute(order).contiguous().permute(back) if order != (0, 1, 2) else x,)


def eager(x: Tensor) -> Tensor:
    """What a user of plain PyTorch writes."""
    return x.clone(memory_format=torch.contiguous_format)


def count(B: int, M: int, N: int, **_: Any) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added."""
    return dict(read=B * M * N, written=B * M * N, taps=B * M * N)
