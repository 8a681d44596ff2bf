"""Triton implementation of ``sample_dot``: derivatives of the form in ``_gpu_form``."""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from ...op.plan import Kernel
from .. import _gpu_form as form

NAMES = dict(
    images="images", samples="samples", rows="queries", depths="depths"
)  # of the form's letters, in the order of the gradients


def forward(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> Tensor:
    dtype = torch.promote_types(images.dtype, queries.dtype)
    return form.derivatives(("coef",), images, samples, None, queries, depths, num_octaves, dtype=dtype)[0]


def backward(
    grad: Tensor, images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: list[bool], deterministic: bool,
):  # fmt: skip
    wants = tuple(compress(NAMES, needs))
    return form.derivatives(wants, images, samples, grad, queries, depths, num_octaves, deterministic=deterministic)


def plan(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: list[bool], deterministic: bool,
) -> list[Kernel]:  # fmt: skip
    dtype = torch.promote_types(images.dtype, queries.dtype)
    kernels = form.plan("forward", {"coef": "out"}, (images, samples, None, queries, depths), num_octaves, dtype)
    if any(needs):
        grad = torch.empty(*queries.shape[:3], samples.shape[2], dtype=dtype, device="meta")
        given = (images, samples, grad, queries, depths)
        kernels += form.plan("backward", dict(compress(NAMES.items(), needs)), given, num_octaves, deterministic=deterministic)
    return kernels
