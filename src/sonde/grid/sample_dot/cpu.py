"""``sample_dot`` on CPUs: the derivative of the form by its coefficients; its gradients are the other derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ...op.plan import Kernel
from .._epipolar import cpu as form

NAMES = dict(images="images", samples="samples", rows="queries", depths="depths")  # of the form's letters, as the gradients go


def forward(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> Tensor:
    (out,) = form.derivatives(["coef"], images, samples, depths, num_octaves, rows=queries)
    return out.to(torch.promote_types(images.dtype, queries.dtype))


def backward(
    grad: Tensor,
    images: Tensor,
    samples: Tensor,
    queries: Tensor,
    depths: Tensor | None,
    num_octaves: int,
    *,
    needs: Sequence[bool],
    deterministic: bool,
):
    return form.derivatives(list(compress(NAMES, needs)), images, samples, depths, num_octaves, coef=grad, rows=queries)


def plan(
    images: Tensor,
    samples: Tensor,
    queries: Tensor,
    depths: Tensor | None,
    num_octaves: int,
    *,
    needs: Sequence[bool],
    deterministic: bool,
) -> list[Kernel]:
    result = torch.promote_types(images.dtype, queries.dtype)
    given = (images, samples, depths, num_octaves)
    kernels = form.kernels({"coef": ("out", result)}, "forward", *given, rows=queries)
    if any(needs):
        grad = torch.empty(*queries.shape[:3], samples.shape[2], dtype=result, device="meta")
        values = zip(NAMES.items(), (images, samples, queries, depths))
        of = {x: (name, value.dtype) for (x, name), value in compress(values, needs) if value is not None}
        kernels += form.kernels(of, "backward", *given, coef=grad, rows=queries)
    return kernels
