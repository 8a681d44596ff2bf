"""Private names of torch: all in one file, and none of them is needed for a result."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from op.without_names import NAMES
from sonde.op import torch_private

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
MOST_NEEDED = ["_C._len_torch_dispatch_stack", "_C._dynamo.guards.TensorGuards", "_C._AutoDispatchBelowAutograd"]


def test_this_torch_has_them_all():
    assert not torch_private.MISSING
    assert len(NAMES) > 15


@pytest.mark.parametrize("names", [MOST_NEEDED, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["most needed", "all"])
def test_results_have_the_same_bits_without_a_name(names):
    env = {**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, HERE / "without_names.py", *names], env=env, capture_output=True, text=True, timeout=600)
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if re.fullmatch(r"\S+ [0-9a-f]{64} \w+", line)}
    assert found.keys() == {"nothing", *names}, done.stdout + done.stderr
    for name in names:
        assert found[name] == [found["nothing"][0], "missing"], name


PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-zA-Z]\w*|from torch(?:\.\w+)*\._\w+|forward_ad\._\w+")


def test_no_other_file_names_them():
    others = {
        str(file.relative_to(SOURCES)): found
        for file in SOURCES.rglob("*.py")
        if file.name != "torch_private.py" and (found := PRIVATE.findall(file.read_text()))
    }
    assert not others
