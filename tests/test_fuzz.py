"""A few random calls in every run; ``-m slow`` runs ``SONDE_FUZZ_CALLS`` of them, starting at ``SONDE_FUZZ_SEED``."""

import os

import pytest
import torch

from fuzz import FUZZED, case, run
from helpers.spies import around
from sonde.operators import OPERATORS

CALLS, SEED = int(os.environ.get("SONDE_FUZZ_CALLS", "2000")), int(os.environ.get("SONDE_FUZZ_SEED", "0"))


@pytest.mark.asks("values")
@pytest.mark.parametrize("operator", FUZZED, ids=str)
def test_some_calls(operator, target):
    for seed in range(2 if target.interpreted else 12):
        run(case(seed, target, operator), target)


@pytest.mark.slow
def test_many_calls(target):
    for seed in range(SEED, SEED + (CALLS // 40 if target.interpreted else CALLS)):
        run(case(seed, target), target)


def _scaled(phase: str, out):
    return out * 1.001 if phase == "forward" else out


def test_a_wrong_result_is_found(monkeypatch, numba_target):
    """The fuzzer reports a wrong result."""
    around(monkeypatch, OPERATORS["sample_sum"].kernels("numba"), lambda phase, run, *args, **_: _scaled(phase, run(*args)))
    made = (case(seed, numba_target, OPERATORS["sample_sum"]) for seed in range(50))
    one = next(one for one in made if not one.wrong and one.args[0].dtype == torch.float32 and all(x.numel() for x in one.args))
    with pytest.raises(AssertionError, match="value: error"):
        run(one, numba_target)


def test_wrong_arguments_are_among_the_calls(numba_target):
    made = [case(seed, numba_target) for seed in range(40)]
    assert 3 < sum(bool(one.wrong) for one in made) < 25
