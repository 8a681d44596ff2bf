"""Passes on CPUs: a prepared pass keeps no argument, follows the number of threads, and counts every buffer."""

import gc
import weakref
from functools import partial

import pytest
import torch

import sonde
from helpers.memory import allocations
from helpers.operators import Target, cotangents, floats, leaves
from sonde.operators import OPERATORS

pytest.importorskip("numba")
GRADED = [name for name, operator in OPERATORS.items() if operator.graded]
MANY = {
    "sample_sum": dict(B=2, C=24, H=48, W=48, Q=40, D=3, heads=150, layout="uniform"),
    "sample_dot": dict(B=2, C=24, H=48, W=48, Q=40, D=3, heads=150, layout="uniform"),
    "deformable_aggregation": dict(B=2, C=2, H=6, W=7, Q=20, D=3, heads=70, cams=2, L=10),
}  # more than a kernel sums in one go


def test_prepared_passes_keep_no_argument(operator, target):
    """No prepared call keeps an argument alive after its caller has dropped it."""
    args = leaves(operator.make(B=1, C=8, H=5, W=7, Q=3, D=2, heads=2, layout="uniform", device=target.device))
    out = operator.call(target)(*args)
    torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents([out]))
    seen = [weakref.ref(args[i]) for i in floats(args)]
    del args, out
    gc.collect()
    assert not any(x() is not None for x in seen)


@pytest.mark.parametrize("name", GRADED)
def test_threads_may_change_between_passes(name):
    """A call prepared with one number of threads also runs with another, forward and backward."""
    operator = OPERATORS[name]
    args = leaves(operator.make(B=1, C=40, H=5, W=7, Q=30, D=9, heads=2, layout="uniform"))
    wanted, found = [args[i] for i in floats(args)], []
    for before, after in ((1, 1), (1, 3), (3, 1), (2, 3)):
        torch.set_num_threads(before)
        out = operator.call("numba")(*args)
        torch.set_num_threads(after)
        found.append([out, *torch.autograd.grad(out, wanted, cotangents([out]))])
    # sums inside torch's own matrix products depend on the number of threads
    same = partial(torch.allclose, atol=1e-4) if operator.by_torch else torch.equal
    assert all(same(a, b) for others in found[1:] for a, b in zip(found[0], others))


@pytest.mark.parametrize("name", MANY)
def test_workspace_of_long_sums(name, monkeypatch):
    """More heads, levels or groups than one kernel sums are added up in a float64 buffer, which the plan counts."""
    operator, target = OPERATORS[name], Target("numba")
    torch.set_num_threads(1)
    args = leaves(operator.make(**MANY[name]))
    found = allocations(monkeypatch, operator, "numba")
    plan = sonde.explain(operator.call(target), *args)
    out = operator.call(target)(*args)
    torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents([out]))
    for phase, launched in zip(("forward", "backward"), found, strict=True):
        used = launched.peak - launched.returned
        claimed = max(k.workspace for k in plan.kernels if k.phase == phase)
        assert used <= 1.05 * claimed + 8192, f"{phase} takes {used}, the plan says {claimed}"
