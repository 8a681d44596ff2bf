"""Fixtures of the commands' tests."""

from __future__ import annotations

import pytest

from helpers.commands import small
from sonde.cli import protocol
from sonde.operators import OPERATORS


@pytest.fixture
def tiny(monkeypatch):
    """Every operator has one case, small enough to measure in a test; timings are short."""
    for operator in OPERATORS.values():
        sizes = small(operator)
        names = {"tiny": sizes, "smaller": sizes | {operator.letters.get("Q", "Q"): 5}, operator.typical: sizes}
        monkeypatch.setattr(operator.cases, "BENCH", names)
    monkeypatch.setattr(protocol, "SECONDS", 0.0)
    monkeypatch.setattr(protocol, "_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(protocol, "_host", lambda *a: {p: {"above": 1.0} for p in ("forward", "forward_backward")})


@pytest.fixture
def wrong(monkeypatch):
    """Shift the reference of sample_sum by a thousandth, so that every implementation looks wrong."""
    module = OPERATORS["sample_sum"].module(".reference")
    honest = module.sample_sum
    monkeypatch.setattr(module, "sample_sum", lambda *args: honest(*args) * 1.001)
