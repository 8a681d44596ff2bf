"""Labelled inputs of ``PointIndex``: the point clouds of the searches."""

from __future__ import annotations

from torch import Tensor

from .. import cases as clouds

SMALL = {name: sizes for name, sizes in clouds.SMALL.items() if sizes.get("layout") != "ragged"}
TARGETS = [dict(target, sizes={k: v for k, v in target["sizes"].items() if k != "layout"}) for target in clouds.TARGETS]
BENCH = {name: dict(sizes, B=1) for name, sizes in clouds.KNN.items()}


def make(**sizes) -> tuple[Tensor, None]:
    """Arguments of ``point_index``."""
    return clouds.make(**sizes)["points"], None
