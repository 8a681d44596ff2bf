"""The command line: what it prints, what it refuses, and that no speed-up is ever shown for a wrong result."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.operators import floats
from sonde import __version__
from sonde.cli import bench, check, doctor, environment, main, plot, protocol, timing
from sonde.operators import OPERATORS, Operator

ROOT = Path(__file__).parents[1]
TINY = dict(B=2, C=4, H=6, W=7, Q=12, D=3, heads=2, octaves=2)
CLOUD = dict(M=12, N=20, F=8, k=3, radius=1.2)
CPU = torch.device("cpu")


MEASURED = [name for name, operator in OPERATORS.items() if "bench" not in operator.refuses]


def small(operator: Operator) -> dict:
    return CLOUD if operator.engine == "_search" else TINY


@pytest.fixture
def tiny(monkeypatch):
    """Every operator has one case, small enough to be measured in a test; timings are short."""
    for operator in OPERATORS.values():
        sizes = small(operator)
        names = {"tiny": sizes, "smaller": sizes | {operator.letters.get("Q", "Q"): 5}, operator.typical: sizes}
        monkeypatch.setattr(operator.cases, "BENCH", names)
    monkeypatch.setattr(protocol, "SECONDS", 0.0)
    monkeypatch.setattr(protocol, "_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(protocol, "_host", lambda *a: {p: {"above": 1.0} for p in ("forward", "forward_backward")})


@pytest.fixture
def wrong(monkeypatch):
    """The definition of sample_sum moves by a thousandth, so that every implementation is wrong."""
    module = OPERATORS["sample_sum"].module(".reference")
    honest = module.sample_sum
    monkeypatch.setattr(module, "sample_sum", lambda *args: honest(*args) * 1.001)


def sonde(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


# --- the entry point


def test_version_and_help(capsys):
    assert sonde(capsys, "--version") == (0, f"sonde {__version__}\n", "")
    code, out, _ = sonde(capsys)
    assert code == 0
    assert all(command in out for command in ("doctor", "demo", "bench"))


def test_module_runs_and_import_stays_lean():
    """`python -m sonde` works from a checkout, and the library does not pay for the command line."""
    code = "import sys, sonde; print([m for m in ('rich', 'matplotlib', 'numba', 'triton', 'sonde.cli') if m in sys.modules])"
    lean = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert lean.stdout.strip() == "[]", lean.stderr
    version = subprocess.run([sys.executable, "-m", "sonde", "--version"], capture_output=True, text=True, env=_environment())
    assert (version.returncode, version.stdout) == (0, f"sonde {__version__}\n")


def _environment() -> dict:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT / "src")}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["benhc"], "Did you mean 'bench'? Valid: doctor, demo, bench"),
        (
            ["bench", "sample_sun"],
            "unknown operator 'sample_sun'. Did you mean 'sample_sum'? Valid: sample_sum, sample_dot, ",
        ),
        (["bench", "--case", "pixelsplat_trian"], "Did you mean 'pixelsplat_train'?"),
        (["bench", "--impl", "nunba"], "Did you mean 'numba'?"),
        (["bench", "--against", "egger"], "Did you mean 'eager'?"),
        (["bench", "--dtype", "float23"], "Did you mean 'float32'?"),
        (["bench", "--layout", "chanels_last"], "Did you mean 'channels_last'?"),
        (["bench", "--device", "gpu"], "Valid: cpu, cuda"),
        (["bench", "--device", "cuda:99"], "torch sees"),
        (["bench", "--device", "cpu", "--impl", "numba,nothing"], "unknown implementation 'nothing'"),
        (["bench", "--bakward"], "did you mean --backward?"),
        (["bench", "--json", "sample_sum"], "--json takes a file"),
        (["bench", "--json", "no/such/folder/x.json"], "folder that exists"),
        (["bench", "--plot", "x.bmp"], "must end in one of .png"),
        (["demo", "--plot", "x.bmp"], "must end in one of .png"),
    ],
)
def test_typos_are_answered_with_what_is_valid(capsys, argv, message):
    code, out, err = sonde(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("sonde: ")
    assert message in err


def test_interruption_leaves_without_traceback(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert sonde(capsys, "doctor") == (130, "", "sonde: interrupted\n")


# --- doctor


@pytest.fixture
def quick_doctor(monkeypatch):
    monkeypatch.setattr(doctor, "_smoke", lambda impl, kind: "tried")


def test_doctor_says_what_runs(capsys, quick_doctor):
    code, out, err = sonde(capsys, "doctor")
    assert (code, err) == (0, "")
    assert torch.__version__ in out
    assert "reference" in out
    assert "Cache:" in out
    assert "\x1b" not in out  # quiet where nobody watches


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


# --- bench


def test_bench_measures_and_checks(capsys, tiny, tmp_path):
    file = tmp_path / "records.json"
    argv = ["bench", "--device", "cpu", "--impl", "reference", "--backward", "--case", "tiny,smaller", "--json", str(file)]
    code, out, err = sonde(capsys, *argv)
    assert code == 0, out + err
    assert "\x1b" not in out
    assert "share of" in out
    records = json.loads(file.read_text())
    assert [(r["operator"], r["case"]) for r in records] == [(o, c) for o in MEASURED for c in ("tiny", "smaller")]
    assert all(f"Not in here: {name}: " in out for name in OPERATORS if name not in MEASURED)
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
        }  # half a batch; one neighbour, unless a case knows better
        channels = more.get(r["operator"], 8)
        assert r["counted"]["taps"] == 2 * (12 if r["case"] == "tiny" else 5) * 3 * channels
        operator = OPERATORS[r["operator"]]
        graded = {operator.arguments[i] for i in floats(operator.make(**small(operator)))}
        assert set(r["figures"]["sonde"]["errors"]) == {"out", *graded}
        for phase in ("forward", "forward_backward"):
            for name in ("sonde", "eager"):
                assert r["figures"][name][phase]["call_ms"] > 0
                assert r["figures"][name][phase]["peak_mib"] > 0
            assert r["speedup"]["eager"][phase]["call_ms"] > 0
            assert r["floor"][phase]["share"] > 0


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


# --- how things are measured


@pytest.mark.parametrize("name", MEASURED)
def test_reference_in_slices_is_the_reference(name, monkeypatch):
    """The check sums the images' gradient over slices of the queries; any slicing gives the same."""
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
    """Positions agree, and those on a pixel's edge stay on its side, also where 1/size is not a binary fraction."""
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
    """Of every contender, however long its first turn was."""
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
    """All calls are timed in further rounds, and of the times of each the least is kept."""
    rounds = iter(range(6))
    seen = []

    def call_ms(calls, device, seconds):
        now = next(rounds)
        seen.append({name: call() is not None for name, call in calls.items()})
        return {name: (3.0, 5.0, 2.0, 6.0, 4.0, 1.0)[now] * (2 if name == "eager" else 1) for name in calls}

    monkeypatch.setattr(timing, "call_ms", call_ms)
    command = ["run.py", "sample_sum", "--case", "tiny", "--impl", "reference", "--device", "cpu", "--again", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    assert _script("run").main() == 0
    assert seen == [{"sonde": True, "eager": True}] * 6
    (record,) = json.loads(next(tmp_path.rglob("tiny.json")).read_text())
    phases = ("forward", "forward_backward")
    assert [record["figures"]["sonde"][p]["call_ms"] for p in phases] == [2, 1]
    assert [record["speedup"]["eager"][p]["call_ms"] for p in phases] == [2, 2]


# --- demo, pictures and the report


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


def _script(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_become_tables(tmp_path, capsys):
    """run.py keeps records by kind, report.py writes them between the markers and nowhere else."""
    run, report = _script("run"), _script("report")
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
    assert "| `sample_sum` | large | 1.00 / 8.00 | **8.0×** | 1.00 / 8.00 | **8.0×** | 10.0 / 100 | 3.0e-07 |" in short
    assert "NVIDIA H200" in short
    assert "bfloat16" not in short
    assert "bfloat16" in full
    assert "50 %" in full
    assert report.main([*argv, "--check"]) == 0
    assert report.main(argv) == 0
    assert page.read_text() == text
