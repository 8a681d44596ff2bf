"""Triton implementation of ``sample_sum``: derivatives of the form in ``_epipolar.gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ...op.plan import Kernel
from .._epipolar import gpu as form

NAMES = dict(images="images", samples="samples", coef="weights")  # of the form's letters, in the order of the gradients


def decide_forward(images: Tensor, samples: Tensor, weights: Tensor):
    run = form.decide(("rows",), images, samples, weights, dtype=images.dtype)
    return lambda images, samples, weights: run([images, samples, weights, None, None])[0]


def decide_backward(grad: Tensor, images: Tensor, samples: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool):
    run = form.decide(tuple(compress(NAMES, needs)), images, samples, weights, grad, deterministic=deterministic)
    return lambda grad, images, samples, weights: run([images, samples, weights, grad, None])


def plan(images: Tensor, samples: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool) -> list[Kernel]:
    kernels = form.plan("forward", {"rows": "out"}, (images, samples, weights, None, None), 0, images.dtype)
    if any(needs):
        grad = torch.empty(*weights.shape[:3], images.shape[1], dtype=images.dtype, device="meta")
        wanted = dict(compress(NAMES.items(), needs))
        kernels += form.plan("backward", wanted, (images, samples, weights, grad, None), 0, deterministic=deterministic)
    return kernels
