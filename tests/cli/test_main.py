"""The entry point: help, misspelt requests, interruptions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.commands import ROOT, sonde
from sonde import __version__
from sonde.cli import COMMANDS, bench, console, doctor, plot


def test_version_and_help(capsys):
    assert sonde(capsys, "--version") == (0, f"sonde {__version__}\n", "")
    code, out, _ = sonde(capsys)
    assert code == 0
    assert all(command in out for command in ("doctor", "demo", "bench"))


def test_module_runs_and_import_stays_lean():
    """`python -m sonde` works from a checkout, and `import sonde` does not import the command line."""
    code = "import sys, sonde; print([m for m in ('rich', 'matplotlib', 'numba', 'triton', 'sonde.cli') if m in sys.modules])"
    lean = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert lean.stdout.strip() == "[]", lean.stderr
    version = subprocess.run([sys.executable, "-m", "sonde", "--version"], capture_output=True, text=True, env=_environment())
    assert (version.returncode, version.stdout) == (0, f"sonde {__version__}\n")


@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_and_version_do_without_torch(argv):
    """Help and version, by script or ``python -m sonde``, do not import torch; a later ``import sonde`` still has every name."""
    code = (
        "import sys; sys.argv = ['/some/where/bin/sonde', *sys.argv[1:]]; from sonde.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules); import sonde; print(sonde.knn.__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=_environment())
    assert done.stdout.endswith("False\nknn True\n"), done.stderr
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sonde", *argv], capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 0
    assert "sonde.cli" in done.stderr
    assert "torch" not in done.stderr


def test_progress_in_a_pipe_is_lines_on_stderr(capsys, monkeypatch):
    with console.progress(3) as begin:
        begin("one")
        begin("two")  # too soon after the first to be printed
        monkeypatch.setattr(console, "LINE_EVERY", 0.0)
    assert capsys.readouterr() == ("", "[0/3] one\n")
    with console.meter(2) as say:
        say(0, "a")
        say(1, "b")
    assert capsys.readouterr() == ("", "[0/2] a\n[1/2] b\n")
    with console.progress(3, show=False) as begin:
        begin("one")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_matplotlib_is_looked_for_before_the_work(capsys, monkeypatch, command):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "measured", None)  # so that nothing is measured
    code, out, err = sonde(capsys, command, "--plot", "x.png")
    assert (code, out) == (2, "")
    assert err == "sonde: --plot x.png: needs matplotlib, which is not installed; it comes with the extra sonde[plot]\n"


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
