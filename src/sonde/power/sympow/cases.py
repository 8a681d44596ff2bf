"""Named inputs of ``sympow``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._sympow.basis import dimension

SMALL = {
    "odd_sizes": dict(B=13, n=3, T=3, power=2),
    "hostile": dict(B=9, n=5, T=1, power=3, layout="hostile"),
    "one_pixel": dict(B=1, n=1, T=1, power=1),
    "fourth": dict(B=5, n=2, T=2, power=4),
    "tiles_of_8": dict(B=20, n=2, T=8, power=2),
    "tiles_of_4": dict(B=17, n=3, T=4, power=2),
    "unscaled": dict(B=7, n=4, T=2, power=2, scaled=False),
    "full": dict(B=3, n=1, T=5, power=3),
    "no_rows": dict(B=0, n=2, T=3, power=2),
}
BENCH = {
    "d64_p2": dict(B=65536, n=8, T=8, power=2),
    "d128_p2": dict(B=16384, n=16, T=8, power=2),
    "d32_p3": dict(B=8192, n=4, T=8, power=3),
}
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=64, n=8, T=8, power=2), dtype="float32", everywhere=True),
    dict(sizes=dict(B=64, n=8, T=8, power=2), dtype="bfloat16"),
    dict(sizes=dict(B=64, n=4, T=3, power=3), dtype="float32", everywhere=True),
    dict(sizes=dict(B=64, n=4, T=3, power=3), dtype="float16"),
    dict(sizes=dict(B=9, n=4, T=1, power=4), dtype="float64"),
]


def make(
    B: int, n: int, T: int, *, power: int = 2, scaled: bool = True, layout: str = "", dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``sympow``; sizes that other operators have are ignored."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(B, n * T, device=device, generator=g)
    if layout == "hostile":  # far apart in size
        x[:, ::2] *= 30
    return x.to(dtype), power, T, -1, scaled


def eager(x: Tensor, power: int, d_tile: int, dim: int, scaled: bool) -> Tensor:
    """What a user of plain PyTorch writes."""
    from .._sympow.reference import power_of

    return power_of(x, power, d_tile, scaled)


def count(B: int, n: int, T: int, power: int = 2, **_: Any) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added."""
    D = dimension(n * T, power, T)
    return dict(read=B * n * T, written=B * D, taps=B * D)
