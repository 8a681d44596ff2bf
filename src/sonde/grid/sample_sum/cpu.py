"""``sample_sum`` on CPUs: ∂T/∂rows of the form in ``_epipolar``; its gradients are the other derivatives of T."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import by_threads
from .._epipolar.cpu import derivatives

NAMES = dict(images="images", samples="samples", coef="weights")  # operand of T → argument, in the order of the gradients


@by_threads
def forward_pass(images: Tensor, samples: Tensor, weights: Tensor) -> Pass:
    given = dict(images=images, samples=samples, coef=weights)
    return derivatives({"rows": "out"}, given, dtype=images.dtype).returning_one()


@by_threads
def backward_pass(
    grad: Tensor, images: Tensor, samples: Tensor, weights: Tensor, *, needs: Sequence[bool], deterministic: bool
) -> Pass:
    given = dict(rows=grad, images=images, samples=samples, coef=weights)
    return derivatives(dict(compress(NAMES.items(), needs)), given)
