"""Pictures and tables of measured results."""

from __future__ import annotations

import json

import pytest

from helpers.commands import TINY, script
from sonde.cli import plot, protocol


def _record(operator: str, case: str, **changes) -> dict:
    phases = {p: {"call_ms": 2.0, "graph_ms": 1.0, "peak_mib": 10.0} for p in ("forward", "forward_backward")}
    eager = {p: {"call_ms": 9.0, "graph_ms": 8.0, "peak_mib": 100.0} for p in ("forward", "forward_backward")}
    figures = {"sonde": {"errors": {"value": 1.5e-7, "images": 3e-7}, **phases}, "eager": {"errors": {}, **eager}}
    record = dict(operator=operator, case=case, impl="auto", dtype="float32", layout="contiguous", correct=True, wrong=None)
    where = dict(
        device="NVIDIA H200", kind="cuda", threads=16, driver="1.2", torch="2.11", triton="3.6", numba=None, commit="abcdef"
    )
    record |= dict(sizes=TINY, environment=where, fits_l2=False, figures=figures, speedup=protocol._speedups(figures))
    record |= dict(counted=dict(read=1, written=1, taps=1000, bytes=dict(forward=2e6, forward_backward=6e6)))
    floor = {p: dict(kind="gather", ms=0.5, share=0.5) for p in ("forward", "forward_backward")}
    host = {p: dict(above=12.0) for p in ("forward", "forward_backward")}
    return record | dict(floor=floor, host_us=host) | changes


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    assert plot.save([_record("sample_sum", "a"), _record("sample_dot", "a")], str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_matplotlib_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert not plot.save([_record("sample_sum", "a")], str(tmp_path / "x.png"))
    assert capsys.readouterr().err.count("\n") == 1


def test_no_picture_of_wrong_results(capsys, tmp_path):
    assert not plot.save([_record("sample_sum", "a", speedup=None)], str(tmp_path / "x.png"))
    assert "no record has a speed-up" in capsys.readouterr().err


def test_results_become_tables(tmp_path, capsys):
    """run.py keeps records by kind; report.py writes them between the markers and nowhere else."""
    run, report = script("run"), script("report")
    run.keep(_record("sample_sum", "large", speedup=None), tmp_path)
    run.keep(_record("sample_dot", "large"), tmp_path)
    run.keep(_record("sample_sum", "large"), tmp_path)  # replaces the first
    run.keep(_record("sample_sum", "large", dtype="bfloat16"), tmp_path)
    file = tmp_path / "nvidia-h200" / "large.json"
    assert [(r["operator"], r["dtype"]) for r in json.loads(file.read_text())] == [
        ("sample_dot", "float32"),
        ("sample_sum", "bfloat16"),
        ("sample_sum", "float32"),
    ]
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- results:begin -->\nstale\n<!-- results:end -->\nbetween\n<!-- results:begin full -->\n<!-- results:end -->\n"
    )
    argv = [str(page), "--results", str(tmp_path)]
    assert report.main([*argv, "--check"]) == 1
    assert "stale" in page.read_text()
    assert report.main(argv) == 0
    text = page.read_text()
    short, full = text.split("between")
    assert short.startswith("before\n<!-- results:begin -->\n")
    assert "stale" not in text
    assert "| `sample_sum` | large | 8.0× | 8.0× | 10.0× less |" in short
    assert "| large | float32, contiguous | 1.00 / 8.00 | **8.0×** | 1.00 / 8.00 | **8.0×** | 10.0 / 100 | 3.0e-07 |" in full
    assert "NVIDIA H200" in short
    assert "bfloat16" not in short
    assert "bfloat16" in full
    assert "50 %" in full
    assert report.main([*argv, "--check"]) == 0
    assert report.main(argv) == 0
    assert page.read_text() == text


def _on_cpu(ms: float, eager: float) -> dict:
    record = _record("sample_sum", "large")
    record["environment"] = record["environment"] | dict(kind="cpu", device="Some CPU")
    for phase in ("forward", "forward_backward"):
        record["figures"]["sonde"][phase]["call_ms"] = ms
        record["figures"]["eager"][phase]["call_ms"] = eager
    return record | dict(speedup=protocol._speedups(record["figures"]))


def test_check_names_what_got_slower(tmp_path, capsys):
    """Compares device time on GPUs and the ratio to eager on CPUs; a machine without records is reported as such."""
    run = script("run")
    assert run.slower(_record("sample_sum", "large"), tmp_path) == []
    assert "no record of this device" in capsys.readouterr().err
    run.keep(_record("sample_sum", "large"), tmp_path)
    for ms, names in ((1.04, 0), (1.06, 1)):
        new = _record("sample_sum", "large")
        new["figures"]["sonde"]["forward"] = new["figures"]["sonde"]["forward"] | dict(graph_ms=ms)
        assert len(run.slower(new, tmp_path)) == names
    run.keep(_on_cpu(2.0, 10.0), tmp_path)
    assert run.slower(_on_cpu(4.0, 20.0), tmp_path) == []  # eager is slower, too, so the machine is slower and not our code
    assert [line.split(",")[1].split(":")[0] for line in run.slower(_on_cpu(2.0, 9.0), tmp_path)] == [
        " forward",
        " forward_backward",
    ]
