"""``sonde demo``: every operator on a part of a real workload."""

from __future__ import annotations

import json

from helpers.commands import CPU, MEASURED, sonde
from sonde.cli import bench, protocol
from sonde.operators import OPERATORS


def test_demo(capsys, tiny, monkeypatch):
    monkeypatch.setattr(bench, "device", lambda name: CPU)
    honest = protocol.measure
    monkeypatch.setattr(
        protocol, "measure", lambda job, *a, **k: honest(protocol.Job(job.operator, job.case, job.sizes, CPU, "reference"), *a, **k)
    )
    code, out, err = sonde(capsys, "demo")
    assert (code, err) == (0, "")
    assert all(name in out for name in OPERATORS)  # some with a reason why not
    assert "a part of each case" in out
    code, out, _ = sonde(capsys, "demo", "--json")
    assert code == 0
    assert [r["operator"] for r in json.loads(out)] == MEASURED
