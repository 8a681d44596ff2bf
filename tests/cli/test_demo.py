"""``sonde demo``: every operator on part of a real workload."""

from __future__ import annotations

import json
import os

import pytest

from helpers.commands import CPU, MEASURED, small, sonde
from sonde.cli import bench, demo, protocol
from sonde.operators import OPERATORS


def test_demo(capsys, tiny, monkeypatch):
    monkeypatch.setattr(bench, "device", lambda name: CPU)
    honest = protocol.measure

    def measure(job, *given, **options):
        assert job.inputs()  # the demo's own sizes are those of arguments
        return honest(protocol.Job(job.operator, job.case, small(job.operator), CPU, "reference"), *given, **options)

    monkeypatch.setattr(protocol, "measure", measure)
    monkeypatch.setattr(demo, "announce_compilation", lambda todo: None)
    monkeypatch.setattr(demo, "busy_cores", lambda: 0.0)
    code, out, err = sonde(capsys, "demo")
    assert code == 0
    assert err.startswith("[0/48] sample_sum pixelsplat_infer float32 contiguous reference: compiling and checking\n")
    assert all(name in out for name in OPERATORS)  # some only with a reason for not running
    assert "workloads scaled down" in out
    assert "are made for GPUs" in out
    code, out, _ = sonde(capsys, "demo", "--json")
    assert code == 0
    assert [r["operator"] for r in json.loads(out)] == MEASURED


def test_a_line_says_what_a_first_run_compiles(capsys, monkeypatch, tmp_path):
    pytest.importorskip("numba")
    monkeypatch.setattr(bench, "device", lambda name: CPU)
    monkeypatch.setattr("sonde.op.cpu_cache.cache_folder", lambda: tmp_path)
    demo.announce_compilation(demo.jobs())
    assert capsys.readouterr().err.startswith(f"Compiling the CPU kernels into {tmp_path}: about a minute")
    (tmp_path / "kernel").touch()
    demo.announce_compilation(demo.jobs())
    assert capsys.readouterr().err == ""


def test_beside_other_work(capsys, monkeypatch):
    """Threads wait for each other asleep, a line says that times are off, and a case without memory is no error."""
    failed = dict(operator="mm", case="square_1024", correct=False, wrong="out of memory", figures={})
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(bench, "device", lambda name: CPU)
    monkeypatch.setattr(bench, "measured", lambda todo, **_: [failed])
    monkeypatch.setattr(demo, "busy_cores", lambda: 3.0)
    code, out, _ = sonde(capsys, "demo")
    assert (code, os.environ["OMP_WAIT_POLICY"]) == (1, "passive")
    assert "WRONG: mm: out of memory" in out
    assert "Other work kept 3.0 of" in out


def test_cores_are_busy_if_none_was_idle(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, busy in ((1.9, 0.0), (2.5, 2.5)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert demo.busy_cores() == busy
