"""Inputs of the pyramid operators: levels, and locations in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# locations that must not overflow, spread to other samples, or cause out-of-bounds reads
HOSTILE = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 1e7, -1e7, 0.0, 1.0, -0.125, 1.25, 2.0**31]

_REAL = dict(B=1, C=128, H=8, W=8, Q=4, D=32, heads=4)
_ODD = dict(B=1, C=17, H=5, W=7, Q=3, D=5, heads=3)
_DEEP = dict(B=1, C=20, H=5, W=7, Q=3, D=200, heads=1)
# as many cameras, heads and levels as models have, and so few anchors that their samples are split into slices
MODEL = dict(B=1, C=32, H=16, W=24, Q=3, D=50, heads=8, cams=6, L=4)
# these must compile without spills, on one architecture or everywhere; `on_device`: with levels that only kernels can read
TARGETS: list[dict[str, Any]] = [
    dict(sizes=_REAL, dtype="float32", everywhere=True),
    dict(sizes=_REAL, dtype="bfloat16"),
    dict(sizes=_ODD, dtype="float32", on_device=True),
    dict(sizes=_DEEP, dtype="float16"),
]


def halves(H: int, W: int, L: int) -> tuple[tuple[int, int], ...]:
    """Sizes of L levels, each half of the one before."""
    return tuple((-(-H // 2**k), -(-W // 2**k)) for k in range(L))


def scattered(shape: tuple[int, ...], layout: str, g: torch.Generator) -> Tensor:
    """Locations ``[…, 2]``. ``uniform``: in the image and a little around it. ``inside``: in the image. ``one_pixel``: all the
    same. ``hostile``: uniform, mixed with numbers that are huge, non-finite or exactly on an edge."""

    def random() -> Tensor:
        return torch.rand(*shape, 2, device=g.device, generator=g)

    if layout == "one_pixel":
        return exact(torch.full((*shape, 2), 0.55, device=g.device))
    places = exact(random() if layout == "inside" else 1.3 * random() - 0.15)
    if layout == "hostile":
        values = torch.tensor(HOSTILE, device=g.device)
        bad = values[torch.randint(len(HOSTILE), places.shape, device=g.device, generator=g)]
        places = torch.where(random() < 0.4, bad, places)
    return places


def exact(places: Tensor) -> Tensor:
    """Round to the nearest odd multiple of 2⁻¹³. Then pixel positions are exact in float32 at every level and never on an edge
    between pixels, so that kernels can be compared with float64."""
    return ((places * 2**12).floor() + 0.5) / 2**12
