"""``sonde explain`` and ``sonde tune``: their output, their errors, and that only tuning launches anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from sonde.cli import console, main
from sonde.jit import search as search_module
from sonde.jit import store, winners
from sonde.jit.kernel import _listeners, _searched
from sonde.jit.store import open_store
from sonde.jit.timing import Trial
from sonde.op.plan import explain
from sonde.operators import OPERATORS

SRC = Path(__file__).parents[2] / "src"
TINY = dict(B=1, C=4, H=3, W=3, Q=2, D=2, heads=1)
FEW = ["--case", "tiny", "--dtype", "float32", "--layout", "contiguous"]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """One tiny case; nothing is stored or shipped."""
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_stores", {})
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(winners, "SHIPPED", tmp_path)
    for operator in OPERATORS.values():
        monkeypatch.setattr(operator.cases, "SMALL", {"tiny": TINY, **operator.cases.SMALL})

    def forget():
        winners.shipped.cache_clear()
        winners.forget()
        _searched.clear()

    forget()
    yield
    forget()


@pytest.fixture
def quick(monkeypatch):
    """A search that times nothing: the third candidate is twice as fast as the default, the second does not compile."""
    asked = []

    def search(kernel, problem, tensors, *, num_workers, max_configs, budget_s, progress):
        asked.append((kernel.name, num_workers, max_configs, budget_s))
        configs = search_module.candidates(kernel, problem, max_configs)
        times = [20.0, None, 10.0]
        trials = []
        for i, config in enumerate(configs):
            us = times[i] if i < 3 else 30.0
            trials.append(Trial(config, (us,) * 5) if us else Trial(config, cause="does not compile:\nno such layout"))
            best = min((t for t in trials if not t.cause), key=lambda t: t.median_us)
            progress(len(trials), len(configs), best, trials[-1])
        return trials

    monkeypatch.setattr(search_module, "search", search)
    return asked


def sonde(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def shell(*argv: str, **env: str) -> subprocess.CompletedProcess:
    """Run a command in a process without the interpreter, like a user's."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SRC), **env}
    return subprocess.run([sys.executable, "-m", "sonde", *argv], capture_output=True, text=True, env=clean, timeout=120)


# --- explain


@interpreted
def test_explain_a_gpu_without_one():
    """A large case for a GPU that is absent is planned from tensors without memory."""
    done = shell("explain", "sample_sum", "--device", "cuda", "--deterministic")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sample_sum pixelsplat_train, float32, contiguous: triton on cuda")
    for word in ("forward", "backward", "_rows", "_pixel_sums", "block_q=2", "default", "run to run", "samples, weights", "MiB"):
        assert word in done.stdout
    done = shell("explain", "sample_dot", "--device", "cuda", "--no-backward", "--layout", "channels_last", "--json")
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert (kernel["kernel"], kernel["writes"], kernel["origin"], kernel["phase"]) == ("_form", ["out"], "default", "forward")
    assert kernel["candidates"] > 50


def test_explain_backward_is_the_default(capsys):
    found = [sonde(capsys, "explain", "sample_dot", "--device", "meta", *flags)[1] for flags in ([], ["--backward"])]
    assert found[0] == found[1]


@pytest.mark.parametrize(("device", "impl"), [("cpu", "numba"), ("meta", "reference")])
def test_explain_other_devices(capsys, device, impl):
    pytest.importorskip("numba")
    code, out, _ = sonde(
        capsys, "explain", "sample_dot", "--case", "odd_sizes", "--device", device, "--dtype", "bfloat16", "--json", "-"
    )
    found = json.loads(out)
    assert (code, found["impl"], found["case"], found["dtype"]) == (0, impl, "odd_sizes", "bfloat16")
    assert found["sizes"]["Q"] == 5


@interpreted
@pytest.mark.parametrize("name", OPERATORS)
def test_explain_knows_every_operator(capsys, name):
    code, out, _ = sonde(capsys, "explain", name, "--case", "odd_sizes", "--device", "cpu", "--impl", "triton", "--json")
    found = json.loads(out)
    assert (code, found["operator"], found["impl"]) == (0, name, "triton")
    assert {k["phase"] for k in found["kernels"]} == ({"forward", "backward"} if OPERATORS[name].graded else {"forward"})


def test_explain_wants_a_function():
    with pytest.raises(TypeError, match=r"must be a function, such as sonde\.knn; got 'knn'"):
        explain("knn", torch.zeros(1, 3))


def test_explain_launches_nothing_and_leaves_no_trace(capsys, monkeypatch):
    monkeypatch.setattr("sonde.jit.Pass.bind", None)
    for options in ([], ["--deterministic"]):
        assert sonde(capsys, "explain", "sample_sum", "--device", "cpu", *options)[0] == 0
        assert not torch.are_deterministic_algorithms_enabled()


@interpreted
def test_explain_says_where_a_configuration_comes_from(capsys, quick):
    argv = ["explain", "sample_sum", "--case", "tiny", "--device", "cpu", "--impl", "triton"]
    assert "default" in sonde(capsys, *argv)[1]
    assert sonde(capsys, "tune", *FEW)[0] == 0
    out = sonde(capsys, *argv)[1]
    assert "tuned" in out
    assert "default" not in out


@interpreted
def test_explain_refusal_of_a_policy(capsys):
    from sonde.jit import settings

    with settings.set("stored"):
        code, out, err = sonde(capsys, "explain", "sample_sum", "--case", "tiny", "--device", "cpu", "--impl", "triton")
    assert (code, out) == (1, "")
    assert "grid.rows: nothing is stored" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "sample_sun"], "Did you mean 'sample_sum'?"),
        (["explain", "sample_sum", "--case", "tinny"], "Did you mean 'tiny'?"),
        (["explain", "sample_sum", "--dtype", "float23"], "Did you mean 'float32'?"),
        (["explain", "sample_sum", "--layout", "chanels_last"], "Did you mean 'channels_last'?"),
        (["explain", "sample_sum", "--device", "gpu"], "Valid: auto, cpu, cuda, meta"),
        (["explain", "sample_sum", "--impl", "nunba"], "Did you mean 'numba'?"),
        (["explain", "sample_sum", "--impl", "numba", "--device", "meta"], "--impl numba needs"),
        (["explain", "sample_sum", "--json", "no/such/folder/x.json"], "folder that exists"),
        (["tune", "sample_sun"], "Did you mean 'sample_sum'?"),
        (["tune", "--case", "tinny"], "Did you mean 'tiny'?"),
        (["tune", "--dtype", "float23"], "Did you mean 'float32'?"),
        (["tune", "--policy", "bets"], "Did you mean 'best'?"),
        (["tune", "--policy", "any", "--again"], "--again is for --policy best"),
        (["tune", "--workers", "many"], "--workers must be a whole number of at least 1, got 'many'"),
        (["tune", "--max-configs", "0"], "--max-configs must be a whole number"),
        (["tune", "--budget", "-1"], "--budget must be a number of seconds above 0, got '-1'"),
        (["tune", "--budget", "nan"], "--budget must be"),
        (["tune", "--json", "sample_sum"], "--json takes a file"),
        (["tune", "--json", "no/such/folder/x.json"], "folder that exists"),
        (["tune", "--dryrun"], "did you mean --dry-run?"),
    ],
)
def test_refusals(capsys, quick, argv, message):
    code, out, err = sonde(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert not quick


# --- tune


@interpreted
def test_tune_needs_a_gpu_but_for_a_dry_run(tmp_path):
    done = shell("tune", SONDE_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a GPU" in done.stderr
    done = shell("tune", "--dry-run", "--dtype", "float32", SONDE_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("On no GPU; nothing is launched")
    assert len(done.stdout.splitlines()) < 80
    for word in ("pixelsplat_train", "fused_sample_ops", "grid.rows", "grid.form", "default", "candidates to try"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_in_half_precision():
    """Without a GPU, it is unknown whether there are tensor descriptors; a state is a tuple of tensors on the planned device."""
    pytest.importorskip("triton")
    done = shell("tune", "--dry-run", "mm", "attention", "power_attention", "--dtype", "bfloat16", "--layout", "contiguous")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("decoding", "of them", "power.step", "power.product", "power.attend"):
        assert word in done.stdout


@interpreted
def test_tune(capsys, quick, tmp_path):
    """Both modes and all gradients are tuned; the table shows the gains, and failures with their causes."""
    file = tmp_path / "x.json"
    code, out, err = sonde(capsys, "tune", *FEW, "--workers", "3", "--max-configs", "5", "--budget", "60", "--json", str(file))
    assert (code, err.splitlines()[0]) == (0, "[0/168] grid.rows: compiling")  # in a pipe, a line of progress every few seconds
    names = ["grid.rows", *["grid.form"] * 3, "grid.rows", *["grid.form"] * 2]
    names += ["grid.attend", "grid.attend_queries", *["grid.attend_pixels"] * 2, "grid.sample", "grid.sample_gradients"]
    for name in ("grid.deformable_aggregation", "grid.ms_deform_attn"):
        names += [name, *[f"{name}_gradients"] * 2]
    names += ["power.copy", *["power.product"] * 3, "power.expand", "power.gradient"]
    names += ["power.times", "power.gradient", "power.sums"]
    names += ["power.attend", "power.query_gradients", "power.key_gradients"]
    names += ["power.outputs", "power.attention_queries", "power.attention_keys"]
    assert [name for name, *_ in quick] == names
    assert {limits for _, *limits in map(tuple, quick) for limits in [tuple(limits)]} == {(3, 5, 60.0)}
    assert out.startswith("interpreter: 34 of 34 kernels searched")
    row = out.splitlines()[3]
    for word in ("grid.rows", "f32 f32 f32 f32", "C=4", "H≥2 W≥2 Q≥2 D≥2", "block_q=", "20.0", "10.0", "2.00×", " 5 ", " 1 "):
        assert word in row
    assert out.count("does not compile:\n  no such layout") == len(names)
    found = json.loads(file.read_text())
    assert (found["policy"], found["interrupted"], found["errors"], len(found["kernels"])) == ("best", False, [], len(names))
    for kernel in found["kernels"]:
        assert (kernel["searched"], kernel["default_us"], kernel["best_us"], kernel["gain"]) == (True, 20.0, 10.0, 2.0)
        assert kernel["failures"][0]["cause"].startswith("does not compile")
    assert len(open_store().winners()) == len(names)
    assert not _listeners


@interpreted
def test_what_is_stored_is_not_searched_again_unless_asked(capsys, quick):
    argv = ["tune", "sample_sum", *FEW]
    assert sonde(capsys, *argv)[0] == 0
    count = len(quick)
    code, out, _ = sonde(capsys, *argv)
    assert (code, len(quick)) == (0, count)
    assert out.startswith(f"interpreter: 0 of {count} kernels searched")
    assert " 10.0 " in out  # time of the winners
    _searched.clear()  # as in a new process
    assert sonde(capsys, *argv, "--again")[1].startswith(f"interpreter: {count} of {count} kernels searched")
    assert len(quick) == 2 * count


@interpreted
def test_policy_stored_says_what_is_not(capsys, quick):
    argv = ["tune", "sample_sum", *FEW, "--policy", "stored"]
    code, out, _ = sonde(capsys, *argv)
    assert (code, quick) == (1, [])
    assert out.startswith("Not stored for interpreter: 3 of 3; sonde tune searches")
    assert "grid.rows" in out
    code, out, _ = sonde(capsys, *argv, "--json")
    assert (code, len(json.loads(out)["missing"])) == (1, 3)
    sonde(capsys, "tune", "sample_sum", *FEW)
    assert sonde(capsys, *argv) == (0, "All 3 kernels with several configurations have a stored winner\n", "")


@interpreted
def test_policy_any_searches_nothing(capsys, quick):
    code, out, _ = sonde(capsys, "tune", "sample_sum", *FEW, "--policy", "any")
    assert (code, quick) == (0, [])
    assert "(default)" in out


@interpreted
def test_dry_run_launches_nothing(capsys, quick, monkeypatch):
    monkeypatch.setattr("sonde.jit.Pass.bind", None)
    code, out, _ = sonde(capsys, "tune", "sample_sum", *FEW, "--dry-run", "--max-configs", "4")
    assert (code, quick) == (0, [])
    assert "3 kernels with several configurations, 3 of them not tuned; 12 candidates to try" in out
    code, out, _ = sonde(capsys, "tune", "sample_sum", *FEW, "--dry-run", "--json")
    (case,) = json.loads(out)
    assert (case["operator"], case["case"]) == ("sample_sum", "tiny")
    assert {"grid.rows", "grid.form", "_pixel_sums"} <= {k["kernel"] for k in case["kernels"]}


@interpreted
@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--policy", "stored"]])
def test_nothing_to_tune_is_said(capsys, quick, options):
    code, out, _ = sonde(capsys, "tune", "--case", "no_queries", *options)
    assert (code, quick) == (0, [])
    assert "there is nothing to tune" in out
    assert sonde(capsys, "tune", "--case", "no_queries", "--json", *options)[0] == 0


@interpreted
def test_one_kernel_that_fails_does_not_stop_the_others(capsys, quick, monkeypatch):
    """The exit code is 1, the causes are printed, and the next case is tuned."""
    honest = search_module.search

    def search(kernel, problem, tensors, **options):
        trials = honest(kernel, problem, tensors, **options)
        return trials if kernel.name == "grid.form" else [Trial(t.config, cause="wrong result") for t in trials]

    monkeypatch.setattr(search_module, "search", search)
    code, out, _ = sonde(capsys, "tune", *FEW, "--max-configs", "3")
    assert code == 1
    assert "FAILED: sample_sum tiny float32 contiguous triton: grid.rows: none of 3 candidates can be used:" in out
    assert out.count("wrong result") >= 3
    assert any(w.key.kernel == "grid.form" for w in open_store().winners())


@interpreted
@pytest.mark.parametrize("swallowed", [True, False], ids=["amid a search that found something", "before it did"])
def test_interruption_keeps_what_was_found(capsys, quick, monkeypatch, swallowed):
    """An interrupted search with a result ends quietly, and the command ends after it."""
    honest = search_module.search

    def search(kernel, problem, tensors, **options):
        if len(quick) < 1:
            return honest(kernel, problem, tensors, **options)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        except KeyboardInterrupt:
            if not swallowed:
                raise
        return honest(kernel, problem, tensors, **options)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(search_module, "search", search)
    code, out, err = sonde(capsys, "tune", *FEW)
    assert (code, err.splitlines()[-1]) == (130, "sonde: interrupted; what was found is kept")
    count = 2 if swallowed else 1
    assert len(open_store().winners()) == count
    assert len(quick) == count
    assert "grid.rows" in out
    assert signal.getsignal(signal.SIGINT) is before
    assert not _listeners
    key = {w.key.kernel: w.key for w in open_store().winners()}["grid.rows"]
    assert open_store().claim(key, "another", 1)  # the lease was released


@interpreted
def test_progress_shows_kernel_candidates_and_best(capsys, quick, monkeypatch):
    from contextlib import contextmanager

    from sonde.cli import tune

    seen, totals = [], []

    @contextmanager
    def meter(total, show=True):
        totals.append((total, show))
        yield lambda done, text: seen.append((done, text))

    monkeypatch.setattr(tune, "meter", meter)
    sonde(capsys, "tune", "sample_sum", *FEW, "--max-configs", "3")
    assert totals == [(9, True)]
    assert seen[:4] == [
        (0, "grid.rows: compiling"),
        (1, "grid.rows 1/3, best 20.0 µs"),
        (2, "grid.rows 2/3, best 20.0 µs"),
        (3, "grid.rows 3/3, best 10.0 µs"),
    ]
    assert seen[-1] == (9, "grid.form 3/3, best 10.0 µs")


def test_bar(capsys, monkeypatch):
    """The real progress bar takes any text, even text that looks like markup."""
    pytest.importorskip("rich")
    monkeypatch.setattr(console, "interactive", lambda: True)
    with console.meter(3) as say:
        say(1, "grid.rows [1/3] best")
        say(3, "done")


@interpreted
def test_default_case_of_the_interpreter_is_small(capsys):
    code, out, _ = sonde(capsys, "tune", "sample_sum", "--dry-run", "--json")
    assert code == 0
    assert {case["case"] for case in json.loads(out)} == {"tiny"}
    assert {(case["dtype"], case["layout"]) for case in json.loads(out)} == {
        (dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("contiguous", "channels_last")
    }


@pytest.mark.gpu
def test_tune_on_the_device(capsys):
    """A real search with few candidates on a real device."""
    code, out, err = sonde(capsys, "tune", "sample_sum", *FEW, "--max-configs", "3", "--json", "-")
    found = json.loads(out)
    assert code == 0, err
    assert all(k["searched"] and k["best_us"] > 0 and not k["failures"] for k in found["kernels"])
    assert sonde(capsys, "tune", "sample_sum", *FEW, "--policy", "stored")[0] == 0


WITHOUT = """
import importlib.abc, importlib.util, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hidden())
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "triton" else plain(name, package)
from sonde.cli import main
code = main(sys.argv[1:])
assert "triton" not in sys.modules
sys.exit(code)
"""


@interpreted
def test_dry_run_without_triton(tmp_path):
    """Without triton a dry run lists every operator's kernels, configurations and candidates as usual; a search is refused."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SRC)}
    argv = ["tune", "--dry-run", "--case", "odd_sizes", "--dtype", "float32", "--layout", "contiguous", "--json"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *argv], capture_output=True, text=True, env=clean, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found, known = json.loads(done.stdout), json.loads(shell(*argv).stdout)
    assert [row["operator"] for row in found] == [name for name, operator in OPERATORS.items() if "tune" not in operator.refuses]
    for row in (*found, *known):
        for kernel in row["kernels"]:
            kernel.pop("triton", None)
    assert found == known
    done = subprocess.run([sys.executable, "-c", WITHOUT, "tune"], capture_output=True, text=True, env=clean, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "triton is not installed; --dry-run works without" in done.stderr


@interpreted
def test_explain_a_gpu_without_triton():
    """The plan is that of a machine with triton, and a line says so."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SRC)}
    argv = ["explain", "sample_sum", "--device", "cuda", "--json"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *argv], capture_output=True, text=True, env=clean, timeout=120)
    assert (done.returncode, done.stderr) == (0, "sonde: triton is not installed here; this is the plan where it is\n")
    assert json.loads(done.stdout) == json.loads(shell(*argv).stdout)
