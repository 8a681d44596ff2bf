"""What ``import sonde`` costs and what it needs."""

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"


def python(code: str, **env: str) -> str:
    """The output of `code` in a fresh interpreter that finds sonde but inherits nothing else from this process."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": str(SRC), **env},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OURS = "import sys, torch; before = set(sys.modules); import sonde, json; print(json.dumps(sorted(set(sys.modules) - before)))"
STANDARD = {"decimal", "fractions", "numbers", "statistics", "sqlite3", "json"}  # small modules of the standard library


def test_import_is_cheap():
    """Importing sonde takes at most 0.15 of torch's import, in processor time, which other work on the machine does not affect.

    It takes 0.05. Numba would add 0.2, SymPy 0.3, torch's compiler 0.7; the next test names modules that cost less. The garbage
    collector is off: one pass over torch's objects takes as long as our import, and may or may not fall into it.
    """
    code = (
        "import gc, time; start = time.process_time(); import torch; middle = time.process_time(); gc.disable(); import sonde; "
        "print((time.process_time() - middle) / (middle - start))"
    )
    assert min(float(python(code)) for _ in range(3)) < 0.15


def test_import_loads_no_compiler():
    """Beyond torch only our own modules and a few small ones of the standard library: no compiler, no terminal library."""
    loaded = json.loads(python(OURS))
    heavy = ("torch._dynamo", "torch._inductor", "torch._subclasses", "torch.fx.experimental", "torch.distributed", "torch.onnx")
    assert not [name for name in loaded if name.startswith(heavy)]
    packages = {name.split(".")[0].lstrip("_") for name in loaded}
    assert packages <= {"sonde", "torch"} | STANDARD
    assert "sonde" in packages


BLOCKED = """
import sys, importlib.abc

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

hidden = {missing}
real = importlib.util.find_spec if hasattr(importlib, "util") else None
sys.meta_path.insert(0, Blocked())
import importlib.util
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in hidden else plain(name, package)
import torch, sonde

images, samples, weights = torch.ones(1, 2, 3, 3), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 1)
images.requires_grad_()
out = sonde.sample_sum(images, samples, weights)
out.sum().backward()
assert out.flatten().tolist() == [1.0, 1.0], out
assert images.grad.sum() == 2
dot = sonde.sample_dot(images, samples, torch.ones(1, 1, 1, 2))
assert dot.item() == 2
plan = sonde.explain(sonde.sample_sum, images, samples, weights)
print(plan.impl)
for impl in sorted(hidden):
    try:
        sonde.sample_sum(images, samples, weights, impl=impl)
    except ValueError as refused:
        print(refused)
"""


@pytest.mark.parametrize("missing", [{"numba"}, {"triton"}, {"numba", "triton"}], ids=lambda m: "+".join(sorted(m)))
def test_works_without(missing):
    """Without either library the package imports and computes: `auto` uses the reference, explicit requests say what is missing."""
    impl, *refusals = python(BLOCKED.format(missing=missing)).splitlines()
    pytest.importorskip("numba") if "numba" not in missing else None
    assert impl == ("reference" if "numba" in missing else "numba")
    assert len(refusals) == len(missing)
    for name, message in zip(sorted(missing), refusals):
        assert f"impl='{name}'" in message
        assert f"needs {name}, which is not installed" in message


def test_other_libraries_names_need_no_import():
    """sonde.compat's modules load on first access, as the README writes them, and none is loaded before."""
    code = (
        "import sys, sonde; print([m for m in sys.modules if m.startswith('sonde.compat.')]); "
        "print(sonde.compat.torch.grid_sample.__name__, hasattr(sonde.compat, 'jax'))"
    )
    assert python(code).split() == ["[]", "grid_sample", "False"]


def test_kernels_load_on_first_use():
    """The first call that needs Numba imports it, and does not import Triton."""
    pytest.importorskip("numba")
    code = (
        "import sys, torch, sonde; a = torch.ones(1, 2, 3, 3), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 1); "
        "sonde.sample_sum(*a, impl='reference'); print('numba' in sys.modules); "
        "sonde.sample_sum(*a); print('numba' in sys.modules, 'triton' in sys.modules)"
    )
    assert python(code).split() == ["False", "True", "False"]


PUBLIC = ("", ".compat", ".compat.fused_grid_ops", ".compat.mmcv", ".compat.physicsnemo", ".compat.retention",
          ".compat.sparsedrive", ".compat.torch", ".compat.transformers", ".grid", ".jit", ".memory", ".nn", ".points",
          ".testing")  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_shows_the_public_names_and_no_others(name):
    """dir() shows exactly the public names; each exists and has a docstring, unless it is a constant."""
    module = import_module(f"sonde{name}")
    shown = {x for x in dir(module) if not x.startswith("_")}
    assert shown == set(module.__all__)
    assert len(module.__all__) == len(shown)
    assert module.__doc__
    for x in shown:
        found = getattr(module, x)
        assert isinstance(found, bool) or inspect.getdoc(found), f"{x} has no docstring"


def test_what_users_meet_in_plans_and_errors_is_exported():
    import sonde

    assert {"Determinism", "Neighbors", "Plan", "Unsupported", "explain", "jit"} <= set(sonde.__all__)
