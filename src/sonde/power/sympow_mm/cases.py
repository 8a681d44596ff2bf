"""Named inputs of ``sympow_mm``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._sympow.basis import dimension
from .._sympow.reference import power_of

SMALL = {
    "odd_sizes": dict(B=3, R=13, n=3, T=3, N=5, power=2),
    "hostile": dict(B=2, R=9, n=5, T=1, N=3, power=3, layout="hostile"),
    "one_pixel": dict(B=2, R=1, n=1, T=1, N=1, power=1),
    "fourth": dict(B=1, R=7, n=2, T=2, N=3, power=4),
    "state": dict(B=2, R=11, n=2, T=3, N=5, power=2, expand="m"),
    "tiles_of_4": dict(B=2, R=17, n=3, T=4, N=6, power=2),
    "tiles_of_8": dict(B=1, R=20, n=2, T=8, N=16, power=2, accumulated=True),
    "state_of_4": dict(B=2, R=37, n=3, T=4, N=6, power=2, expand="m", accumulated=True),
    "unscaled": dict(B=1, R=7, n=2, T=4, N=3, power=2, expand="m", scaled=False),
    "no_batch": dict(B=0, R=4, n=2, T=2, N=3, power=2),
    "no_rows": dict(B=2, R=0, n=2, T=2, N=3, power=2, expand="m"),
    "no_columns": dict(B=1, R=4, n=2, T=2, N=0, power=2),
}
BENCH = {
    "query_d64": dict(B=64, R=1024, n=8, T=8, N=64, power=2),
    "state_d64": dict(B=64, R=1024, n=8, T=8, N=64, power=2, expand="m"),
    "query_d128": dict(B=16, R=1024, n=16, T=8, N=128, power=2),
    "query_d32_p3": dict(B=16, R=1024, n=4, T=8, N=32, power=3),
}
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=2, R=256, n=8, T=8, N=64, power=2), dtype="float32", everywhere=True),
    dict(sizes=dict(B=2, R=256, n=8, T=8, N=64, power=2), dtype="bfloat16"),
    dict(sizes=dict(B=2, R=256, n=8, T=8, N=64, power=2, expand="m", accumulated=True), dtype="bfloat16"),
    dict(sizes=dict(B=2, R=100, n=4, T=3, N=33, power=3), dtype="float16"),
    dict(sizes=dict(B=2, R=100, n=4, T=4, N=32, power=2, expand="m"), dtype="float64"),
    dict(sizes=dict(B=2, R=100, n=3, T=2, N=7, power=4, expand="m"), dtype="float32"),
    dict(sizes=dict(B=2, R=100, n=4, T=4, N=32, power=2, wide=True), dtype="bfloat16"),
]


def make(
    B: int, R: int, n: int, T: int, N: int = 3, *, power: int = 2, expand: str = "k", scaled: bool = True,
    accumulated: bool = False, wide: bool = False, layout: str = "", dtype: torch.dtype = torch.float32, device: str = "cpu",
    seed: int = 0, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``sympow_mm``; sizes that other operators have are ignored."""
    g = torch.Generator(device).manual_seed(seed)
    D = dimension(n * T, power, T)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    a = random(B, R, n * T)
    b = random(B, D if expand == "k" else R, N)
    c = random(B, R if expand == "k" else D, N) if accumulated else None
    if layout == "hostile":  # far apart in size
        a[..., ::2] *= 30
    a, b = a.to(dtype), b.to(torch.float64 if wide else dtype)
    a = a if expand == "k" else a.mT  # as keys lie in memory
    return a, b, power, expand, T, 0.5, scaled, None if c is None else c.to(dtype), 1.5, 0.75 if accumulated else 0.0


def eager(
    a: Tensor, b: Tensor, power: int, expand: str, d_tile: int, scale: float, scaled: bool, accumulate: Tensor | None,
    alpha: float, beta: float,
) -> Tensor:  # fmt: skip
    """What a user of plain PyTorch writes."""
    phi = power_of(a, power, d_tile, scaled) if expand == "k" else power_of(a.mT, power, d_tile, scaled).mT
    out = alpha * scale * (phi @ b)
    return out if accumulate is None else out + beta * accumulate


def count(B: int, R: int, n: int, T: int, N: int = 3, power: int = 2, expand: str = "k", **_: Any) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added."""
    D = dimension(n * T, power, T)
    rows, out = (D, R) if expand == "k" else (R, D)
    return dict(read=B * (R * n * T + rows * N), written=B * out * N, taps=B * R * D * N)
