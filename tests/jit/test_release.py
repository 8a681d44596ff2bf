"""Ahead-of-time builds: made without a GPU, found again elsewhere, never loaded where they do not belong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sonde.jit import release
from sonde.jit.release import MANIFEST, Task

ROOT = Path(__file__).parents[2]

# what a process that never saw these kernels compiles, for each architecture
USER = """
import json, sys, warnings
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from sonde.jit.workers import CompileOnly
found = []
triton.knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
arch = int(sys.argv[1])
driver.set_active(CompileOnly(GPUTarget("cuda", arch, 32)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from sonde.grid.sample_sum import cases, gpu
    args = cases.make(**cases.SMALL["one_of_each"])
    from sonde.op.library import decide
    out = decide(gpu, args)(*args)
    decide(gpu, (out, *args), [True] * 3)(out, *args)
from sonde.op.gpu import _compiled
print(json.dumps(dict(bound=len(_compiled), hits=found, warnings=[str(w.message) for w in caught if "sonde" in str(w.message)])))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Two architectures in one process, and a case that cannot be built: it says why, and the rest is built."""
    folder = tmp_path_factory.mktemp("build") / "made"
    good = [Task("sonde.grid.sample_sum", "one_of_each", "float32", "contiguous", arch) for arch in ("sm_80", "sm_90")]
    bad = good[0]._replace(case="no such case")
    done = {b.task: b for b in release.build([bad, *good], folder, 1)}
    assert "no such case" in done[bad].cause
    assert [(done[task].cause, bool(done[task].entries)) for task in good] == [(None, True)] * 2
    assert [t["arch"] for t in json.loads((folder / MANIFEST).read_text())["tasks"]] == ["sm_80", "sm_90"]
    return folder


def use(folder: Path | None, cache: Path, arch: int = 90) -> dict:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SONDE_RELEASE")}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "src")}
    if folder is not None:
        env["SONDE_RELEASE"] = str(folder)
    done = subprocess.run([sys.executable, "-c", USER, str(arch)], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_compiled_where_it_is_used(built, tmp_path):
    """Every kernel is found, for each architecture, after the folder has moved; without it, every kernel is compiled."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(built, moved)
    for arch in (80, 90):
        found = use(moved, tmp_path / f"cache{arch}", arch)
        assert found["hits"] == []  # the compiler is not even asked
        assert found["bound"] >= 2
        assert not found["warnings"]
    assert not any(use(None, tmp_path / "other")["hits"])


@pytest.mark.parametrize("what", ["triton", "kernels", "python", "format", "manifest"])
def test_a_mismatch_is_named_and_ignored(built, tmp_path, what):
    """Built with something else, or not finished: one warning says what, and the kernels are compiled as usual."""
    folder = tmp_path / "release"
    shutil.copytree(built, folder)
    if what == "manifest":
        (folder / MANIFEST).unlink()
    else:
        document = json.loads((folder / MANIFEST).read_text())
        (document if what == "format" else document["built_with"])[what] = "another"
        (folder / MANIFEST).write_text(json.dumps(document))
    assert what == "manifest" or what in release.mismatch(folder)
    if what in ("triton", "manifest"):
        found = use(folder, tmp_path / "cache")
        assert found["hits"]
        assert not any(found["hits"])
        assert len(found["warnings"]) == 1
        assert str(folder) in found["warnings"][0]
