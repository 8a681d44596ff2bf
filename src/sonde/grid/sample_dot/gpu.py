"""``sample_dot`` on GPUs: ∂T/∂coef of the form in ``_epipolar``; its gradients are the other derivatives of T."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ...jit.steps import Pass
from .._epipolar.gpu import derivatives

NAMES = dict(images="images", samples="samples", rows="queries", depths="depths")  # operand of T → argument


def forward_pass(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> Pass:
    given = dict(images=images, samples=samples, rows=queries, depths=depths)
    dtype = torch.promote_types(images.dtype, queries.dtype)
    return derivatives({"coef": "out"}, given, num_octaves, dtype=dtype).returning_one()


def backward_pass(
    grad: Tensor, images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int,
    *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    given = dict(coef=grad, images=images, samples=samples, rows=queries, depths=depths)
    return derivatives(dict(compress(NAMES.items(), needs)), given, num_octaves, deterministic=deterministic)
