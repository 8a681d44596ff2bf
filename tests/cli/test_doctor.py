"""``sonde doctor``: reports what runs here, even if something is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.commands import sonde
from sonde import __version__
from sonde.cli import doctor, environment


@pytest.fixture
def quick_doctor(monkeypatch):
    monkeypatch.setattr(doctor, "_smoke", lambda impl, kind: "tried")


def test_doctor_says_what_runs(capsys, quick_doctor):
    code, out, err = sonde(capsys, "doctor")
    assert (code, err) == (0, "")
    assert torch.__version__ in out
    assert "reference" in out
    assert "Cache:" in out
    assert "\x1b" not in out  # no escape codes outside a terminal


def test_doctor_json(capsys, quick_doctor):
    code, out, _ = sonde(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["sonde"] == __version__
    assert found["devices"][0]["name"] == "cpu"
    assert any(row["impl"] == "reference" and row["runs"] for row in found["implementations"])
    assert {"folder", "writable", "mib"} <= found["cache"].keys()


def test_doctor_tries_an_implementation():
    assert "tried with gradients" in doctor._smoke("reference", "cpu")


def test_doctor_reports_failures_and_never_fails(capsys, monkeypatch, tmp_path):
    def broken(*args, **kwargs):
        raise RuntimeError("this part is broken")

    real = doctor.import_module
    monkeypatch.setattr(doctor, "import_module", lambda name: broken() if name == "numba" else real(name))
    monkeypatch.setattr(doctor, "_smoke", broken)
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(environment, "cpu_model", broken)
    monkeypatch.setattr(Path, "home", broken)
    monkeypatch.delenv("SONDE_CACHE_DIR", raising=False)
    code, out, _ = sonde(capsys, "doctor")
    assert code == 0
    assert out.count("this part is broken") >= 5
    code, out, _ = sonde(capsys, "doctor", "--json")
    assert code == 0
    assert json.loads(out)["versions"]["numba"] == {"error": "RuntimeError: this part is broken"}


def test_doctor_without_anything(capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("no")

    for name in ("_devices", "_implementations", "_cache"):
        monkeypatch.setattr(doctor, name, broken)
    monkeypatch.setattr(doctor, "_versions", lambda: {"torch": broken})
    code, out, _ = sonde(capsys, "doctor")
    assert code == 0
    assert out.count("OSError: no") == 4


def test_doctor_names_missing_packages(capsys, monkeypatch, quick_doctor):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(doctor, "import_module", missing)
    assert "not installed" in sonde(capsys, "doctor")[1]
