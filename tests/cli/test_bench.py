"""``sonde bench``: what it measures, and that it never prints a speed-up for a wrong result."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.commands import MEASURED, small, sonde
from helpers.operators import floats
from sonde import __version__
from sonde.cli import check
from sonde.operators import OPERATORS


def test_bench_measures_and_checks(capsys, tiny, tmp_path):
    file = tmp_path / "records.json"
    argv = ["bench", "--device", "cpu", "--impl", "reference", "--backward", "--case", "tiny,smaller", "--json", str(file)]
    code, out, err = sonde(capsys, *argv)
    assert code == 0, out + err
    assert "\x1b" not in out
    assert "share of" in out
    records = json.loads(file.read_text())
    assert [(r["operator"], r["case"]) for r in records] == [(o, c) for o in MEASURED for c in ("tiny", "smaller")]
    assert all(f"Left out: {name}: " in out for name in OPERATORS if name not in MEASURED)
    for r in records:
        assert r["correct"]
        assert r["environment"]["torch"] == torch.__version__
        assert r["environment"]["sonde"] == __version__
        assert "commit" in r["environment"]
        more = {"grid_sample": 4, "deformable_aggregation": 32, "ms_deform_attn": 16}  # no octaves; but cameras, levels, heads
        more |= {
            "knn": 1 / 2,
            "radius_neighbors": 1 / 2,
            "knn_aggregate": 4,
            "radius_aggregate": 4 / 3,
        }  # half a batch; one neighbour, unless the case sets k
        channels = more.get(r["operator"], 8)
        operator = OPERATORS[r["operator"]]
        if not operator.by_torch:  # dense products count their terms differently
            assert r["counted"]["taps"] == 2 * (12 if r["case"] == "tiny" else 5) * 3 * channels
        graded = {operator.arguments[i] for i in floats(operator.make(**small(operator)))}
        assert set(r["figures"]["sonde"]["errors"]) == {"out", *graded}
        for phase in ("forward", "forward_backward"):
            for name in ("sonde", "eager"):
                assert r["figures"][name][phase]["call_ms"] > 0
                assert r["figures"][name][phase]["peak_mib"] > 0
            assert r["speedup"]["eager"][phase]["call_ms"] > 0
            assert r["floor"][phase]["share"] > 0


def test_an_operator_without_the_case_is_named(capsys, tiny):
    argv = ["bench", "sample_sum", "copy", "--device", "cpu", "--impl", "reference", "--case", OPERATORS["sample_sum"].typical]
    code, out, err = sonde(capsys, *argv)
    assert code == 0
    assert "sonde: copy is left out; its cases are tiny, smaller, contiguous" in err
    assert "\n  sample_sum" in out
    assert "\n  copy" not in out


def test_bench_prints_json_alone(capsys, tiny):
    code, out, _ = sonde(capsys, "bench", "sample_dot", "--device", "cpu", "--impl", "reference", "--case", "smaller", "--json")
    (record,) = json.loads(out)
    assert code == 0
    assert record["operator"] == "sample_dot"
    assert "forward_backward" not in record["figures"]["sonde"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_bench_takes_dtypes_and_layouts(capsys, tiny, dtype):
    argv = ["bench", "--device", "cpu", "--impl", "reference", "--case", "tiny", "--dtype", dtype, "--layout", "channels_last"]
    code, out, _ = sonde(capsys, *argv, "--json", "-")
    assert code == 0, out
    assert all(r["correct"] and r["layout"] == "channels_last" for r in json.loads(out))


def test_wrong_result_has_no_speedup(capsys, tiny, wrong):
    argv = ["bench", "sample_sum", "--device", "cpu", "--impl", "reference", "--case", "tiny", "--backward"]
    code, out, _ = sonde(capsys, *argv)
    assert code == 1
    assert "WRONG: sample_sum tiny: out is off by 1.0e-03 (at most 2.0e-06)" in out
    assert "no speed-up" in out
    code, out, _ = sonde(capsys, *argv, "--json", "-")
    (record,) = json.loads(out)
    assert code == 1
    assert record["speedup"] is None
    assert not record["correct"]
    assert record["wrong"].count("is off by") == 4  # the value and three gradients


@pytest.mark.parametrize("name", ["radius_search", "point_index"])
def test_what_cannot_be_measured_is_refused_with_the_reason(capsys, name):
    assert sonde(capsys, "bench", name) == (2, "", f"sonde: bench {name}: {OPERATORS[name].refuses['bench']}\n")


def test_baseline_that_cannot_run_is_a_result(capsys, tiny, monkeypatch):
    def too_large(*args):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(OPERATORS["sample_sum"].cases, "eager", too_large)
    code, out, _ = sonde(capsys, "bench", "sample_sum", "--device", "cpu", "--impl", "reference", "--case", "tiny")
    assert code == 0
    assert "eager did not run: out of memory\n" in out


def test_nan_is_wrong():
    verdict = check.Verdict({"value": float("nan"), "images": 1e-9}, {"value": 1.0, "images": 1.0})
    assert list(verdict.wrong) == ["value"]
