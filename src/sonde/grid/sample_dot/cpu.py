"""``sample_dot`` on CPUs: the derivative of the form by its coefficients, and the other derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from .. import _cpu_form as form


def forward(images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor | None, num_octaves: int) -> Tensor:
    (out,) = form.derivatives(["coef"], images, samples, depths, num_octaves, rows=queries)
    return out.to(torch.promote_types(images.dtype, queries.dtype))


def backward(grad, images, samples, queries, depths, num_octaves, *, needs: Sequence[bool], deterministic: bool):
    of = list(compress(["images", "samples", "rows", "depths"], needs))
    found = form.derivatives(of, images, samples, depths, num_octaves, coef=grad, rows=queries)
    return [g.to(x.dtype) for g, x in zip(found, compress((images, samples, queries, depths), needs))]
