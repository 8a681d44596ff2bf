"""Named inputs of ``mm``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALL = {
    "odd_sizes": dict(B=3, M=13, K=7, N=11),
    "hostile": dict(B=2, M=9, K=33, N=5, layout="hostile"),
    "one_pixel": dict(B=2, M=1, K=1, N=1),
    "several_tiles": dict(B=1, M=70, K=40, N=66),
    "aligned": dict(B=1, M=64, K=32, N=64),
    "turned": dict(B=1, M=32, K=48, N=40, turned=True),
    "no_batch": dict(B=0, M=3, K=2, N=4),
    "no_rows": dict(B=2, M=0, K=3, N=4),
    "no_terms": dict(B=2, M=3, K=0, N=4),
}
BENCH = {
    "square_1024": dict(B=1, M=1024, K=1024, N=1024),
    "square_4096": dict(B=1, M=4096, K=4096, N=4096),
    "square_8192": dict(B=1, M=8192, K=8192, N=8192),
    "odd": dict(B=1, M=1000, K=300, N=777),
    "skinny": dict(B=1, M=65536, K=2304, N=64),
    "batched": dict(B=64, M=512, K=64, N=512),
}
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=2, M=64, K=64, N=64), dtype="float32", everywhere=True),
    dict(sizes=dict(B=1, M=2048, K=256, N=2048), dtype="bfloat16"),
    dict(sizes=dict(B=3, M=1000, K=300, N=777), dtype="float16"),
    dict(sizes=dict(B=1, M=33, K=20, N=65), dtype="float64"),
    dict(sizes=dict(B=1, M=64, K=32, N=64, wide=True), dtype="bfloat16"),
]


def make(
    B: int, M: int, K: int, N: int, *, turned: bool = False, wide: bool = False, layout: str = "",
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments of ``mm``; sizes that other operators have are ignored."""
    g = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(B, *shape, device=device, generator=g) for shape in ((M, K), (K, N)))
    if layout == "hostile":  # every other row is a thousand times larger
        a[:, ::2] *= 1e3
    a, b = a.to(dtype), b.to(torch.float64 if wide else dtype)
    return (a.mT.contiguous().mT, b.mT.contiguous().mT) if turned else (a, b)


def eager(a: Tensor, b: Tensor) -> Tensor:
    """What a user of plain PyTorch writes."""
    return a @ b


def count(B: int, M: int, K: int, N: int, **_: Any) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added."""
    return dict(read=B * (M * K + K * N), written=B * M * N, taps=B * M * N * K)
