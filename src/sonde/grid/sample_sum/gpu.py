"""Triton implementation of ``sample_sum``: derivatives of the form in ``_gpu_form``."""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from ...op.plan import Kernel
from .. import _gpu_form as form

NAMES = dict(images="images", samples="samples", coef="weights")  # of the form's letters, in the order of the gradients


def forward(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    return form.derivatives(("rows",), images, samples, weights, dtype=images.dtype)[0]


def backward(grad: Tensor, images: Tensor, samples: Tensor, weights: Tensor, *, needs: list[bool], deterministic: bool):
    wants = tuple(compress(NAMES, needs))
    return form.derivatives(wants, images, samples, weights, grad, deterministic=deterministic)


def plan(images: Tensor, samples: Tensor, weights: Tensor, *, needs: list[bool], deterministic: bool) -> list[Kernel]:
    kernels = form.plan("forward", {"rows": "out"}, (images, samples, weights, None, None), 0, images.dtype)
    if any(needs):
        grad = torch.empty(*weights.shape[:3], images.shape[1], dtype=images.dtype, device="meta")
        wanted = dict(compress(NAMES.items(), needs))
        kernels += form.plan("backward", wanted, (images, samples, weights, grad, None), 0, deterministic=deterministic)
    return kernels
