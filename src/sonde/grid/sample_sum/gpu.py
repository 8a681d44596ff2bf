"""Triton implementation of ``sample_sum``: derivatives of the form in ``_gpu_form``."""

from __future__ import annotations

from torch import Tensor

from ...op.plan import Kernel
from .. import _gpu_form as form
from .._reference import accumulator


def forward(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    B, h, Q, _ = weights.shape
    out = images.new_empty(B, h, Q, images.shape[1])
    form.derivatives(form.operands(images, samples, accumulator(images, samples, weights), coef=weights), {"rows": out})
    return out


def backward(grad: Tensor, images: Tensor, samples: Tensor, weights: Tensor, *, needs: list[bool], deterministic: bool):
    wide = accumulator(images, samples, weights)
    inputs = {"images": images, "samples": samples, "coef": weights}
    return form.gradients(inputs, needs, deterministic, images=images, samples=samples, wide=wide, coef=weights, rows=grad)


def plan(images: Tensor, samples: Tensor, weights: Tensor, *, needs: list[bool], deterministic: bool) -> list[Kernel]:
    names = {"images": "images", "samples": "samples", "coef": "weights"}
    needed = {k: v for (k, v), need in zip(names.items(), needs) if need}
    operands = (images, samples, weights)
    return form.plan("forward", {"rows": "out"}, False, *operands) + form.plan("backward", needed, deterministic, *operands)
