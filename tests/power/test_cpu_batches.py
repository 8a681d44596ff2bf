"""Many small matrices on CPUs: computed several at a time, with the same results as one by one."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from helpers.operators import floats, value_and_grads
from sonde.op.cache import forget_calls
from sonde.operators import OPERATORS

CASES = [
    ("sympow_mm", dict(R=5, n=2, T=4, N=3)),
    ("sympow_mm", dict(R=5, n=2, T=4, N=3, expand="m")),
    ("attention", dict(T=6, S=9, d=8, e=3, heads=2, groups=2)),
    ("attention", dict(T=7, S=7, d=8, e=3, heads=2, causal=True)),
    ("power_attention", dict(T=40, d=8, heads=2, groups=2)),
    ("power_attention", dict(T=40, d=4, heads=2, power=4, chunk=16, gated=False)),
    ("power_attention", dict(T=37, d=8, heads=3, e=5, chunk=16, begun=True, returned=True)),
    ("power_attention", dict(T=1, d=8, heads=2, begun=True, returned=True)),
]


@pytest.mark.usefixtures("numba_target")
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_steps_do_not_grow_with_the_batch(name, sizes):
    """A call of torch for each matrix would make small matrices up to fifty times slower than plain PyTorch."""
    operator = OPERATORS[name]

    def steps(B: int) -> int:
        args = operator.make(**sizes, B=B)
        value_and_grads(operator.call("numba"), args)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            value_and_grads(operator.call("numba"), args)
        return sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))

    assert steps(40) <= 1.1 * steps(2)


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_bundles(numba_target, name, sizes, monkeypatch):
    """All at once, two at a time, and one at a time with few rows: equal, up to the rounding of sums."""
    operator = OPERATORS[name]
    args = operator.make(**sizes, B=3, dtype=torch.float64)
    want = [x for found in value_and_grads(operator.call(numba_target), args) for x in found]
    assert len(want) > len(floats(args)) - 2
    limits = (
        "_sympow.cpu.BLOCK",
        "attention.cpu_blocks.BLOCK",
        "power_attention.cpu_chunks.BLOCK",
        "power_attention.cpu_chunks.WEIGHTS",
    )
    for least in (1000, 400, 1):
        for limit in limits:
            module, constant = limit.rsplit(".", 1)
            monkeypatch.setattr(importlib.import_module(f"sonde.power.{module}"), constant, least)
        forget_calls()
        found = [x for part in value_and_grads(operator.call(numba_target), args) for x in part]
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    forget_calls()
