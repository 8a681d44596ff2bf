"""``sonde build``: it builds exactly what was requested, and rejects misspelt requests before anything starts."""

import ast
import json
import sys
from typing import get_args, get_origin, get_type_hints

import pytest
import torch

pytest.importorskip("triton")

from sonde.cli import main
from sonde.jit import release, winners
from sonde.jit.kernel import Tunable
from sonde.jit.release import Built, Entry
from sonde.operators import OPERATORS


@pytest.fixture
def asked(monkeypatch) -> list:
    """Record the tasks that reach the builder, and build nothing."""
    tasks = []

    def build(given, folder, num_workers):
        tasks.extend(given)
        for task in given:
            failed = "ptxas: too many registers" if task.dtype == "float16" else None
            yield Built(task, {"kernel": Entry("folder", "hash", {}, {})}, 1.0, failed)

    monkeypatch.setattr(release, "build", build)
    return tasks


def test_every_case_for_every_architecture(asked, tmp_path, capsys):
    """Operators × cases × dtypes × layouts × architectures, in default and in shipped configurations."""
    file = tmp_path / "built.json"
    assert main(["build", "--arch", "sm_80,sm_90", "--dtype", "float32", "-o", str(tmp_path / "out"), "--json", str(file)]) == 0
    assert {task.arch for task in asked} == {"sm_80", "sm_90"}
    assert {task.layout for task in asked} == {"contiguous", "channels_last"}
    shipped = {json.loads(f.read_text())["device"] for f in winners.SHIPPED.glob("*.json")}
    assert {task.device for task in asked if task.arch == "sm_80"} == {""}
    assert {task.device for task in asked if task.arch == "sm_90"} == {"", *(d for d in shipped if d.endswith(" sm_90"))}
    assert len(json.loads(file.read_text())) == len(asked)
    assert "sample_dot" in capsys.readouterr().out


def test_failures_are_listed(asked, tmp_path, capsys):
    args = ["build", "sample_sum", "--arch", "sm_90", "--case", "pixelsplat_infer", "--layout", "contiguous"]
    assert main([*args, "-o", str(tmp_path / "out")]) == 1
    assert "ptxas: too many registers" in capsys.readouterr().out


def test_functions_of_users(asked, tmp_path):
    """Users' functions are built instead of operators, for every architecture."""
    assert main(["build", "--arch", "sm_80,sm_90", "--call", "mylib.blur:all_sizes", "-o", str(tmp_path / "out")]) == 0
    assert {(task.operator, task.case) for task in asked} == {("mylib.blur:all_sizes", "")}
    assert {task.arch for task in asked} == {"sm_80", "sm_90"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--arch", "sm_90", "--call", "mylib.blur"], "must be MODULE:FUNCTION"),
        (["--arch", "90"], "must be an architecture of NVIDIA, such as sm_90"),
        (["--arch", ""], "name at least one"),
        (["--arch", "sm_90", "--case", "pixelspalt_infer"], "Did you mean 'pixelsplat_infer'?"),
        (["--arch", "sm_90", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["--arch", "sm_90", "--workers", "0"], "must be at least 1"),
        (["sample_som", "--arch", "sm_90"], "Did you mean 'sample_sum'?"),
    ],
)
def test_misspelt_requests(asked, args, message, capsys):
    assert main(["build", *args]) == 2
    assert message in capsys.readouterr().err
    assert not asked


def test_shipped_winners_are_known_and_fit():
    """Every shipped configuration has the right type for its kernel, and its device's file is found by the device's name."""
    for operator in OPERATORS.values():
        operator.kernels("triton")
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("sonde.")]
    kernels = {x.name: x for module in modules for x in vars(module).values() if isinstance(x, Tunable)}
    problems = {frozenset(x._fields): x for m in modules for x in vars(m).values() if hasattr(x, "_fields")}
    for file in winners.SHIPPED.glob("*.json"):
        document = json.loads(file.read_text())
        assert file.stem == winners.slug(document["device"])
        assert len(winners.shipped(document["device"])) == len(document["winners"]) > 0
        for row in document["winners"]:
            kernel = kernels[row["kernel"]]
            exact = {name: restored(value) for name, value in json.loads(row["constants"]).items()}
            sizes = {name: 1 << bits >> 1 for name, bits in json.loads(row["bucket"]).items()}
            problem_of = problems[frozenset([*exact, *sizes, *kernel.batch])]
            hints = get_type_hints(problem_of)
            of_batch = {name: ones(hints[name]) for name in kernel.batch}
            problem = problem_of(**of_batch, **exact, **sizes)
            config = winners.read(type(kernel.default(problem)), row["config"])
            assert config is not None, row
            assert kernel.fits(problem, config), row
            own = [kernel.default(problem), *kernel.fitting(problem)]
            key = kernel.key(problem, row["dtypes"], torch.device("cpu"))
            assert winners.portable(key)[2:] == (row["constants"], row["bucket"])
            assert kernel._known(row["config"], problem, key, own) == config, row


def ones(hint) -> int | tuple[int, ...]:
    """A value for a field that no winner depends on: a size, or sizes or strides."""
    return (1,) * (7 if ... in get_args(hint) else len(get_args(hint))) if get_origin(hint) is tuple else 1


def restored(value):
    """A field of a problem, from its form in a key."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value
