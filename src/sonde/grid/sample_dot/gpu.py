"""Triton implementation of ``sample_dot``: derivatives of the form in ``_epipolar.gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ...op.plan import Kernel
from .._epipolar import gpu as form

NAMES = dict(
    images="images", samples="samples", rows="queries", depths="depths"
)  # of the form's letters, in the order of the gradients


def decide_forward(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int):
    dtype = torch.promote_types(images.dtype, queries.dtype)
    run = form.decide(("coef",), images, samples, None, queries, depths, num_octaves, dtype=dtype)
    return lambda images, samples, queries, depths, _: run([images, samples, None, queries, depths])[0]


def decide_backward(
    grad: Tensor, images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: Sequence[bool], deterministic: bool,
):  # fmt: skip
    wants = tuple(compress(NAMES, needs))
    run = form.decide(wants, images, samples, grad, queries, depths, num_octaves, deterministic=deterministic)
    return lambda grad, images, samples, queries, depths, _: run([images, samples, grad, queries, depths])


def plan(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: Sequence[bool], deterministic: bool,
) -> list[Kernel]:  # fmt: skip
    dtype = torch.promote_types(images.dtype, queries.dtype)
    kernels = form.plan("forward", {"coef": "out"}, (images, samples, None, queries, depths), num_octaves, dtype)
    if any(needs):
        grad = torch.empty(*queries.shape[:3], samples.shape[2], dtype=dtype, device="meta")
        given = (images, samples, grad, queries, depths)
        kernels += form.plan("backward", dict(compress(NAMES.items(), needs)), given, num_octaves, deterministic=deterministic)
    return kernels
