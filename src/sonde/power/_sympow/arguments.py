"""Arguments that operators of symmetric powers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...op import checks
from .basis import MOST, default_tile


def basis(name: str, d: int, power: Any, d_tile: Any, shape: Sequence[int] = ()) -> tuple[int, int]:
    """The power and the tile size, checked; `shape` is the shape that d comes from, for messages."""
    checks.count(name, "power", power, least=1)
    if power > MOST:
        raise ValueError(f"{name}: power must be 1 to {MOST}; got {power}")
    if d < 1:
        raise ValueError(f"{name}: d must be at least 1; got {list(shape) or d}")
    if d_tile is None:
        return int(power), default_tile(d)
    checks.count(name, "d_tile", d_tile, least=1)
    if d % int(d_tile):
        raise ValueError(f"{name}: d_tile must divide d={d}; got {list(shape) or d} and d_tile={d_tile}")
    return int(power), int(d_tile)
