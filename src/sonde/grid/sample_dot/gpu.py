"""Triton implementation of ``sample_dot``: derivatives of the form in ``_gpu_form``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...op.plan import Kernel
from .. import _gpu_form as form
from .._reference import accumulator


def forward(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> Tensor:
    B, Q, D, _ = samples.shape
    out = images.new_empty(B, queries.shape[1], Q, D, dtype=torch.promote_types(images.dtype, queries.dtype))
    wide = accumulator(images, samples, queries, depths)
    form.derivatives(form.operands(images, samples, wide, rows=queries, depths=depths, octaves=num_octaves), {"coef": out})
    return out


def backward(
    grad: Tensor, images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: list[bool], deterministic: bool,
):  # fmt: skip
    wide = accumulator(images, samples, queries, depths)
    inputs = {"images": images, "samples": samples, "rows": queries, "depths": depths}
    operands = dict(images=images, samples=samples, coef=grad, rows=queries, depths=depths, octaves=num_octaves)
    return form.gradients(inputs, needs, deterministic, wide=wide, **operands)


def plan(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: list[bool], deterministic: bool,
) -> list[Kernel]:  # fmt: skip
    names = {"images": "images", "samples": "samples", "rows": "queries", "depths": "depths"}
    needed = {k: v for (k, v), need in zip(names.items(), needs) if need}
    operands = (images, samples, queries, depths)
    return form.plan("forward", {"coef": "out"}, False, *operands) + form.plan("backward", needed, deterministic, *operands)
