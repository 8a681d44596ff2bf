"""Batches with more entries than one axis of a GPU's grid has programs."""

from __future__ import annotations

import importlib

import pytest
import torch

from helpers.operators import value_and_grads
from sonde.jit import Unsupported
from sonde.op.cache import forget_calls
from sonde.operators import OPERATORS


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mm", dict(B=8, M=20, K=18, N=17)),
        ("sympow_mm", dict(B=8, R=20, n=2, T=4, N=17)),
        ("sympow_mm", dict(B=8, R=20, n=3, T=2, N=17, expand="m", power=3)),
        ("attention", dict(B=4, T=20, S=19, d=8, heads=2, groups=2, causal=True)),
        ("power_attention", dict(B=4, T=40, d=8, heads=2, groups=2, chunk=16, begun=True, returned=True)),
        ("power_attention", dict(B=4, T=16, d=5, heads=2, chunk=8)),
        ("power_attention", dict(B=4, T=1, d=8, heads=2, begun=True, returned=True)),
    ],
    ids=str,
)
def test_the_batch_takes_two_axes(triton_target, name, sizes, monkeypatch):
    """All entries are computed, each once, if an axis holds only four programs: every bit is the same."""
    operator, most = OPERATORS[name], importlib.import_module("sonde.power._dense.gpu_configs")
    args = operator.make(**sizes, device=triton_target.device)
    want, wants = value_and_grads(operator.call(triton_target), args)
    monkeypatch.setattr(most, "MOST", 4)
    forget_calls()
    found, founds = value_and_grads(operator.call(triton_target), args)
    forget_calls()
    assert len(want) + len(wants) > 2
    assert all(torch.equal(x, y) for x, y in zip([*found, *founds], [*want, *wants], strict=True))


def test_grids(triton_target):
    from sonde.power._dense import gpu_configs

    for batch in (0, 1, 65_535, 65_536, 100_000, 2**20 + 2**10):
        programs, y, z = gpu_configs.batch_grid(7, batch)
        assert (programs, y * z) == (7, batch)
        assert max(y, z) <= 65_535
    with pytest.raises(Unsupported, match=r"65537 .*no divisors"):
        gpu_configs.batch_grid(7, 65_537)
