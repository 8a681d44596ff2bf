"""CONTRIBUTING.md's steps work: followed with the template in a copy of the project, they give an operator that the tests pick
up."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = re.search(r"^ +(Operator\(.*\),)$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)

PYTEST = ["-m", "pytest", "-p", "no:xdist", "-o", "addopts=", "--doctest-modules", "-m", "not slow and not gpu"]


def edited(file: Path, before: str, after: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), encoding="utf-8")


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the project with the template as an operator: its folder, a line in the family, an entry in the table."""
    for name in ("src", "tests", "examples", "template", "pyproject.toml"):
        there = ROOT / name
        (shutil.copytree if there.is_dir() else shutil.copy)(there, tmp_path / name)
    shutil.copytree(tmp_path / "template/weighted_sum", tmp_path / "src/sonde/grid/weighted_sum")
    family = tmp_path / "src/sonde/grid/__init__.py"
    edited(family, "\n__all__ = [", 'from .weighted_sum import weighted_sum\n\n__all__ = ["weighted_sum", ')
    edited(tmp_path / "src/sonde/operators.py", "\n_ALL = (\n", f"\n_ALL = (\n    {ENTRY[1]}\n")
    return tmp_path


def run(copy: Path, *argv: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "SONDE_CACHE_DIR": str(copy / "cache"), "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run([sys.executable, *argv], cwd=copy, env=env, capture_output=True, text=True, timeout=600)


def test_three_places_make_an_operator(copy):
    """The contract, plans, table and doctest tests pass, on Numba and in the interpreter; the commands list the operator."""
    pytest.importorskip("triton")
    pytest.importorskip("numba")
    contract = ["tests/test_contract.py", "tests/op/test_plan.py", "tests/test_operators.py", "tests/test_house.py"]
    only = ["-k", "weighted_sum or house or table or folder"]
    done = run(copy, *PYTEST, *contract, "src/sonde/grid/weighted_sum", *only)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1]) > 100, done.stdout[-300:]
    for command in (["explain", "weighted_sum", "--help"], ["bench", "weighted_sum", "--backward"]):
        done = run(copy, "-m", "sonde", *command)
        assert done.returncode == 0, done.stderr


def test_a_mistake_in_the_template_is_found(copy):
    """The contract catches a mistake: one wrong sign in the new operator's kernel fails it."""
    pytest.importorskip("numba")
    edited(copy / "src/sonde/grid/weighted_sum/cpu.py", "d_rows[b, q, c] = weights[b, q] *", "d_rows[b, q, c] = -weights[b, q] *")
    select = ["-k", "weighted_sum and numba and values_and_gradients and float32"]
    done = run(copy, *PYTEST, "-x", "tests/test_contract.py", *select)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "gradient of rows" in done.stdout
