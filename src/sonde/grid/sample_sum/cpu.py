"""``sample_sum`` on CPUs: the derivative of the form by its rows; its gradients are the other derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ...op.plan import Kernel
from .._epipolar import cpu as form

NAMES = dict(images="images", samples="samples", coef="weights")  # of the form's letters, in the order of the gradients


def forward(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    (out,) = form.derivatives(["rows"], images, samples, coef=weights)
    return out.to(images.dtype)


def backward(grad: Tensor, images: Tensor, samples: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool):
    return form.derivatives(list(compress(NAMES, needs)), images, samples, coef=weights, rows=grad)


def plan(images: Tensor, samples: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    kernels = form.kernels({"rows": ("out", images.dtype)}, "forward", images, samples, coef=weights)
    if any(needs):
        grad = torch.empty(*weights.shape[:3], images.shape[1], dtype=images.dtype, device="meta")
        given = zip(NAMES.items(), (images, samples, weights))
        of = {x: (name, value.dtype) for (x, name), value in compress(given, needs)}
        kernels += form.kernels(of, "backward", images, samples, coef=weights, rows=grad)
    return kernels
