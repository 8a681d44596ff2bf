"""Columns, or rows of a second factor, so far apart that offsets within a matrix need 64 bits (memory is only reserved)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.operators import HAS_GPU, value_and_grads
from helpers.spies import in_child
from sonde.operators import OPERATORS


def apart(x: Tensor, dim: int, step: int) -> Tensor:
    """The same numbers, `step` apart along a dimension and contiguous along the other one of the matrix."""
    strides = [0] * x.ndim
    strides[dim], strides[-1 if dim == -2 else -2] = step, 1
    huge = torch.empty(x.shape[dim] * step, dtype=x.dtype, device=x.device)
    return huge.as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize(
    ("name", "sizes", "which", "dim", "number"),
    [
        ("mm", dict(B=1, M=3, K=130, N=5), 1, -2, 60),
        ("mm", dict(B=1, M=5, K=130, N=3), 0, -1, 60),
        ("sympow", dict(B=9, n=8, T=8), 0, -1, 50),
        ("sympow", dict(B=5, n=30, T=2), 0, -1, 50),
        ("sympow_mm", dict(B=1, R=9, n=8, T=8, N=3), 0, -1, 50),
        ("sympow_mm", dict(B=1, R=9, n=30, T=2, N=3), 0, -1, 50),
        ("sympow_mm", dict(B=1, R=9, n=2, T=8, N=3), 1, -2, 120),
        ("sympow_mm", dict(B=1, R=9, n=2, T=8, N=60), 1, -1, 50),
        ("sympow_mm", dict(B=1, R=9, n=8, T=8, N=3, expand="m"), 0, -2, 50),
        ("sympow_mm", dict(B=1, R=9, n=30, T=2, N=3, expand="m"), 0, -2, 50),
    ],
    ids=str,
)
def test_far_columns(triton_target, name, sizes, which, dim, number):
    """Values and gradients are those of contiguous arguments. The stride times `number` has more than 32 bits."""
    operator = OPERATORS[name]
    args = list(operator.make(**sizes, dtype=torch.float16, device=triton_target.device))
    want = value_and_grads(operator.call("triton"), args)

    def compare() -> list[Tensor]:
        torch.set_num_threads(1)  # a forked child lacks its parent's threads
        found = value_and_grads(
            operator.call("triton"), [apart(x, dim, 2**31 // number + 1) if i == which else x for i, x in enumerate(args)]
        )
        return [t.cpu() for t in [*found[0], *found[1]]]

    torch.utils.deterministic.fill_uninitialized_memory, before = False, torch.utils.deterministic.fill_uninitialized_memory
    try:
        found = compare() if HAS_GPU else in_child(compare)  # an invalid pointer must not crash this process
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
    for x, y in zip(found, [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(x, y.cpu(), rtol=2e-3, atol=2e-3)


def test_a_result_may_be_larger_than_what_it_is_computed_from(triton_target):
    """The gradient of rows that are one row, expanded, needs offsets for all of them."""
    from sonde.power._dense.gpu import Slab
    from sonde.power._sympow.gpu import problem_of

    rows = 2**31 // 64
    one = Slab("x", (1, rows, 64), (0, 0, 1), torch.float16, True)
    grad = Slab("grad", (1, rows, 2304), (0, 0, 0), torch.float16, True)
    assert problem_of(one, 2, 8, True, 0, torch.float32, grad).far
    assert not problem_of(one._replace(shape=(1, rows // 2, 64)), 2, 8, True, 0, torch.float32, grad).far
