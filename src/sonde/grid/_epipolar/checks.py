"""Checks shared by operators with a positional encoding of depths."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...op import checks


def check_encoding(name: str, n: Mapping[str, int], queries: Tensor, depths: Tensor | None, num_octaves: int) -> None:
    """`n` are the sizes of images ``[B, C, H, W]`` and queries ``[B, h, Q, C']``."""
    if checks.count(name, "num_octaves", num_octaves) and depths is None:
        raise ValueError(f"{name}: depths must be [B, Q, D] where num_octaves > 0 (got {num_octaves}); got None")
    if n["C'"] + 2 * num_octaves != n["C"]:
        raise ValueError(
            f"{name}: queries must have C - 2*num_octaves = {n['C']} - {2 * num_octaves} = {n['C'] - 2 * num_octaves} "
            f"channels (C from images); got {list(queries.shape)}"
        )
