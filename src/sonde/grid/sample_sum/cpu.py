"""``sample_sum`` on CPUs: the derivative of the form by its rows, and the other derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import Tensor

from .. import _cpu_form as form


def forward(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    (out,) = form.derivatives(["rows"], images, samples, coef=weights)
    return out.to(images.dtype)


def backward(grad: Tensor, images: Tensor, samples: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool):
    found = form.derivatives(list(compress(["images", "samples", "coef"], needs)), images, samples, coef=weights, rows=grad)
    return [g.to(x.dtype) for g, x in zip(found, compress((images, samples, weights), needs))]
