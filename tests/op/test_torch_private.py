"""Private names of torch: all are in one file, and results need none of them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from op.without_names import NAMES, PARTS
from sonde.op import torch_private

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
MOST_NEEDED = [
    "_C._len_torch_dispatch_stack",
    "_C._dynamo.guards.TensorGuards",
    "_C._AutoDispatchBelowAutograd",
    "_functorch.autograd_function.enable_single_level_autograd_function",
    "Tensor._is_zerotensor",
]
REFUSED = {  # features that have no substitute, by private name: the part of `without_names` that is refused
    "_functorch.autograd_function.enable_single_level_autograd_function": "compiled",
    "_C._functorch.peek_interpreter_stack": "functionalize",
    "_C._functorch.maybe_get_level": "mapped_index",
}


def test_this_torch_has_them_all():
    assert not torch_private.missing()
    assert len(NAMES) == len(set(NAMES)) > 30


@pytest.mark.parametrize("names", [MOST_NEEDED, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["most needed", "all"])
def test_results_have_the_same_bits_without_a_name(names):
    """Values, gradients, transforms, traces and point indices keep their bits, or are refused with an error that has the name."""
    pytest.importorskip("numba")
    env = {**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, HERE / "without_names.py", *names], env=env, capture_output=True, text=True, timeout=900)
    found = {row["name"]: row for row in map(json.loads, filter(lambda line: line.startswith("{"), done.stdout.splitlines()))}
    assert found.keys() == {"nothing", *names}, done.stdout + done.stderr
    want = found["nothing"]["parts"]
    assert want.keys() == {part.__name__ for part in PARTS}
    for part, digest in want.items():
        assert re.fullmatch("[0-9a-f]{64}", digest), (part, digest)
    for name in names:
        assert found[name]["missing"] == [f"torch.{name}"]
        for part, got in found[name]["parts"].items():
            if part == REFUSED.get(name):
                assert f"this torch lacks torch.{name}" in got, (name, part)
                assert "NotImplementedError" in got, (name, part)
            else:
                assert got == want[part], (name, part)


PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-zA-Z]\w*|from torch(?:\.\w+)*\._\w+|forward_ad\._\w+")
OURS = {"self", "cls"}


def _private_attributes(file: Path) -> set[str]:
    """Private attributes that the file reads from tensors, storages and torch functions, rather than from its own objects."""
    owners = (torch.Tensor, torch.UntypedStorage, torch.autograd.Function, torch.autograd.forward_ad)
    theirs = {name for owner in owners for name in dir(owner) if name.startswith("_") and not name.startswith("__")}
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if node.attr in theirs and getattr(node.value, "id", "") not in OURS}


def test_no_other_file_names_them():
    others = {
        str(file.relative_to(SOURCES)): found
        for file in SOURCES.rglob("*.py")
        if file.name != "torch_private.py" and (found := [*PRIVATE.findall(file.read_text()), *_private_attributes(file)])
    }
    assert not others


def test_every_name_goes_through_find():
    """Otherwise the test above could not hide a name, and the file could fail where torch lacks it."""
    file = SOURCES / "sonde/op/torch_private.py"
    code = re.sub(r'""".*?"""|"[^"]*"', "", file.read_text(), flags=re.DOTALL)
    assert set(PRIVATE.findall(code)) == {"forward_ad._current_level"}  # a changing number, read where its existence is known
    assert _private_attributes(file) == {"_cdata", "_current_level", "_version"}  # attributes of single objects, read the same way
    assert {"UntypedStorage._cdata", "autograd.forward_ad._current_level", "Tensor._version"} <= set(NAMES)
