"""How the benchmarks measure: references in slices, times in alternating rounds, peak memory."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from helpers.commands import CPU, MEASURED, script, small
from sonde.cli import check, environment, protocol, timing
from sonde.operators import OPERATORS


@pytest.mark.parametrize("name", MEASURED)
def test_reference_in_slices_is_the_reference(name, monkeypatch):
    """The check sums the images' gradient over slices of the queries; any slicing gives the same result."""
    operator = OPERATORS[name]
    args = operator.make(**small(operator), dtype=torch.float64)
    out = operator.reference(*args)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = check.forward_backward(operator.reference, check.leaves(args), cotangent)
    monkeypatch.setattr(check, "_budget", lambda device: 1)  # one query at a time
    value, *grads = check._definition(operator, args, cotangent, torch.float64, 10**9)
    torch.testing.assert_close(value, expected[0].detach())
    torch.testing.assert_close(tuple(grads), expected[1])


@pytest.mark.parametrize("size", [7, 64, 100])
def test_truth_sees_float32_pixel_positions(size):
    """The float64 reference uses the positions that float32 rounds to, even on pixel edges and where 1/size is inexact."""
    samples = (2 * torch.arange(size) + 1).float().div(size).sub(1).expand(2, size).T[None, None]
    samples = torch.cat([samples, torch.rand(1, 1, 1000, 2) * 2.4 - 1.2], 2)
    x = ((samples + 1) * size - 1) / 2
    u = check._pixel_exact(samples, torch.empty(1, 1, size, size))
    found = ((u + 1) * size - 1) / 2
    assert (found - x).abs().max() < 1e-11
    assert torch.equal(found.floor(), x.double().floor())


def test_peak_memory_counts_what_is_alive_at_once():
    x = torch.ones(1 << 18)  # 1 MiB
    timing.peak_mib(lambda: x + 1, CPU)
    assert timing.peak_mib(lambda: x + 1, CPU) == pytest.approx(1, abs=0.01)
    assert timing.peak_mib(lambda: [x + i for i in range(4)], CPU) == pytest.approx(4, abs=0.01)
    assert timing.peak_mib(lambda: [x + i for i in range(4)][:1] and None, CPU) == pytest.approx(4, abs=0.01)
    assert timing.peak_mib(lambda: [(x + i).sum() for i in range(4)], CPU) == pytest.approx(1, abs=0.01)


def test_contenders_take_turns():
    calls: list[str] = []
    timing.call_ms({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 0.0)
    assert calls == ["a", "b"] * (timing.REPEATS + 1)


def test_the_least_of_several_turns_counts(monkeypatch):
    """The smallest time of several rounds is reported for every contender, however long its first round took."""
    found = {"a": iter([12, 5, 7, 5, 5]), "b": iter([9, 1, 2, 3, 4])}
    monkeypatch.setattr(timing, "_events", lambda call, seconds: next(call))
    assert timing.call_ms(found, torch.device("cuda"), 10.0) == {"a": 5, "b": 1}
    found = {"a": iter([700, 600]), "b": iter([9, 10])}
    assert timing.call_ms(found, torch.device("cuda"), 0.0) == {"a": 600, "b": 9}


def test_host_cost_is_above_its_yardstick():
    cost = protocol._host(OPERATORS["sample_sum"], CPU, "reference", "float32", "contiguous")
    for phase, yardstick in (("forward", "torch.relu"), ("forward_backward", "autograd.Function")):
        assert cost[phase]["above"] == cost[phase]["sonde"] - cost[phase][yardstick] > 0


def test_commit_is_not_taken_from_a_repository_around_the_installation(monkeypatch):
    monkeypatch.setattr(environment, "_git", lambda folder, *arguments: "/somewhere/else")
    monkeypatch.setenv("SONDE_COMMIT", "abc")
    assert environment.commit() == "abc"


def test_again(tiny, monkeypatch, tmp_path):
    """Further rounds time all calls again and keep the smallest time of each."""
    rounds = iter(range(6))
    seen = []

    def call_ms(calls, device, seconds):
        now = next(rounds)
        seen.append({name: call() is not None for name, call in calls.items()})
        return {name: (3.0, 5.0, 2.0, 6.0, 4.0, 1.0)[now] * (2 if name == "eager" else 1) for name in calls}

    monkeypatch.setattr(timing, "call_ms", call_ms)
    command = ["run.py", "sample_sum", "--case", "tiny", "--impl", "reference", "--device", "cpu", "--again", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    assert script("run").main() == 0
    assert seen == [{"sonde": True, "eager": True}] * 6
    (record,) = json.loads(next(tmp_path.rglob("tiny.json")).read_text())
    phases = ("forward", "forward_backward")
    assert [record["figures"]["sonde"][p]["call_ms"] for p in phases] == [2, 1]
    assert [record["speedup"]["eager"][p]["call_ms"] for p in phases] == [2, 2]
