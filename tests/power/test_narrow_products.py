"""Sums of 10⁵ terms in float32 on CPUs, where BLAS adds those of narrow matrices one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.power import attention, mm, sympow_dim, sympow_mm

LONG = 100_000
CASES = {
    "one number": (mm, (1, 1, LONG), (1, LONG, 1)),
    "few columns": (mm, (2, 40, LONG), (2, LONG, 3)),
    "few rows": (mm, (1, 3, LONG), (1, LONG, 40)),
    "gradient of few columns": (mm, (1, LONG, 3), (1, 3, 5)),
    "state": (lambda a, b: sympow_mm(a, b, 2, expand="m"), (1, 4, LONG), (1, LONG, 3)),
    "state, power 3": (lambda a, b: sympow_mm(a, b, 3, expand="m"), (1, 8, LONG // 4), (1, LONG // 4, 20)),
    "long φ": (lambda a, b: sympow_mm(a, b, 4, expand="k"), (1, 5, 24), (1, sympow_dim(24, 4), 3)),
    "one query": (lambda k, v: attention(torch.ones_like(k[:, :, :1]), k, v), (1, 1, LONG, 16), (1, 1, LONG, 16)),
    "few channels": (lambda k, v: attention(k[:, :, :20], k, v), (1, 1, LONG, 8), (1, 1, LONG, 8)),
    "other channels": (lambda k, v: attention(k[:, :, :20], k, v), (1, 1, LONG, 8), (1, 1, LONG, 5)),
    "many queries": (lambda q, v: attention(q, q[:, :, :9], v), (1, 1, LONG, 8), (1, 1, 9, 5)),
}


def random(*shape: int, seed: int) -> Tensor:
    """Positive numbers: their sums grow, so that rounding errors do, too."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("numba_target")
def test_long_sums(case):
    function, *shapes = CASES[case]
    given = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in given]
    out, want = function(*given), function(*exact)
    ct = random(*out.shape, seed=5)
    pairs = [(out, want)]
    if "quer" not in case and "channels" not in case:  # gradients of attention subtract sums that nearly cancel
        pairs += zip(torch.autograd.grad(out, given, ct), torch.autograd.grad(want, exact, ct.double()))
    else:
        pairs.append((torch.autograd.grad(out, given[1:], ct)[0], torch.autograd.grad(want, exact[1:], ct.double())[0]))
    for found, truth in pairs:
        assert (found.double() - truth).norm() <= 2e-6 * truth.norm()
