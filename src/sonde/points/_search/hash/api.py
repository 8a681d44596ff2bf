"""A hash of points' bits: it tells an index whether its points were written since, however that was done."""

from __future__ import annotations

import torch
from torch import Tensor

from ....op import checks
from ....op.register import operator
from . import reference


def _check(points: Tensor) -> dict[str, int]:
    return checks.shapes("point_hash", points=(points, "B N D"))


def _fake(points: Tensor) -> Tensor:
    return points.new_empty(_check(points)["B"], dtype=torch.int64)


_point_hash = operator(
    "point_hash(Tensor points) -> Tensor",
    package=__package__,
    reference=reference.point_hash,
    check=_check,
    fake=_fake,
    differentiable=(),
    no_grad=(0,),
)


def point_hash(points: Tensor, *, impl: str) -> Tensor:
    """``[B]`` of canonical points ``[B, N, D]``; the same number whoever computes it."""
    return _point_hash(points.detach(), impl=impl)
