"""A hash of the bits of points, by which an index detects that they were written to after it was built."""

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
    """Canonical points ``[B, N, D]`` → ``[B]``; all implementations return the same."""
    return _point_hash(points.detach(), impl=impl)
